"""Process sets: ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from herring._errors import InvalidArgumentError
from herring.horovod._engine.engine import GLOBAL_SET, Members, home

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Ranks by their global numbers, or an mpi4py communicator over some of COMM_WORLD.

    It works once it has been passed to hvd.init() or hvd.add_process_set(), which give it its `process_set_id`.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        if not isinstance(ranks_or_comm, Iterable):
            self.mpi_comm = ranks_or_comm
            ranks_or_comm = _ranks_of(ranks_or_comm)
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise InvalidArgumentError(f"a ProcessSet takes a list of ranks or an mpi4py communicator, not {ranks}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Number of its ranks; None before it works."""
        return None if self.process_set_id is None else len(home.current().members(self.process_set_id).ranks)

    def rank(self) -> int | None:
        """This process's place in the set; None before it works. Raises InvalidArgumentError where it is not in it."""
        if self.process_set_id is None:
            return None
        index = home.current().members(self.process_set_id).index
        if index is None:
            raise InvalidArgumentError(f"rank {home.current().rank} is not in {self}")
        return index

    def included(self) -> bool | None:
        """Whether this process is in the set; None before it works."""
        return None if self.process_set_id is None else home.current().rank in (self.ranks or [])

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    """All ranks; there from the start."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = GLOBAL_SET


global_process_set: ProcessSet = _GlobalProcessSet()
"""The process set of all ranks."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes a process set work and returns it. Every rank calls it, members or not, in the same order of calls.

    Raises InvalidArgumentError (a ValueError) for one of the same ranks, HorovodInternalError where ranks disagree.
    """
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    wanted.process_set_id = home.current().add_set(wanted.ranks or []).set_id
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set; False where there is nothing to end (it did not work, or is the global one). Every rank
    calls it."""
    set_id = process_set.process_set_id
    if set_id is None or set_id == GLOBAL_SET:
        return False
    process_set.process_set_id = None
    home.current().remove_set(set_id)
    return True


def members_of(process_set: ProcessSet) -> Members:
    """Its ranks. Raises InvalidArgumentError where it does not work (any more)."""
    if process_set.process_set_id is None:
        raise InvalidArgumentError(f"{process_set} is not in use: pass it to hvd.add_process_set() or hvd.init() first")
    return home.current().members(process_set.process_set_id)


def refuse_duplicates(process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
    """Raises InvalidArgumentError (a ValueError) where two of them have the same ranks."""
    seen: set[tuple[int, ...]] = set()
    for each in process_sets:
        if each is global_process_set:
            continue
        ranks = tuple((each if isinstance(each, ProcessSet) else ProcessSet(each)).ranks or [])
        if ranks in seen:
            raise InvalidArgumentError(
                f"init(process_sets=...): Attempted to add a duplicate process set: {list(ranks)}; name each set once"
            )
        seen.add(ranks)


def set_up(process_sets: Iterable[ProcessSet | Sequence[int]] | str | None) -> None:
    """What hvd.init() does with its argument: adds those that are not there yet. Also names the global set's ranks."""
    engine = home.current()
    global_process_set.ranks = list(range(engine.size))
    if process_sets is None or process_sets == "dynamic":  # Sets may always be added later.
        return
    if isinstance(process_sets, str):
        raise InvalidArgumentError(f'process_sets is {process_sets!r}; it takes process sets, or "dynamic"')
    there = {each.ranks: each.set_id for each in engine.sets()}
    for each in process_sets:
        ranks = each.ranks or [] if isinstance(each, ProcessSet) else each
        if each is not global_process_set and set(ranks) == set(range(engine.size)):
            raise InvalidArgumentError(
                f"init(process_sets=...): Attempted to add a duplicate process set: all {engine.size} ranks are "
                "hvd.global_process_set"
            )
    for each in process_sets:
        wanted = each if isinstance(each, ProcessSet) else ProcessSet(each)
        known = there.get(tuple(wanted.ranks or []))
        if known is None:
            add_process_set(wanted)
            there[tuple(wanted.ranks or [])] = wanted.process_set_id or 0
        elif wanted.process_set_id is None and wanted is not global_process_set:
            wanted.process_set_id = known


def _ranks_of(comm: Any) -> list[int]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise InvalidArgumentError(f"a ProcessSet of a communicator needs mpi4py ({error}); pass ranks") from error
    if not isinstance(comm, MPI.Comm):
        raise InvalidArgumentError(f"a ProcessSet takes a list of ranks or an mpi4py communicator, not {comm!r}")
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    return [int(rank) for rank in MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world)]
