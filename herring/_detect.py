"""Who this process is, as its launcher or scheduler says: one pure function of the environment.

`detect` is the only reader of RANK, WORLD_SIZE, MASTER_ADDR, OMPI_*, PMI_*, SLURM_* and their like. Every door asks it:
herring.init(), herring.torch, herring.horovod and `herring server`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from herring import _slurm, _tf_config
from herring._errors import InvalidArgumentError

Role = Literal["worker", "server"]
Environment = Mapping[str, str]

ALONE = "a single process: no launcher's variables are set"
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_LOOPBACK = "127.0.0.1"
_SAGEMAKER_PORT = 29500
_BY_HAND = "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"


@dataclass(frozen=True)
class Master:
    """Worker 0's host, and the port from which the hub's are derived (what MASTER_ADDR and MASTER_PORT say)."""

    host: str
    port: int


@dataclass(frozen=True)
class Detected:
    """What the environment says about this process."""

    role: Role
    rank: int | None  #: Among those of its role; None where nothing says.
    size: int | None  #: Number of workers; None where only MPI or the hub knows.
    local_rank: int | None  #: On this host, as the launcher counts; None where it does not say.
    local_size: int | None  #: Likewise.
    hub: Master | None  #: Where the hub is looked for, unless HERRING_HUB says it.
    source: str  #: For people: where this comes from.
    is_mpi: bool = False  #: MPI can carry the bootstrap.
    peers: int | None = None  #: How many processes of this role the launcher has started.
    no_hub: str = ""  #: What to do about it where `hub` is None; empty: nothing special.
    note: str = ""  #: What a user should know: a scheduler is in sight, and this is a job of one all the same.

    @property
    def is_launched(self) -> bool:
        """Whether a launcher says which rank this process is."""
        return self.source != ALONE


def detect(environment: Environment, role: Role = "worker") -> Detected:
    """Who this process is. Pure: looks at `environment` alone.

    In this order: RANK and WORLD_SIZE (torchrun, herringrun, Ray, Kubeflow's PyTorchJob, by hand), mpirun, srun, other
    PMI launchers, PMIx, Kubeflow Trainer (PET_*), SageMaker, TF_CONFIG, a pod's index with WORLD_SIZE; else a job of
    one. RANK comes first because torchrun may itself run under srun or mpirun; mpirun before srun because its helpers
    are a step.

    Raises InvalidArgumentError, which says what to do, where values contradict each other or cannot be, and where a
    scheduler has started several processes but does not say enough.
    """
    found = _server(environment) if role == "server" else _worker(environment)
    if master := _master(environment):
        found = replace(found, hub=master, no_hub="")
    return _checked(found)


def is_launched_by_mpi(environment: Environment) -> bool:
    """Whether mpirun (or another MPI launcher) started this process."""
    return any(name in environment for name in _MPI_VARIABLES)


def number(env: Environment, name: str) -> int | None:
    """The whole number in that variable; None where it is unset."""
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"{name} is {text!r}; it must be a whole number") from None


def _worker(env: Environment) -> Detected:
    if "RANK" in env:
        return _of_variables(env, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    found = next((each for find in _LAUNCHERS if (each := find(env)) is not None), None)
    if "WORLD_SIZE" not in env:
        return found or _alone(env)
    told = number(env, "WORLD_SIZE")
    if found is None:
        raise InvalidArgumentError("RANK is not set, but RANK and WORLD_SIZE go together: set both, or neither")
    if found.size not in (None, told):
        raise InvalidArgumentError(
            f"WORLD_SIZE is {told}, but {found.source} say that there are {found.size} workers: set RANK as well, or "
            "unset WORLD_SIZE"
        )
    return found


def _of_variables(env: Environment, names: tuple[str, str, str, str]) -> Detected:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, size = number(env, rank_name), number(env, size_name)
    if rank is None or size is None:
        missing = rank_name if rank is None else size_name
        raise InvalidArgumentError(
            f"{missing} is not set, but {rank_name} and {size_name} go together: set both, or neither"
        )
    return Detected(
        "worker",
        rank,
        size,
        number(env, local_rank_name),
        number(env, local_size_name),
        None,
        f"{rank_name} and {size_name}",
        is_launched_by_mpi(env),
        size,
    )


def _open_mpi(env: Environment) -> Detected | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = (f"OMPI_COMM_WORLD_{name}" for name in names)
    return _of_variables(env, (rank, size, local_rank, local_size))


_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _hydra(env: Environment) -> Detected | None:
    """mpiexec of MPICH or Intel MPI, which may itself start its helpers by srun."""
    return _of_variables(env, _PMI) if "PMI_RANK" in env and "MPI_LOCALRANKID" in env else None


def _pmi(env: Environment) -> Detected | None:
    return _of_variables(env, _PMI) if "PMI_RANK" in env else None


def _pmix(env: Environment) -> Detected | None:
    """PMIx tells the rank through the environment but not the size."""
    rank = number(env, "PMIX_RANK")
    return None if rank is None else Detected("worker", rank, None, None, None, None, "MPI", is_mpi=True)


def _srun(env: Environment) -> Detected | None:
    if not _slurm.is_step(env):
        return None
    rank, size = number(env, "SLURM_PROCID"), number(env, "SLURM_STEP_NUM_TASKS")
    size = number(env, "SLURM_NTASKS") if size is None else size
    if size is None:
        raise InvalidArgumentError("SLURM_PROCID is set, but SLURM_NTASKS is not: start with srun, " + _BY_HAND)
    if size > 1 and "SLURM_PTY_PORT" in env:
        raise InvalidArgumentError(
            f"this is one of {size} tasks of `srun --pty`: leave out --pty for a job of {size} workers, or set RANK=0 "
            "WORLD_SIZE=1 for a job of one"
        )
    node, spans = number(env, "SLURM_NODEID"), _slurm.spans_components(env)
    local_size = None if node is None or spans else _slurm.tasks_on(node, env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    found = Detected(
        "worker",
        rank,
        size,
        number(env, "SLURM_LOCALID"),
        local_size,
        None,
        "SLURM_PROCID and SLURM_NTASKS",
        is_launched_by_mpi(env),
        size,
    )
    return _with_slurm_hub(env, found, spans) if size > 1 or _slurm.is_heterogeneous(env) else found


def _with_slurm_hub(env: Environment, found: Detected, spans: bool) -> Detected:
    """Task 0 is on the first host of the step's list, but for two cases, which are told from the others."""
    way_out = "set MASTER_ADDR (worker 0's host) and MASTER_PORT for all tasks, or HERRING_HUB=host:port"
    if spans:
        return replace(
            found,
            no_hub="this step spans several components of a heterogeneous job, and its list of hosts does not say "
            f"where task 0 is: start servers by an srun of their own (--het-group), and {way_out}",
        )
    port, listed = _slurm.port_of(env), _slurm.step_hosts(env)
    if port is None or not listed:
        return replace(found, no_hub=f"SLURM_JOB_ID or SLURM_STEP_NODELIST is not set: {way_out}")
    host, own = _slurm.first_host(listed), env.get("SLURMD_NODENAME", "")
    is_elsewhere = found.rank == 0 and own not in ("", host)
    if is_elsewhere or env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return replace(found, no_hub=f"task 0 need not be on the first host of {listed!r}: {way_out}")
    is_here = found.local_size == found.size and not _slurm.is_heterogeneous(env)
    return replace(found, hub=Master(_LOOPBACK if is_here else host, port))


def _kubeflow(env: Environment) -> Detected | None:
    """Kubeflow Trainer gives a pod what torchrun reads. Without torchrun: one process a pod, or refused."""
    nodes, per_node = env.get("PET_NNODES"), env.get("PET_NPROC_PER_NODE", "1")
    if nodes is None or (nodes == "1" and per_node in ("1", "auto")):
        return None
    if not nodes.isdigit() or per_node != "1" or "PET_NODE_RANK" not in env:
        raise InvalidArgumentError(
            f"PET_NNODES is {nodes} and PET_NPROC_PER_NODE {per_node}: these are for torchrun. Start with "
            f"`torchrun train.py`, {_BY_HAND}"
        )
    rank = number(env, "PET_NODE_RANK")
    return Detected(
        "worker", rank, int(nodes), 0, 1, _pet_master(env), "PET_NODE_RANK and PET_NNODES", False, int(nodes)
    )


def _pet_master(env: Environment) -> Master | None:
    host, port = env.get("PET_MASTER_ADDR"), number(env, "PET_MASTER_PORT")
    return Master(host, port) if host and port else None


def _sagemaker(env: Environment) -> Detected | None:
    """One process on each host of SageMaker's. SM_MASTER_ADDR is always algo-1, a server's host perhaps: not used."""
    own, hosts = env.get("SM_CURRENT_HOST"), _json_list(env, "SM_HOSTS")
    if not own or len(hosts) < 2:
        return None
    if (groups := _sagemaker_groups(env, "worker")) and len(groups[0]) < len(hosts):
        hosts = groups[0]
    hosts = sorted(hosts, key=by_number)
    if own not in hosts:
        raise InvalidArgumentError(f"SM_CURRENT_HOST is {own!r}; it must be one of SM_HOSTS ({', '.join(hosts)})")
    source = "SM_CURRENT_HOST and SM_HOSTS"
    return Detected(
        "worker", hosts.index(own), len(hosts), 0, 1, Master(hosts[0], _SAGEMAKER_PORT), source, False, len(hosts)
    )


def _sagemaker_groups(env: Environment, role: Role) -> tuple[list[str], list[str]] | None:
    """The hosts of this process's instance group and of the other one; None where there is one group only."""
    try:
        said = json.loads(env.get("SM_RESOURCE_CONFIG") or "{}")
        groups = {str(each["instance_group_name"]): list(map(str, each["hosts"])) for each in said["instance_groups"]}
        own = groups.pop(said["current_group_name"])
    except (ValueError, KeyError, TypeError):
        return None
    if len(groups) > 1 and role == "worker":
        raise InvalidArgumentError(
            f"SageMaker has started {len(groups) + 1} instance groups, and Herring cannot know which of them "
            "train and which run servers. Use one group for workers and one for servers, " + _BY_HAND
        )
    return (own, next(iter(groups.values()))) if len(groups) == 1 else None


def _json_list(env: Environment, name: str) -> list[str]:
    try:
        said = json.loads(env.get(name) or "[]")
    except ValueError:
        said = None
    if not isinstance(said, list):
        raise InvalidArgumentError(f"{name} is {env[name]!r}; it must be a list in JSON")
    return [str(each) for each in said]


def by_number(host: str) -> tuple[str, int]:
    """algo-2 before algo-10."""
    match = re.fullmatch(r"(.*?)([0-9]*)", host)
    return (match.group(1), int(match.group(2) or 0)) if match else (host, 0)


def _tf_cluster(env: Environment) -> Detected | None:
    """TensorFlow's launchers: Kubeflow's TFJob and others."""
    task = _tf_config.read(env.get("TF_CONFIG", ""))
    if task is None:
        return None
    if task.is_server:
        raise InvalidArgumentError(
            "TF_CONFIG says that this process is a parameter server (ps), but it runs a training script: run `herring "
            "server --rank auto` in ps tasks, or start the job without ps"
        )
    local, hub = (task.local_rank, task.local_size), Master(task.host, task.port)
    return Detected("worker", task.rank, task.size, *local, hub, "TF_CONFIG", False, task.peers)


_INDEXES = ("JOB_COMPLETION_INDEX", "VC_TASK_INDEX")


def _pod_index(env: Environment) -> Detected | None:
    """A pod of an indexed Job (JobSet) or of Volcano, where WORLD_SIZE says that the pods are one job."""
    name = next((each for each in _INDEXES if each in env), None)
    size = number(env, "WORLD_SIZE")
    if name is None or size is None:
        return None
    local = (number(env, "LOCAL_RANK"), number(env, "LOCAL_WORLD_SIZE"))
    return Detected("worker", number(env, name), size, *local, None, f"{name} and WORLD_SIZE", False, size)


def _skypilot(env: Environment) -> Detected | None:
    nodes = number(env, "SKYPILOT_NUM_NODES")
    if nodes is not None and nodes > 1:
        raise InvalidArgumentError(
            f"SKYPILOT_NUM_NODES is {nodes}, but nothing says which rank this process is: start with torchrun "
            f"(--nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK), {_BY_HAND}"
        )
    return None


_LAUNCHERS: tuple[Callable[[Environment], Detected | None], ...] = (
    _open_mpi,
    _hydra,
    _srun,
    _pmi,
    _pmix,
    _kubeflow,
    _sagemaker,
    _tf_cluster,
    _pod_index,
    _skypilot,
)


def _alone(env: Environment) -> Detected:
    note, tasks = "", env.get("SLURM_NTASKS", "1")
    index = next((each for each in _INDEXES if each in env), None)
    if "SLURM_JOB_ID" in env and tasks not in ("", "1"):
        note = (
            f"Slurm's job {env['SLURM_JOB_ID']} has {tasks} tasks, but its batch script or shell is none of them: for "
            f"a job of {tasks} start with srun"
        )
    elif index is not None:
        note = f"{index} is set: where such pods are one job, set WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    return Detected("worker", 0, 1, 0, 1, None, ALONE, peers=1, note=note)


def _server(env: Environment) -> Detected:
    """A server's rank is its index among processes like it; its host is nobody's hub."""
    size, source, rank, peers = number(env, "WORLD_SIZE"), "", None, None
    hub: Master | None = None
    contexts = number(env, "OMPI_NUM_APP_CTX") or 1
    if "OMPI_COMM_WORLD_RANK" in env and contexts > 1 and size is None:
        raise InvalidArgumentError(
            "mpirun has started this server together with other programs, so its ranks count workers and servers "
            "together: start the servers with a separate mpirun"
        )
    if _slurm.is_step(env) and "OMPI_COMM_WORLD_RANK" not in env and "MPI_LOCALRANKID" not in env:
        size, hub = _of_slurms_workers(env, size)
        rank, peers, source = number(env, "SLURM_PROCID"), number(env, "SLURM_STEP_NUM_TASKS"), "SLURM_PROCID"
    elif (groups := _sagemaker_groups(env, "server")) is not None:
        own, others = (sorted(each, key=by_number) for each in groups)
        host = env.get("SM_CURRENT_HOST", "")
        rank, peers, source = (own.index(host) if host in own else None), len(own), "SM_CURRENT_HOST"
        # How many workers there are the hub says: the others' hosts may have several each.
        hub = Master(others[0], _SAGEMAKER_PORT) if others else None
    elif (task := _tf_config.read(env.get("TF_CONFIG", ""))) is not None and task.is_server:
        rank, peers, source, hub = task.rank, task.peers, "TF_CONFIG", Master(task.host, task.port)
        size = task.size if size is None else size
    else:
        names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", *_INDEXES, "PET_NODE_RANK")
        source = next((name for name in names if name in env), "")
        rank = number(env, source) if source else None
        counted = {"OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE"}.get(source)
        peers = number(env, counted) if counted else None
        nodes, per_node = env.get("PET_NNODES", ""), env.get("PET_NPROC_PER_NODE", "1")
        if size is None and nodes.isdigit() and per_node.isdigit():
            size = int(nodes) * int(per_node)
        hub = _pet_master(env)
    return Detected("server", rank, size, None, None, hub, source or ALONE, False, peers)


def _of_slurms_workers(env: Environment, size: int | None) -> tuple[int | None, Master | None]:
    """Number of workers and where their first is: component 0 of a heterogeneous job."""
    listed, port = _slurm.group_hosts(env, 0), _slurm.port_of(env)
    if not _slurm.is_heterogeneous(env) or not listed or port is None:
        return size, None
    return number(env, "SLURM_NTASKS_HET_GROUP_0") if size is None else size, Master(_slurm.first_host(listed), port)


def _master(env: Environment) -> Master | None:
    """MASTER_ADDR and MASTER_PORT where both are set and can be."""
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    return Master(host, int(port)) if host and port.isascii() and port.isdigit() else None


def _checked(found: Detected) -> Detected:
    rank, size = found.rank, found.size
    if size is not None and size < 1:
        raise InvalidArgumentError(f"the job's size is {size} (from {found.source}); it must be at least 1")
    limit = size if found.role == "worker" else None
    if rank is not None and (rank < 0 or (limit is not None and rank >= limit)):
        least = f"from 0 to {limit - 1}" if limit is not None else "at least 0"
        raise InvalidArgumentError(f"this process's rank is {rank} of {size} (from {found.source}); it must be {least}")
    return found
