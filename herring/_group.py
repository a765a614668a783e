"""Groups: some of the job's ranks, which run operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any

from herring._context import Session, process
from herring._errors import InvalidArgumentError, MismatchError, ShutdownError
from herring._handle import WorkHandle

# Numbers in the runtime: below are torch's groups and Horovod's process sets, and those sets' small tensors.
_FIRST_NUMBER = 1 << 22
_NO_COLOR = -1


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that run operations among themselves: pass it as `group=`. Made by new_group() and split()."""

    ranks: tuple[int, ...]  #: Ranks of the job; a rank's place here is its place in results.
    rank: int | None  #: This process's place in `ranks`; None where it is not in the group.
    _number: int
    _session: Session

    @property
    def size(self) -> int:
        """Number of its ranks."""
        return len(self.ranks)

    def close(self) -> None:
        """Ends the group. Every rank of it calls this. Again: nothing.

        Allreduces by name that all ranks have called end first, within 5 s. One that some rank has not called fails
        with CancelledError. Wait for everything else before.
        """
        session, uses = self._session, self._session.uses
        if self.rank is None or self._number in uses.closed or process.session() is not session:
            return
        work = session.runtime.submit("barrier", None, None, group=self._number, is_waited_for=True)
        WorkHandle(work, None, session.config.timeout_s, f"close() of {self}", None, self.ranks).wait()
        with uses.lock:
            uses.closed.add(self._number)
            uses.unnamed.pop(self._number, None)
            for key in [each for each in uses.counts if each[0] == self._number]:
                del uses.counts[key]
        session.runtime.remove_group(self._number)

    def __repr__(self) -> str:
        return f"<herring Group of ranks {list(self.ranks)}>"


def number_of(session: Session, group: Group) -> int:
    """The runtime's number. Raises InvalidArgumentError where this rank has no part in the group, or not any more."""
    if not isinstance(group, Group):
        raise InvalidArgumentError(f"group is {group!r}; it must come from herring.new_group() or split()")
    if group._session is not session:
        raise ShutdownError(f"{group} is of a job that this process has left; make it again after herring.init()")
    if group.rank is None:
        raise InvalidArgumentError(f"rank {session.job.rank} is not in {group}; only its ranks may use it")
    if group._number in session.uses.closed:
        raise InvalidArgumentError(f"{group} is closed; make a new group")
    return group._number


def new_group(ranks: Iterable[int]) -> Group:
    """A group of these ranks, in this order. Collective: every rank of the job calls it, in the group or not.

    As torch.distributed.new_group(), and mpi4py's Comm.Create(). Raises InvalidArgumentError for ranks that are not in
    the job or come twice, MismatchError where ranks name different ones. Not in elastic jobs.
    """
    session = process.current()
    _refuse_elastic(session, "new_group()")
    size = session.job.size
    if not isinstance(ranks, Iterable):
        raise InvalidArgumentError(f"ranks is {ranks!r}; it must be a list of ranks")
    wanted = tuple(_whole(rank, "a rank") for rank in ranks)
    if not wanted or len(set(wanted)) != len(wanted) or min(wanted) < 0 or max(wanted) >= size:
        raise InvalidArgumentError(f"a group of ranks {list(wanted)}: it takes different ranks, from 0 to {size - 1}")
    # Of each rank its place in the group: all name the same ranks in the same order where these are equal. More
    # than the two numbers of split(): a rank that calls that is told.
    mine = [wanted.index(rank) if rank in wanted else -1 for rank in range(max(size, 3))]
    told = _gathered(session, mine)
    if any(each != mine for each in told):
        said = ", ".join(f"rank {rank}: {_ranks_of(each)}" for rank, each in enumerate(told))
        raise MismatchError(f"new_group: ranks name different groups: {said}")
    return _make(session, [wanted])[0]


def split(color: int | None, key: int = 0) -> Group | None:
    """Groups of the ranks that give the same `color`, in the order of `key`, then of their ranks: this rank's one.

    Collective: every rank of the job calls it. As mpi4py's Comm.Split(); color None is MPI.UNDEFINED: no group, and
    None is returned. Raises InvalidArgumentError for a color below 0. Not in elastic jobs.
    """
    session = process.current()
    _refuse_elastic(session, "split()")
    mine = [_NO_COLOR if color is None else _whole(color, "color"), _whole(key, "key")]
    if color is not None and mine[0] < 0:
        raise InvalidArgumentError(f"color is {color}; it must be 0 or more, or None for no group")
    if any(not -(1 << 63) <= each < 1 << 63 for each in mine):
        raise InvalidArgumentError(f"color is {color}, key is {key}; one of them does not fit into 64 bits")
    told = _gathered(session, mine)
    colors = sorted({each[0] for each in told} - {_NO_COLOR})
    order = sorted(range(len(told)), key=lambda rank: (told[rank][1], rank))
    members = [tuple(rank for rank in order if told[rank][0] == one) for one in colors]
    groups = _make(session, members)
    return None if color is None else groups[colors.index(mine[0])]


def _make(session: Session, members: list[tuple[int, ...]]) -> list[Group]:
    """Every rank makes all of them, so that they have the same numbers everywhere."""
    uses = session.uses
    with uses.lock:
        first = _FIRST_NUMBER + uses.groups
        uses.groups += len(members)
    groups = []
    for number, ranks in enumerate(members, first):
        place = ranks.index(session.job.rank) if session.job.rank in ranks else None
        if place is not None:
            session.runtime.add_group(number, ranks, may_travel=True)
        groups.append(Group(ranks, place, number, session))
    # Nobody's first message meets a rank that does not know the group yet.
    session.runtime.run("barrier", None, None, "sum", 0, "herring.new_group.added", None, False)
    return groups


def _gathered(session: Session, mine: list[int]) -> list[list[int]]:
    """The ranks' numbers, by rank."""
    import numpy as np

    row = np.asarray(mine, np.int64)
    table = np.empty((session.job.size, len(mine)), np.int64)
    session.runtime.run("all_gather", row, table, "sum", 0, "herring.new_group", None, False)
    told: list[list[int]] = table.tolist()
    return told


def _ranks_of(places: list[int]) -> list[int]:
    return sorted((rank for rank, place in enumerate(places) if place >= 0), key=lambda rank: places[rank])


def _whole(value: Any, what: str) -> int:
    try:
        return int(index(value))
    except TypeError:
        raise InvalidArgumentError(f"{what} is {value!r}; it must be a whole number") from None


def _refuse_elastic(session: Session, what: str) -> None:
    if session.elastic is not None:
        raise InvalidArgumentError(f"{what} does not work in an elastic job, because its ranks change")
