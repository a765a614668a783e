"""The operations: names, defaults and results; the work is the runtime's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from operator import index
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from herring import _core
from herring._arrays import as_input, new_result, shared_empty
from herring._context import Session, process
from herring._errors import InvalidArgumentError
from herring._handle import Handle, to_seconds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ArrayT = TypeVar("ArrayT")
Timeout = float | timedelta | None

# A method looked up in an imported object at each call costs a tenth of what a small operation takes.
_current = process.current


class ReduceOp(str, Enum):
    """How elements of different ranks are combined; the plain strings work as well.

    AVERAGE is a sum divided once, before it is rounded; of integers it truncates toward zero. The bitwise three are for
    integers and bool. 16-bit floats are added in float32 and rounded once.
    """

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


def _root(session: Session, root: Any) -> int:
    try:
        root = index(root)
    except TypeError:
        raise InvalidArgumentError(f"root is {root!r}; it must be a whole number") from None
    # In an elastic job others may have called this while rank `root` was there: the runtime knows, and counts the call.
    if root < 0 or (root >= session.job.size and session.elastic is None):
        raise InvalidArgumentError(f"root is {root}; it must be a rank, from 0 to {session.job.size - 1}")
    return int(root)


def _call(
    session: Session,
    collective: Literal["all_reduce", "broadcast", "all_gather", "barrier"],
    source: Any,
    result: ArrayT,
    timeout: Timeout,
    name: str | None,
    op: ReduceOp | str = "sum",
    root: int = 0,
    async_op: bool = False,
    backup: bool = False,
) -> ArrayT | Handle[ArrayT]:
    seconds = None if timeout is None else to_seconds(timeout)
    if not async_op:
        session.runtime.run(collective, source, result, op, root, name, seconds, backup)
        return result
    work = session.runtime.submit(
        collective, source, result, op=op, root=root, name=name, timeout=seconds, backup=backup
    )
    what = collective if name is None else f"{collective} {name!r}"
    limit = session.config.timeout_s if seconds is None else seconds
    return Handle(work, result, limit, what, session.job.size)


@overload
def allreduce(
    array: ArrayT,
    op: ReduceOp | str = ...,
    *,
    name: str | None = ...,
    async_op: Literal[False] = ...,
    out: ArrayT | None = ...,
    timeout: Timeout = ...,
    backup: bool = ...,
) -> ArrayT: ...
@overload
def allreduce(
    array: ArrayT,
    op: ReduceOp | str = ...,
    *,
    name: str | None = ...,
    async_op: Literal[True],
    out: ArrayT | None = ...,
    timeout: Timeout = ...,
    backup: bool = ...,
) -> Handle[ArrayT]: ...
def allreduce(
    array: ArrayT,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    async_op: bool = False,
    out: ArrayT | None = None,
    timeout: Timeout = None,
    backup: bool = False,
) -> ArrayT | Handle[ArrayT]:
    """Combines `array` of all ranks elementwise and gives every rank the result, the same bits on each.

    Args:
        array: A numpy array (or what numpy.asarray takes), or a CPU tensor of any library with DLPack. Of one shape and
            dtype on all ranks: float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8, bool.
        op: A ReduceOp or its string.
        name: Matches the calls of different ranks, in any order; without names, calls match in the order they are made.
        async_op: Return a Handle at once; `array` must then not change until it is done.
        out: Where the result goes (contiguous, like `array`); may be `array` itself.
        timeout: Seconds until the operation fails on all ranks, else the setting timeout_s.
        backup: Sums and averages; the same on all ranks. Ends without the last HERRING_BACKUP_WORKERS ranks (setting
            backup_workers), whose data is then not in the result; they get the same result as all others. An average is
            over those who are in: Handle.contributors(). Without the setting it changes nothing.

    Returns `out`, else a new array: numpy for numpy, torch for torch (any library whose tensors have new_empty), numpy
    for the rest. Raises MismatchError where ranks disagree, HerringTimeoutError that names the ranks that did not come,
    PeerLostError where one died, InvalidArgumentError for arrays and values that do not work.
    """
    session = _current()
    source = as_input(array)
    result: Any = new_result(session.runtime, source) if out is None else out
    return _call(session, "all_reduce", source, result, timeout, name, op, 0, async_op, backup)


@overload
def allreduce_(
    array: ArrayT,
    op: ReduceOp | str = ...,
    *,
    name: str | None = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout = ...,
    backup: bool = ...,
) -> ArrayT: ...
@overload
def allreduce_(
    array: ArrayT,
    op: ReduceOp | str = ...,
    *,
    name: str | None = ...,
    async_op: Literal[True],
    timeout: Timeout = ...,
    backup: bool = ...,
) -> Handle[ArrayT]: ...
def allreduce_(
    array: ArrayT,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    backup: bool = False,
) -> ArrayT | Handle[ArrayT]:
    """allreduce() in place: `array` must be contiguous and writable, and is returned.

    With arrays of herring.empty() nothing is copied on this side.
    """
    session = _current()
    if async_op:
        return _call(session, "all_reduce", None, array, timeout, name, op, 0, async_op, backup)
    seconds = None if timeout is None else to_seconds(timeout)
    session.runtime.run("all_reduce", None, array, op, 0, name, seconds, backup)
    return array


@overload
def broadcast(
    array: ArrayT, root: int = ..., *, name: str | None = ..., async_op: Literal[False] = ..., timeout: Timeout = ...
) -> ArrayT: ...
@overload
def broadcast(
    array: ArrayT, root: int = ..., *, name: str | None = ..., async_op: Literal[True], timeout: Timeout = ...
) -> Handle[ArrayT]: ...
def broadcast(
    array: ArrayT, root: int = 0, *, name: str | None = None, async_op: bool = False, timeout: Timeout = None
) -> ArrayT | Handle[ArrayT]:
    """A new array with rank `root`'s elements; on other ranks `array` gives shape and dtype. See allreduce()."""
    session = _current()
    source = as_input(array)
    result: Any = new_result(session.runtime, source)
    rank = _root(session, root)
    return _call(session, "broadcast", source, result, timeout=timeout, name=name, root=rank, async_op=async_op)


@overload
def broadcast_(
    array: ArrayT, root: int = ..., *, name: str | None = ..., async_op: Literal[False] = ..., timeout: Timeout = ...
) -> ArrayT: ...
@overload
def broadcast_(
    array: ArrayT, root: int = ..., *, name: str | None = ..., async_op: Literal[True], timeout: Timeout = ...
) -> Handle[ArrayT]: ...
def broadcast_(
    array: ArrayT, root: int = 0, *, name: str | None = None, async_op: bool = False, timeout: Timeout = None
) -> ArrayT | Handle[ArrayT]:
    """broadcast() in place: writes rank `root`'s elements into `array` on the others, and returns it."""
    session = _current()
    rank = _root(session, root)
    return _call(session, "broadcast", None, array, timeout=timeout, name=name, root=rank, async_op=async_op)


@overload
def allgather(
    array: ArrayT, *, name: str | None = ..., async_op: Literal[False] = ..., timeout: Timeout = ...
) -> ArrayT: ...
@overload
def allgather(
    array: ArrayT, *, name: str | None = ..., async_op: Literal[True], timeout: Timeout = ...
) -> Handle[ArrayT]: ...
def allgather(
    array: ArrayT, *, name: str | None = None, async_op: bool = False, timeout: Timeout = None
) -> ArrayT | Handle[ArrayT]:
    """The arrays of all ranks, joined along the first axis in order of rank; of numbers, a vector of length size().

    `array` has one shape and dtype on all ranks: (n, ...) gives (size() * n, ...). See allreduce() for the rest.
    """
    session = _current()
    source: Any = as_input(array)
    dims = tuple(source.shape)
    joined = (session.job.size * dims[0], *dims[1:]) if dims else (session.job.size,)
    result: Any = new_result(session.runtime, source, joined)
    return _call(session, "all_gather", source, result, timeout=timeout, name=name, async_op=async_op)


def barrier(*, name: str | None = None, timeout: Timeout = None) -> None:
    """Returns when every rank has called it. Raises HerringTimeoutError naming the ranks that did not."""
    seconds = None if timeout is None else to_seconds(timeout)
    _current().runtime.run("barrier", None, None, "sum", 0, name, seconds, False)


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = "float32") -> np.ndarray[Any, Any]:
    """An uninitialised numpy array in memory that this host's ranks share and the network can reach.

    Operations in place on it copy nothing on this side. It stays valid after shutdown(). Where the shared memory
    (setting arena_bytes) is used up, the array is an ordinary one, which works but is copied; stats() counts both.
    """
    return shared_empty(_current().runtime, shape, dtype)


def stats() -> _core.RuntimeStats:
    """What this rank has done: operations completed and failed, bytes to and from servers, operations with and without
    a copy; and ``dropped_contributions``: by rank, how many of its contributions operations went on without (backup
    workers)."""
    return _current().runtime.stats()


def server_counters() -> list[_core.ServerCounters]:
    """What each server has moved so far. Collective: every rank calls it."""
    return _current().runtime.server_counters()


def stragglers() -> list[_core.Straggler]:
    """Who is slow, and by how much; the latest rank first, since ``init()``. Collective: every rank calls it.

    For each rank how many announces of operations it sent to servers (``announces``), how much later than the first one
    of the same operation they came on average (``mean_late_s``, seconds), and the share of them that all others waited
    for (``last_share``). Operations inside one host that go through no server do not count.
    """
    return _current().runtime.stragglers()
