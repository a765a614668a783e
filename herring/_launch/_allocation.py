"""The nodes of a Slurm allocation as a job's hosts, and srun in the place of ssh: pure, from Slurm's variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from herring import _slurm
from herring._errors import InvalidArgumentError
from herring._launch._hosts import Host
from herring._launch._rsh import Shell

__all__ = ["Allocation", "Srun", "allocation_of", "srun_of", "task_of", "without_task"]

# One task, which gets all that the job has on its node: the agent, below which the processes run. Unbuffered, or what
# has no newline at its end would wait for one.
_SRUN = (
    *("srun", "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--mpi=none", "--export=ALL"),
    *("--unbuffered", "--quiet", "--kill-on-bad-exit=1"),
)
# Said on each node of a cluster without task/affinity, of the --cpu-bind above; srun says it in spite of --quiet.
_NOISE = frozenset(("srun: cluster configuration lacks support for cpu binding",))
# What srun may know of the job; the rest would be options for its step (SLURM_NTASKS is --ntasks and so on).
_KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTER", "SLURM_WORKING_CLUSTER", "SLURM_JWT")
_KEPT_PARTS = ("_HET_", "_PACK_")
# Of one task or one node: each process has its own.
_OF_A_TASK = frozenset(
    (
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_NTASKS"),
        *("SLURM_NPROCS", "SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"),
        *("SLURM_LAUNCH_NODE_IPADDR", "SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS"),
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
        "GPU_DEVICE_ORDINAL",
    )
)
_OF_A_STEP = ("SLURM_STEP", "SLURM_SRUN_", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_PTY_")


@dataclass(frozen=True)
class Allocation:
    """The hosts that workers and servers run on where the command line names none."""

    workers: list[Host]
    servers: list[Host] | None
    components: Mapping[str, int]  #: Of each node; its number in a heterogeneous job.


@dataclass(frozen=True)
class Srun(Shell):
    """srun starts the agents, in the allocation that herringrun runs in."""

    components: Mapping[str, int] = field(default_factory=dict)
    is_heterogeneous: bool = False

    def command_line(self, address: str, command: str) -> list[str]:
        """As Shell's."""
        group = [f"--het-group={self.components[address]}"] if self.is_heterogeneous else []
        return [*self.rsh, *group, f"--nodelist={address}", "sh", "-c", command]


def srun_of(components: Mapping[str, int], env: Mapping[str, str]) -> Srun:
    """How agents are started on these nodes."""
    return Srun(
        _SRUN,
        components=components,
        is_heterogeneous=_slurm.is_heterogeneous(env),
        environment=_for_srun(env),
        noise=_NOISE,
    )


def _for_srun(env: Mapping[str, str]) -> dict[str, str]:
    """HERRING_* go to the processes another way; here they would be in Slurm's messages as well."""

    def is_kept(name: str) -> bool:
        if name.startswith("SLURM_"):
            return name.startswith(_KEPT) or any(part in name for part in _KEPT_PARTS)
        return not name.startswith(("HERRING_", "SRUN_"))

    return {name: value for name, value in env.items() if is_kept(name)}


def allocation_of(env: Mapping[str, str], slots: int | None, count: int | None) -> Allocation | None:
    """None outside of an allocation. A node takes as many workers as it has tasks, or `slots`. With several components
    the first has the workers, the others the servers.

    Raises InvalidArgumentError where srun has started herringrun several times; but with `count` (-np) each of these
    is a job on its own machine.
    """
    found = _slurm.allocation(env)
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")
    if found and tasks != "1" and _slurm.is_step(env):
        if count is not None:
            return None
        raise InvalidArgumentError(
            f"srun has started herringrun {tasks} times: start it once, without srun, and it uses the whole "
            "allocation; or start the program itself: srun python train.py. With -np N each herringrun is a job of "
            "its own"
        )
    if not found:
        return None
    components = {node: group for group, each in enumerate(found) for node in each.nodes}
    workers = _hosts(found[:1], slots)
    servers = _hosts(found[1:], None) or None
    if len(components) == 1 and slots is None and count is not None:
        workers = [Host(workers[0].address, max(count, workers[0].slots))]  # As herringrun -np N on any machine.
    return Allocation(workers, servers, components)


def _hosts(components: Sequence[_slurm.Component], slots: int | None) -> list[Host]:
    return [
        Host(node, slots or tasks) for each in components for node, tasks in zip(each.nodes, each.tasks, strict=True)
    ]


def without_task(env: Mapping[str, str], kept: Mapping[str, str]) -> dict[str, str]:
    """Without what is of one task or node, which each process gets where it runs; `kept` (-x) stays."""
    return {
        name: value
        for name, value in env.items()
        if name in kept or (name not in _OF_A_TASK and not name.startswith(_OF_A_STEP))
    }


def task_of(rank: int, size: int, local_rank: int, node: int) -> dict[str, str]:
    """What srun would have set for this rank: libraries that know Slurm look there."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(size),
        "SLURM_NPROCS": str(size),
    }
