"""``herring doctor --workers``: what a job of that size takes of each of its processes."""

from __future__ import annotations

import argparse
import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING

from herring._errors import InvalidArgumentError
from herring._finding import Finding, rdma_devices

if TYPE_CHECKING:
    from herring import _core

__all__ = ["JobShape", "add_options", "findings", "planned"]

_MOST = 1_000_000  # Of anything; far more than a job can have.


@dataclass(frozen=True)
class JobShape:
    """`server_hosts`: of the servers' own; 0: servers run on the workers' hosts."""

    workers: int
    hosts: int
    servers: int
    server_hosts: int


def add_options(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("a planned job")
    job.add_argument("--workers", type=int, metavar="N", help="number of workers, on all hosts together")
    job.add_argument("--hosts", type=int, metavar="H", help="hosts of the workers (default: one for each worker)")
    job.add_argument("--servers", type=int, metavar="K", help="number of server processes (default 0)")
    job.add_argument(
        "--server-hosts",
        type=int,
        metavar="M",
        help="hosts of the servers' own; 0: they run on the workers' hosts (default: one for each server process)",
    )


def planned(args: argparse.Namespace) -> JobShape | None:
    """None where no job is described. Raises InvalidArgumentError."""
    given = {name: getattr(args, name) for name in ("workers", "hosts", "servers", "server_hosts")}
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        least = 1 if name in ("workers", "hosts") else 0
        if value is not None and given["workers"] is None:
            raise InvalidArgumentError(f"{option} describes a planned job: add --workers N")
        if value is not None and not least <= value <= _MOST:
            raise InvalidArgumentError(f"{option} is {value}, and must be {least} to {_MOST}")
    if args.workers is None:
        return None
    servers = args.servers or 0
    return JobShape(
        workers=args.workers,
        hosts=args.workers if args.hosts is None else args.hosts,
        servers=servers,
        server_hosts=servers if args.server_hosts is None else args.server_hosts,
    )


def findings(config: _core.Config, shape: JobShape) -> list[Finding]:
    """Raises InvalidArgumentError for a job that cannot be, or is too large; its text says what to change."""
    needs = _needs(config, shape)
    lines = [Finding("job", "ok", _shape_text(shape)), Finding("server lanes", "ok", _lanes_text(needs))]
    if needs["lanes"] > 0:
        lines += [Finding("network posts", "ok", _posts_text(needs)), *_reduced(needs)]
    lines.append(_process("worker", needs["worker"]))
    lines.append(Finding("  worker 0", "ok", _hub_text(needs)))
    if shape.servers > 0:
        lines.append(_process("server process", needs["server"]))
    return [*lines, _open_files(needs), _memory(needs, shape), *_pinned(needs)]


def _needs(config: _core.Config, shape: JobShape) -> _core.JobNeeds:
    from herring import _core

    return _core.job_needs(
        config, workers=shape.workers, hosts=shape.hosts, servers=shape.servers, server_hosts=shape.server_hosts
    )


def _many(count: int, one: str) -> str:
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def _mebibytes(amount: int) -> str:
    return f"{amount / 2**20:,.1f} MiB" if amount < 10 << 20 else f"{amount / 2**20:,.0f} MiB"


def _shape_text(shape: JobShape) -> str:
    text = f"{_many(shape.workers, 'worker')} on {_many(shape.hosts, 'host')}"
    if shape.servers == 0:
        return f"{text}, no server processes" + (": servers are inside the workers" if shape.hosts > 1 else "")
    processes = "1 server process" if shape.servers == 1 else f"{shape.servers:,} server processes"
    if shape.server_hosts == 0:
        return f"{text}, {processes} on these hosts"
    return f"{text}, {processes} on {_many(shape.server_hosts, 'host')} of their own"


def _lanes_text(needs: _core.JobNeeds) -> str:
    if needs["lanes"] == 0:
        return "none: all workers are on one host, and sum in shared memory"
    windows = needs["lane_windows"]
    window = f"{min(windows)} to {max(windows)} chunks" if min(windows) != max(windows) else _many(windows[0], "chunk")
    is_failover = "on: a lost server costs no step" if needs["is_failover"] else "off in this job"
    return (
        f"{needs['lanes']:,}; each worker has at most {window} of {needs['chunk_bytes'] // 1024} KiB on the way to "
        f"each. Failover is {is_failover}"
    )


def _posts_text(needs: _core.JobNeeds) -> str:
    return (
        f"at most {needs['posted_limit']:,} on an endpoint; this job has {needs['posted_lane']:,} on each server lane, "
        f"{needs['posted_worker']:,} on each worker, {needs['posted_messages']:,} for messages between workers"
    )


def _reduced(needs: _core.JobNeeds) -> list[Finding]:
    less = []
    if needs["announce_credits"] < needs["most_announce_credits"]:
        less.append(
            f"each worker announces at most {needs['announce_credits']} operations ahead on each lane "
            f"({needs['most_announce_credits']} in a small job)"
        )
    if needs["eager_bytes"] < needs["most_eager_bytes"]:
        less.append(
            f"at most {needs['eager_bytes'] // 1024} KiB of data are sent with the announce "
            f"({needs['most_eager_bytes'] // 1024} KiB in a small job)"
        )
    return [Finding("  made smaller", "ok", "to fit: " + "; ".join(less))] if less else []


def _process(subject: str, needs: _core.ProcessNeeds) -> Finding:
    text = f"{_many(needs['connections'], 'connection')} and at most {_many(needs['descriptors'], 'open file')}"
    text += f"; at most {_mebibytes(needs['bytes'])} of memory besides tensors"
    if needs["registered_bytes"] > 0:
        text += f", {_mebibytes(needs['registered_bytes'])} of it pinned with EFA or verbs"
    if needs["lanes"] > 0:
        text += f", and records of unfinished operations (at most {_mebibytes(needs['record_bytes'])})"
    return Finding(subject, "ok", text)


def _hub_text(needs: _core.JobNeeds) -> str:
    connections = _many(needs["hub_connections"], "connection")
    files = _many(needs["hub_descriptors"], "open file")
    return f"{connections} and at most {files} more: all processes of the job are connected to it"


def _open_files(needs: _core.JobNeeds) -> Finding:
    """The soft limit is raised by each process itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(needs["worker"]["descriptors"] + needs["hub_descriptors"], needs["server"]["descriptors"])
    if hard == resource.RLIM_INFINITY or wanted <= hard:
        most = "any number" if hard == resource.RLIM_INFINITY else f"{hard:,}"
        return Finding("open files", "ok", f"this machine allows {most} in a process, and {wanted:,} are enough")
    return Finding(
        "open files",
        "problem",
        f"this machine allows {hard:,} in a process, and up to {wanted:,} are needed: raise the hard limit "
        "(/etc/security/limits.conf, or LimitNOFILE= of the service that starts the job)",
    )


def _memory(needs: _core.JobNeeds, shape: JobShape) -> Finding:
    def on_each(processes: int, hosts: int) -> int:
        return -(-processes // hosts) if hosts > 0 else 0

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    of_workers = on_each(shape.workers, shape.hosts) * needs["worker"]["bytes"]
    of_servers = on_each(shape.servers, shape.server_hosts or shape.hosts) * needs["server"]["bytes"]
    wanted = max(of_workers, of_servers) if shape.server_hosts else of_workers + of_servers
    text = f"at most {_mebibytes(wanted)} on a host besides tensors; this machine has {_mebibytes(total)}"
    if wanted > total:
        text += ": lower HERRING_WINDOW or HERRING_EAGER_BYTES, or start fewer processes on a host"
    return Finding("memory", "problem" if wanted > total else "ok", text)


def _pinned(needs: _core.JobNeeds) -> list[Finding]:
    """Only where there is a card that wants it. torch's and TensorFlow's tensors come on top."""
    wanted = max(needs["worker"]["registered_bytes"], needs["server"]["registered_bytes"])
    if wanted == 0 or not rdma_devices():
        return []
    allowed, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if allowed == resource.RLIM_INFINITY:
        return [Finding("locked memory", "ok", "this machine allows any amount")]
    text = f"this machine allows {_mebibytes(allowed)} in a process: EFA and verbs need ulimit -l unlimited"
    return [Finding("locked memory", "problem" if wanted > allowed else "ok", text)]
