"""Which rank of how many this process is: told by the caller, else by whatever launched it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from herring._errors import InvalidArgumentError


@dataclass(frozen=True)
class Placement:
    """This worker's place in the job.

    `local_rank` and `local_size` are the launcher's count on this host, None where it does not say; `source` says for
    people where the values come from; `is_mpi` tells that MPI can carry the bootstrap.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    source: str
    is_mpi: bool = False


# (rank, size, local rank, local size), in the order in which they are looked for. torchrun and herringrun first: they
# may themselves run under mpirun or srun.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


_TORCHRUN_JOB = "TORCHELASTIC_RUN_ID"  # "none" where torchrun was given none.
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_MPI_SOURCES = ("OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE", "PMI_RANK and PMI_SIZE", "MPI")
_MAX_LAUNCH_LINE = 200


def find_placement(
    rank: int | None = None, size: int | None = None, environment: Mapping[str, str] | None = None
) -> Placement:
    """Explicit arguments, else RANK/WORLD_SIZE, else MPI's variables, else a job of one process.

    Raises InvalidArgumentError where only half of a pair is given or a value is out of range.
    """
    env = os.environ if environment is None else environment
    is_mpi = any(name in env for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"))
    if rank is not None or size is not None:
        if rank is None or size is None:
            raise InvalidArgumentError(f"rank is {rank} and size is {size}: give both, or neither")
        return _checked(
            Placement(rank, size, _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE"), "arguments", is_mpi)
        )
    for launcher in _LAUNCHERS:
        if launcher[0] in env or (launcher == _LAUNCHERS[0] and launcher[1] in env):
            return _checked(_from_variables(env, launcher, is_mpi))
    if "PMIX_RANK" in env:
        return _checked(_from_mpi())
    return Placement(0, 1, 0, 1, "a single process: no launcher's variables are set")


def launch_id(placement: Placement, environment: Mapping[str, str] | None = None) -> str:
    """What the launcher calls its job, as lines NAME=value, the innermost first; empty where it gives it no name.

    The same on all workers of one launch, on all its hosts. MPI's counts only where the rank is MPI's too: with RANK
    set by hand, each worker may have an mpirun or srun of its own.
    """
    env = os.environ if environment is None else environment
    found = []
    names = _MPI_JOBS if placement.source in _MPI_SOURCES else (_TORCHRUN_JOB,)
    for name in names:
        value = env.get(name, "")
        if value and not (name == _TORCHRUN_JOB and value == "none"):
            found.append(f"{name}={value}")
            break
    # The components of a heterogeneous job have numbers of their own, and one in common.
    for name in ("SLURM_HET_JOB_ID", "SLURM_JOB_ID"):
        if env.get(name):
            found.append(f"SLURM_JOB_ID={env[name]}")
            break
    return "\n".join(line for line in found if len(line) <= _MAX_LAUNCH_LINE)


def _from_variables(env: Mapping[str, str], names: tuple[str, str, str, str], is_mpi: bool) -> Placement:
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, size = _number(env, rank_name), _number(env, size_name)
    if rank is None or size is None:
        missing = rank_name if rank is None else size_name
        raise InvalidArgumentError(
            f"{missing} is not set, but {rank_name} and {size_name} go together: set both, or neither"
        )
    local_rank, local_size = _number(env, local_rank_name), _number(env, local_size_name)
    return Placement(rank, size, local_rank, local_size, f"{rank_name} and {size_name}", is_mpi)


def _from_mpi() -> Placement:
    """PMIx tells the rank through the environment but not the size."""
    from herring._mpi import world

    comm = world()
    return Placement(comm.Get_rank(), comm.Get_size(), None, None, "MPI", is_mpi=True)


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"{name} is {text!r}; it must be a whole number") from None


def _checked(placement: Placement) -> Placement:
    if placement.size < 1:
        raise InvalidArgumentError(
            f"the job's size is {placement.size} (from {placement.source}); it must be at least 1"
        )
    if not 0 <= placement.rank < placement.size:
        raise InvalidArgumentError(
            f"this process's rank is {placement.rank} of {placement.size} (from {placement.source}); "
            f"it must be from 0 to {placement.size - 1}"
        )
    return placement
