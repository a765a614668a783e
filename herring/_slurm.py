"""What Slurm says about a job step: pure functions of its variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from herring._errors import InvalidArgumentError

_FIRST_PORT, _PORTS, _STEP = 20000, 10000, 101
_MOST_HOSTS = 1_000_000


@dataclass(frozen=True)
class Component:
    """The nodes of an allocation, or of one component of a heterogeneous job."""

    nodes: list[str]
    tasks: list[int]  #: That each node was asked for.


def hosts_of(text: str) -> list[str]:
    """The names of a hostlist in its order: "w[0-1,07],s3" -> w0, w1, w07, s3. Brackets may come more than once.

    `scontrol show hostnames` does the same, but is not there in most containers. Raises InvalidArgumentError.
    """
    return [host for part in _split(text) for host in _expanded(part, text)]


def first_host(text: str) -> str:
    """The first name of a hostlist."""
    hosts = hosts_of(text)
    if not hosts:
        raise InvalidArgumentError(f"Slurm's list of hosts is {text!r}, which names no host")
    return hosts[0]


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    parts, depth, begun = [], 0, 0
    for at, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(text[begun:at])
            begun = at + 1
    return [part for part in (*parts, text[begun:]) if part]


def _expanded(part: str, text: str) -> list[str]:
    bracket = re.fullmatch(r"([^\[\]]*)\[([0-9,-]+)\](.*)", part)
    if bracket is None:
        if "[" in part or "]" in part:
            raise InvalidArgumentError(f"Slurm's list of hosts is {text!r}, which cannot be read at {part!r}")
        return [part]
    before, ranges, after = bracket.groups()
    names: list[str] = []
    endings = _expanded(after, text)
    for each in ranges.split(","):
        low, _, high = each.partition("-")
        high = high or low
        if not low.isdigit() or not high.isdigit() or not 0 <= int(high) - int(low) < _MOST_HOSTS:
            raise InvalidArgumentError(f"Slurm's list of hosts is {text!r}, which cannot be read at {each!r}")
        numbers = (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
        names += [before + number + ending for number in numbers for ending in endings]
    return names


def tasks_on(node: int, text: str) -> int | None:
    """The number of tasks on the node with that index: "3,1(x2)" says 3, 1, 1. None where it does not say."""
    first = 0
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            return None
        first += int(match.group(2) or 1)
        if node < first:
            return int(match.group(1))
    return None


def is_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task. A batch script and salloc's shell have no step.

    A script's SLURM_PROCID is 0, and one that was submitted from within a step inherits that step's SLURM_STEP_*.
    """
    if env.get("SLURM_PROCID", "0") != "0":
        return True
    if "SLURM_PROCID" not in env:
        return False
    if "SLURM_STEP_NUM_TASKS" not in env:
        return "SLURM_STEP_ID" in env
    tasks, listed, own = env["SLURM_STEP_NUM_TASKS"], env.get("SLURM_STEP_NODELIST"), env.get("SLURMD_NODENAME")
    is_elsewhere = bool(own and listed) and own not in hosts_of(listed or "")
    return env.get("SLURM_NTASKS", tasks) == tasks and not is_elsewhere


def group_hosts(env: Mapping[str, str], group: int) -> str:
    """The hostlist of one component of a heterogeneous job; empty where there is none."""
    names = (f"SLURM_JOB_NODELIST_HET_GROUP_{group}", f"SLURM_JOB_NODELIST_PACK_GROUP_{group}")
    return next((env[name] for name in names if env.get(name)), "")


def is_heterogeneous(env: Mapping[str, str]) -> bool:
    """Whether the job has several components."""
    return env.get("SLURM_HET_SIZE", env.get("SLURM_PACK_SIZE", "1")) != "1"


def spans_components(env: Mapping[str, str]) -> bool:
    """Whether the step has tasks of several components: then its list of hosts is sorted by name, not by task."""
    if not is_heterogeneous(env):
        return False
    own = set(hosts_of(step_hosts(env)))
    count = env.get("SLURM_HET_SIZE", env.get("SLURM_PACK_SIZE", "1"))
    groups = [set(hosts_of(group_hosts(env, group))) for group in range(int(count) if count.isdigit() else 1)]
    return not any(own <= group for group in groups)


def step_hosts(env: Mapping[str, str]) -> str:
    """The hostlist of the step, else of the job."""
    return env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST", "")


def port_of(env: Mapping[str, str]) -> int | None:
    """What stands for MASTER_PORT: from the job's number and, but in heterogeneous jobs, the step's.

    A heterogeneous job's servers are another step, with the same number of the job.
    """
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "0")
    if not job.isdigit():
        return None
    number = int(step) if step.isdigit() and not is_heterogeneous(env) else 0
    return _FIRST_PORT + (int(job) + _STEP * number) % _PORTS


def allocation(env: Mapping[str, str]) -> list[Component]:
    """What this batch script, shell of salloc or step may start steps on; empty outside of an allocation.

    One entry, or one for each component of a heterogeneous job. Raises InvalidArgumentError.
    """
    if not env.get("SLURM_JOB_ID", env.get("SLURM_JOBID", "")).isdigit():
        return []
    if is_heterogeneous(env):
        count = env.get("SLURM_HET_SIZE", env.get("SLURM_PACK_SIZE", "1"))
        listed = [(group_hosts(env, group), _group_tasks(env, group)) for group in range(int(count))]
        return [_component(hosts, tasks) for hosts, tasks in listed if hosts]
    hosts = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    return [_component(hosts, env.get("SLURM_TASKS_PER_NODE", ""))] if hosts else []


def _group_tasks(env: Mapping[str, str], group: int) -> str:
    names = (f"SLURM_TASKS_PER_NODE_HET_GROUP_{group}", f"SLURM_TASKS_PER_NODE_PACK_GROUP_{group}")
    return next((env[name] for name in names if env.get(name)), "")


def _component(hosts: str, tasks: str) -> Component:
    nodes = hosts_of(hosts)
    return Component(nodes, [tasks_on(index, tasks) or 1 for index in range(len(nodes))])
