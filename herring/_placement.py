"""Which rank of how many this process is: told by the caller, else by whatever launched it (herring._detect)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from herring._detect import Detected, Master, detect, is_launched_by_mpi, number
from herring._errors import InvalidArgumentError


@dataclass(frozen=True)
class Placement:
    """This worker's place in the job.

    `local_rank` and `local_size` are the launcher's count on this host, None where it does not say; `source` says for
    people where the values come from; `is_mpi` tells that MPI can carry the bootstrap. `hub`, `no_hub` and `note` are
    as in Detected.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    source: str
    is_mpi: bool = False
    hub: Master | None = None
    no_hub: str = ""
    note: str = ""


_TORCHRUN_JOB = "TORCHELASTIC_RUN_ID"  # "none" where torchrun was given none.
_MPI_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
_MPI_SOURCES = ("OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE", "PMI_RANK and PMI_SIZE", "MPI")
_MAX_LAUNCH_LINE = 200


def find_placement(
    rank: int | None = None,
    size: int | None = None,
    environment: Mapping[str, str] | None = None,
    given_by: str = "the arguments of init()",
) -> Placement:
    """Explicit arguments (and in words who gave them), else what the launcher says, else a job of one process.

    Raises InvalidArgumentError where only half of a pair is given, a value is out of range, or a scheduler does not say
    enough.
    """
    env = os.environ if environment is None else environment
    if rank is not None or size is not None:
        if rank is None or size is None:
            raise InvalidArgumentError(f"rank is {rank} and size is {size}: give both, or neither")
        local = number(env, "LOCAL_RANK"), number(env, "LOCAL_WORLD_SIZE")
        return _checked(Placement(rank, size, *local, given_by, is_launched_by_mpi(env), note=_note(env, size)))
    found = detect(env)
    return _checked(
        _from_mpi(found) if found.rank is None or found.size is None else _of(found, found.rank, found.size)
    )


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


def _note(env: Mapping[str, str], size: int) -> str:
    with contextlib.suppress(InvalidArgumentError):
        return detect(env).note if size == 1 else ""
    return ""


def _of(found: Detected, rank: int, size: int) -> Placement:
    return Placement(
        rank,
        size,
        found.local_rank,
        found.local_size,
        found.source,
        found.is_mpi,
        found.hub,
        found.no_hub,
        found.note,
    )


def _from_mpi(found: Detected) -> Placement:
    """PMIx tells the rank through the environment but not the size."""
    from herring._mpi import world

    comm = world()
    return _of(found, comm.Get_rank(), comm.Get_size())


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
