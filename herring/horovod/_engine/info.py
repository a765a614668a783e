"""Start, end, places, and what Horovod would have been built with."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

from herring._errors import InvalidArgumentError
from herring.horovod._engine import process_sets as sets
from herring.horovod._engine.engine import home
from herring.horovod._engine.timeline import Timeline


def init(comm: Any = None, process_sets: Iterable[sets.ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Joins the job that herringrun, torchrun or mpirun has started; alone, a job of this process. Again: nothing.

    Args:
        comm: Nothing, or all ranks (a list or an mpi4py communicator): narrower jobs are process sets.
        process_sets: Sets to add at once; "dynamic" says what is always so, that sets may be added later.
    """
    if process_sets is not None and not isinstance(process_sets, str):
        process_sets = list(process_sets)
        sets.refuse_duplicates(process_sets)
    engine = home.start()
    if comm is not None and not (isinstance(comm, Iterable) and not list(comm)):
        ranks = sets.ProcessSet(comm).ranks
        if ranks != list(range(engine.size)):
            raise InvalidArgumentError(
                f"init(comm=...) names ranks {ranks} of {engine.size}: Herring always uses all of them; use a "
                "hvd.ProcessSet for some"
            )
    sets.set_up(process_sets)


def shutdown() -> None:
    """Finishes what is pending and leaves the job."""
    home.stop()


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return home.peek() is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Rank 0 writes its operations to the file as they go, for chrome://tracing, until stop_timeline() or shutdown().

    Raises InvalidArgumentError where the file cannot be written; on a full disk a warning says that it ends.
    """
    engine = home.current()
    stop_timeline()
    engine.timeline = Timeline(file_path, engine.rank, mark_cycles, "start_timeline: file_path")


def stop_timeline() -> None:
    """Ends the timeline, where one was started."""
    engine = home.current()
    timeline, engine.timeline = engine.timeline, None
    if timeline is not None:
        timeline.close()


def rank() -> int:
    """0 to size() - 1."""
    return home.current().rank


def size() -> int:
    """Number of processes."""
    return home.current().size


def local_rank() -> int:
    """This process's rank on its host."""
    return home.current().session.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return home.current().session.local_size


def cross_rank() -> int:
    """Number of this host among those that have a process of this local rank."""
    return _cross()[0]


def cross_size() -> int:
    """Number of hosts that have a process of this local rank."""
    return _cross()[1]


def is_homogeneous() -> bool:
    """Whether all hosts have equally many processes."""
    return len(set(_processes_by_host().values())) == 1


def mpi_threads_supported() -> bool:
    """False: Herring starts under mpirun but sends nothing through MPI."""
    home.current()
    return False


def mpi_enabled() -> bool:
    """False, likewise."""
    return False


def mpi_built() -> bool:
    """False, likewise."""
    return False


def gloo_enabled() -> bool:
    """True: Gloo is Horovod's word for collectives of CPU tensors without MPI, which scripts ask for before they
    start. Nothing goes through the library of that name."""
    return True


def gloo_built() -> bool:
    """True, likewise."""
    return True


def nccl_built() -> int:
    """0: tensors are in CPU memory."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """False: tensors are in CPU memory."""
    return False


def rocm_built() -> bool:
    """False, likewise."""
    return False


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether herring.horovod has names for this framework ("torch", "tensorflow") and the framework is installed."""
    del verbose
    return ext_base_name in ("torch", "tensorflow") and importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """False: tensors are in CPU memory."""
    del ext_base_name, verbose
    return False


def num_rank_is_power_2(num_rank: int) -> bool:
    """What Adasum needs of the number of ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def _processes_by_host() -> dict[str, int]:
    """Hosts in the order of their first ranks, with their numbers of processes."""
    hosts: dict[str, int] = {}
    for member in home.current().session.job.client.workers:
        hosts[member.host_identity] = hosts.get(member.host_identity, 0) + 1
    return hosts


def _cross() -> tuple[int, int]:
    engine = home.current()
    own = engine.session.job.client.workers[engine.rank].host_identity
    deep = [host for host, count in _processes_by_host().items() if count > local_rank()]
    # Where the launcher counts otherwise (several launchers on one host), this host may be missing.
    return (deep.index(own), len(deep)) if own in deep else (0, 1)


def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Horovod's name for it, which its tests and some scripts use: the ranks of each process set, by its id."""
    return {each.set_id: list(each.ranks) for each in home.current().sets()}
