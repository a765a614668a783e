"""The operations: names, defaults and results; the work is the runtime's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from operator import index
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from herring import _core, _row
from herring._arrays import TensorT, as_input, new_result, shared_empty
from herring._context import Session, process
from herring._device_arrays import through_host
from herring._errors import InvalidArgumentError
from herring._exchanges import Options, allgather_uneven
from herring._group import Group, number_of
from herring._handle import Handle, StartedHandle, WorkHandle, to_seconds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

    ScalarT = TypeVar("ScalarT", bound=np.generic)

ArrayT = TypeVar("ArrayT")
OutT = TypeVar("OutT")
Timeout = float | timedelta | None

# A method looked up in an imported object at each call costs a tenth of what a small operation takes.
_current = process.current


class _Backup(Options, total=False):
    backup: bool


class _Uneven(Options, total=False):
    uneven: bool


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


def _root(session: Session, root: Any, group: Group | None) -> int:
    """Its place among those who take part."""
    try:
        root = index(root)
    except TypeError:
        raise InvalidArgumentError(f"root is {root!r}; it must be a whole number") from None
    if group is not None:
        if root not in group.ranks:
            raise InvalidArgumentError(f"root is {root}; it must be a rank of the job that is in {group}")
        return group.ranks.index(root)
    # In an elastic job others may have called this while rank `root` was there: the runtime knows, and counts the call.
    if root < 0 or (root >= session.job.size and session.elastic is None):
        raise InvalidArgumentError(f"root is {root}; it must be a rank, from 0 to {session.job.size - 1}")
    return int(root)


def _call(
    session: Session,
    collective: Literal["all_reduce", "broadcast", "all_gather", "barrier"],
    source: Any,
    result: Any,
    timeout: Timeout,
    name: str | None,
    op: ReduceOp | str = "sum",
    root: int = 0,
    async_op: bool = False,
    backup: bool = False,
    group: Group | None = None,
) -> Any:
    seconds = None if timeout is None else to_seconds(timeout)
    if not async_op and group is None:
        session.runtime.run(collective, source, result, op, root, name, seconds, backup)
        return result
    number = 0 if group is None else number_of(session, group)
    work = session.runtime.submit(
        collective, source, result, op=op, root=root, group=number, name=name, timeout=seconds,
        is_waited_for=not async_op, backup=backup, may_travel=True,
    )  # fmt: skip
    limit = session.config.timeout_s if seconds is None else seconds
    handle = WorkHandle(
        work, result, limit, collective, name, range(session.job.size) if group is None else group.ranks
    )
    return handle if async_op else handle.wait()


def _start(
    session: Session, source: Any, result: Any, op: ReduceOp | str, name: str, group: Group | None, ranks: Sequence[int]
) -> Any:
    """The handle of an allreduce that travels with others where it is small; _call() for that alone, in less time."""
    number = 0
    if group is not None:
        number, ranks = number_of(session, group), group.ranks
    # A round may begin late in its time, and has a time of its own.
    return session.runtime.start(StartedHandle, source, result, op, name, number, ranks, 2 * session.timeout_s)


@overload
def allreduce(
    array: Any, op: ReduceOp | str = ..., *, out: OutT, async_op: Literal[False] = ..., **options: Unpack[_Backup]
) -> OutT: ...
@overload
def allreduce(
    array: Any, op: ReduceOp | str = ..., *, out: OutT, async_op: Literal[True], **options: Unpack[_Backup]
) -> Handle[OutT]: ...
@overload
def allreduce(
    array: TensorT, op: ReduceOp | str = ..., *, async_op: Literal[False] = ..., **options: Unpack[_Backup]
) -> TensorT: ...
@overload
def allreduce(
    array: TensorT, op: ReduceOp | str = ..., *, async_op: Literal[True], **options: Unpack[_Backup]
) -> Handle[TensorT]: ...
@overload
def allreduce(
    array: npt.NDArray[ScalarT], op: ReduceOp | str = ..., *, async_op: Literal[False] = ..., **options: Unpack[_Backup]
) -> npt.NDArray[ScalarT]: ...
@overload
def allreduce(
    array: npt.NDArray[ScalarT], op: ReduceOp | str = ..., *, async_op: Literal[True], **options: Unpack[_Backup]
) -> Handle[npt.NDArray[ScalarT]]: ...
@overload
def allreduce(
    array: Any, op: ReduceOp | str = ..., *, async_op: Literal[False] = ..., **options: Unpack[_Backup]
) -> npt.NDArray[Any]: ...
@overload
def allreduce(
    array: Any, op: ReduceOp | str = ..., *, async_op: Literal[True], **options: Unpack[_Backup]
) -> Handle[npt.NDArray[Any]]: ...
def allreduce(
    array: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    async_op: bool = False,
    out: Any = None,
    timeout: Timeout = None,
    backup: bool = False,
    group: Group | None = None,
) -> Any:
    """Combines `array` of all ranks elementwise and gives every rank the result, the same bits on each.

    Args:
        array: A numpy array (or what numpy.asarray takes), or a tensor of any library with DLPack, in CPU memory or on
            a GPU (docs/numpy.md, "Arrays on GPUs"). Of one shape and dtype on all ranks: float32, float64, float16,
            bfloat16, int8, int16, int32, int64, uint8, bool.
        op: A ReduceOp or its string.
        name: Matches the calls of different ranks, in any order; without names, calls match in the order they are made.
            With async_op, arrays of 1 MB and less that have names travel together.
        async_op: Return a Handle at once; `array` must then not change until it is done.
        out: Where the result goes (contiguous, like `array`); may be `array` itself.
        timeout: Seconds until the operation fails on all ranks, else the setting timeout_s.
        backup: Sums and averages; the same on all ranks. Ends without the last HERRING_BACKUP_WORKERS ranks (setting
            backup_workers), whose data is then not in the result; they get the same result as all others. An average is
            over those who are in: Handle.contributors(). Without the setting it changes nothing.
        group: Among its ranks alone: new_group().

    Returns `out`, else a new array: numpy for numpy, lists and numbers (those of shape ()), torch for torch (any
    library whose tensors have new_empty), CuPy for CuPy, numpy for the rest (JAX). Raises MismatchError where ranks
    disagree, HerringTimeoutError that names the ranks that did not come, PeerLostError where one died,
    InvalidArgumentError for arrays and values that do not work.
    """
    session = _current()
    try:
        source = as_input(array)
        result = new_result(session.runtime, source) if out is None else out
        if async_op and name is not None and timeout is None and not backup and (ranks := session.ranks) is not None:
            return _start(session, source, result, op, name, group, ranks)
        return _call(session, "all_reduce", source, result, timeout, name, op, 0, async_op, backup, group)
    except InvalidArgumentError as refused:
        return through_host(
            refused, allreduce_, array, op, results="new", out=out, async_op=async_op, timeout=timeout, name=name,
            backup=backup, group=group,
        )  # fmt: skip


@overload
def allreduce_(
    array: ArrayT, op: ReduceOp | str = ..., *, async_op: Literal[False] = ..., **options: Unpack[_Backup]
) -> ArrayT: ...
@overload
def allreduce_(
    array: ArrayT, op: ReduceOp | str = ..., *, async_op: Literal[True], **options: Unpack[_Backup]
) -> Handle[ArrayT]: ...
def allreduce_(
    array: Any,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    backup: bool = False,
    group: Group | None = None,
) -> Any:
    """allreduce() in place: `array` must be contiguous and writable, and is returned.

    With arrays of herring.empty() nothing is copied on this side.
    """
    session = _current()
    try:
        if async_op and name is not None and timeout is None and not backup and (ranks := session.ranks) is not None:
            return _start(session, None, array, op, name, group, ranks)
        if async_op or group is not None:
            return _call(session, "all_reduce", None, array, timeout, name, op, 0, async_op, backup, group)
        seconds = None if timeout is None else to_seconds(timeout)
        session.runtime.run("all_reduce", None, array, op, 0, name, seconds, backup)
        return array
    except InvalidArgumentError as refused:
        return through_host(
            refused, allreduce_, array, op, results="same", async_op=async_op, timeout=timeout, name=name,
            backup=backup, group=group,
        )  # fmt: skip


@overload
def broadcast(
    array: TensorT, root: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> TensorT: ...
@overload
def broadcast(
    array: TensorT, root: int = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[TensorT]: ...
@overload
def broadcast(
    array: npt.NDArray[ScalarT], root: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> npt.NDArray[ScalarT]: ...
@overload
def broadcast(
    array: npt.NDArray[ScalarT], root: int = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[npt.NDArray[ScalarT]]: ...
@overload
def broadcast(
    array: Any, root: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> npt.NDArray[Any]: ...
@overload
def broadcast(
    array: Any, root: int = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[npt.NDArray[Any]]: ...
def broadcast(
    array: Any,
    root: int = 0,
    *,
    name: str | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    group: Group | None = None,
) -> Any:
    """A new array with rank `root`'s elements; on other ranks `array` gives shape and dtype. See allreduce().

    `root` is a rank of the job, also with a group.
    """
    session = _current()
    try:
        source = as_input(array)
        result = new_result(session.runtime, source)
        place = _root(session, root, group)
        return _call(session, "broadcast", source, result, timeout, name, root=place, async_op=async_op, group=group)
    except InvalidArgumentError as refused:
        return through_host(
            refused, broadcast_, array, root, results="new", async_op=async_op, timeout=timeout, name=name, group=group
        )


@overload
def broadcast_(
    array: ArrayT, root: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> ArrayT: ...
@overload
def broadcast_(
    array: ArrayT, root: int = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[ArrayT]: ...
def broadcast_(
    array: Any,
    root: int = 0,
    *,
    name: str | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    group: Group | None = None,
) -> Any:
    """broadcast() in place: `array` must be contiguous and writable, and is returned."""
    session = _current()
    try:
        place = _root(session, root, group)
        return _call(session, "broadcast", None, array, timeout, name, root=place, async_op=async_op, group=group)
    except InvalidArgumentError as refused:
        return through_host(
            refused, broadcast_, array, root, results="same", async_op=async_op, timeout=timeout, name=name, group=group
        )


@overload
def allgather(array: TensorT, *, async_op: Literal[False] = ..., **options: Unpack[_Uneven]) -> TensorT: ...
@overload
def allgather(array: TensorT, *, async_op: Literal[True], **options: Unpack[_Uneven]) -> Handle[TensorT]: ...
@overload
def allgather(
    array: npt.NDArray[ScalarT], *, async_op: Literal[False] = ..., **options: Unpack[_Uneven]
) -> npt.NDArray[ScalarT]: ...
@overload
def allgather(
    array: npt.NDArray[ScalarT], *, async_op: Literal[True], **options: Unpack[_Uneven]
) -> Handle[npt.NDArray[ScalarT]]: ...
@overload
def allgather(array: Any, *, async_op: Literal[False] = ..., **options: Unpack[_Uneven]) -> npt.NDArray[Any]: ...
@overload
def allgather(array: Any, *, async_op: Literal[True], **options: Unpack[_Uneven]) -> Handle[npt.NDArray[Any]]: ...
def allgather(
    array: Any,
    *,
    name: str | None = None,
    async_op: bool = False,
    timeout: Timeout = None,
    group: Group | None = None,
    uneven: bool = False,
) -> Any:
    """The ranks' arrays joined along the first dimension, in order of rank.

    `array` has one shape and dtype on all ranks: (n, ...) gives (size() * n, ...). With `uneven` (the same on all
    ranks) n may differ, as in MPI's Allgatherv: the ranks tell each other their shapes first. Of one name, one such
    call at a time; not in elastic jobs. See allreduce() for the rest.
    """
    if uneven:
        return allgather_uneven(array, async_op, name=name, timeout=timeout, group=group)
    session = _current()
    try:
        source = as_input(array)
        dims = tuple(source.shape)
        size = session.job.size if group is None else group.size
        joined = (size * dims[0], *dims[1:]) if dims else (size,)
        result = new_result(session.runtime, source, joined)
        return _call(session, "all_gather", source, result, timeout, name, async_op=async_op, group=group)
    except InvalidArgumentError as refused:
        return through_host(
            refused, allgather, array, results="returned", async_op=async_op, timeout=timeout, name=name, group=group
        )


@overload
def barrier(*, async_op: Literal[False] = ..., **options: Unpack[Options]) -> None: ...
@overload
def barrier(*, async_op: Literal[True], **options: Unpack[Options]) -> Handle[None]: ...
def barrier(
    *, name: str | None = None, timeout: Timeout = None, async_op: bool = False, group: Group | None = None
) -> Handle[None] | None:
    """Returns when every rank has called it; with async_op a Handle that is done then.

    Raises HerringTimeoutError naming the ranks that did not.
    """
    session = _current()
    if async_op or group is not None:
        handle: Handle[None] | None = _call(
            session, "barrier", None, None, timeout, name, async_op=async_op, group=group
        )
        return handle
    session.runtime.run("barrier", None, None, "sum", 0, name, None if timeout is None else to_seconds(timeout), False)
    return None


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = "float32") -> np.ndarray[Any, Any]:
    """An uninitialised numpy array in memory that this host's ranks share and the network can reach.

    Operations in place on it copy nothing on this side. It stays valid after shutdown(). Where the shared memory
    (setting arena_bytes) is used up, the array is an ordinary one, which works but is copied; stats() counts both.
    """
    return shared_empty(_current().runtime, shape, dtype)


def empty_like(arrays: Mapping[str, Any] | Iterable[tuple[str, Any]], *, group: Group | None = None) -> dict[str, Any]:
    """Uninitialised arrays by name, like these, one after the other in memory as empty() gives it.

    ``allreduce_(array, name=name, async_op=True)`` of them, with the name that each has here, copies nothing on this
    side: what lies side by side and is ready on all ranks is one operation, whatever its size. Other arrays may be
    passed by these names, and ranks may ask for other memory, or for none: what does not lie in place is copied.

    ``arrays``: numpy arrays, torch tensors on the CPU (tensors come back), or anything with a shape and a numpy dtype.
    ``group``: the one in which they are reduced. Raises InvalidArgumentError where a name comes twice.
    """
    session = _current()
    number = 0 if group is None else number_of(session, group)
    return _row.empty_like(arrays, lambda names, sizes: session.runtime.place(number, names, sizes))


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
