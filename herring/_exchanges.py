"""Operations in several steps, for arrays: what each does is in herring._composed, shared with Horovod's names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from herring import _composed, _core
from herring._arrays import TensorT, as_input, is_foreign, new_result, refuse_gpu
from herring._context import Session, process
from herring._device_arrays import through_host
from herring._errors import HerringError, InvalidArgumentError
from herring._group import Group, number_of
from herring._handle import Handle, OperationHandle, to_seconds
from herring._operation import Operation, Steps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

    ScalarT = TypeVar("ScalarT", bound=np.generic)

# Keys that are made up come again after so many operations: what the runtime remembers of names stays bounded.
_UNNAMED = 1 << 16
_OPS = ("sum", "average", "min", "max", "product", "band", "bor", "bxor")
_BITWISE = _OPS[-3:]
# numpy's codes of dtypes that work, in this machine's order of bytes, as most arrays are.
_PLAIN = frozenset("fdebhilqB?")


class Options(TypedDict, total=False):
    """What every operation takes."""

    name: str | None
    timeout: float | timedelta | None
    group: Group | None


def _session(what: str) -> Session:
    session = process.current()
    if session.elastic is not None:
        raise InvalidArgumentError(f"{what} does not work in an elastic job: its result depends on which ranks exist")
    return session


def _start(
    session: Session,
    kind: str,
    steps: Callable[[_composed.Call], Steps],
    *,
    name: str | None,
    timeout: float | timedelta | None,
    group: Group | None,
    async_op: bool,
) -> Any:
    """The result, or a handle that has it."""
    _core.check_name(name)
    seconds = to_seconds(timeout)
    number = 0 if group is None else number_of(session, group)
    ranks = tuple(range(session.job.size)) if group is None else group.ranks
    place = session.job.rank if group is None or group.rank is None else group.rank
    uses = session.uses
    with uses.lock:
        if name is None:
            # Of whatever kind, so that ranks whose calls differ meet, and are told.
            count = uses.unnamed[number] = uses.unnamed.get(number, -1) + 1
            key = f"noname.{count % _UNNAMED}"
        else:
            key = f"{kind}.{name}"
        running = uses.in_flight.get((number, key))
        if isinstance(running, Operation) and not running.is_done():
            raise InvalidArgumentError(f"{kind} {name!r} is in flight; wait for its handle first, or use another name")
        instance = uses.counts[number, key] = uses.counts.get((number, key), 0) + 1
        call = _composed.Call(
            session.runtime, number, ranks, place, key, instance, not async_op, space="np/", timeout_s=seconds
        )
        limit = session.config.timeout_s if seconds is None else seconds
        what = kind if name is None else f"{kind} {name!r}"

        def explain(error: HerringError) -> Exception:
            if (kind if name is None else repr(name)) in str(error):
                return error
            return type(error)(f"{what}: {error}")

        operation = Operation(what, steps(call), limit, explain)
        uses.in_flight[number, key] = operation

        def forget() -> None:
            with uses.lock:
                if uses.in_flight.get((number, key)) is operation:
                    del uses.in_flight[number, key]

        operation.on_done(forget)
    operation.begin(watched=async_op)
    return OperationHandle[Any](operation, ranks) if async_op else operation.wait()


def as_sliced(array: Any) -> Any:
    """An as_input() with slices along its first axis: numpy's, torch's, or another library's memory as numpy's.

    Of a dtype that works: a call that is refused later has begun on this rank, and those after it would meet others'.
    """
    source = as_input(array)
    if is_foreign(source) and not hasattr(source, "new_empty"):
        import numpy as np

        try:
            source = np.from_dlpack(source)
        except (BufferError, RuntimeError, TypeError) as error:
            refuse_gpu(array)
            raise InvalidArgumentError(
                f"this {type(array).__name__} cannot be read as a numpy array ({error})"
            ) from error
    if getattr(source, "is_cuda", False):
        refuse_gpu(source)
    _check_no_gradient(source)
    _composed.dtype_name(source)
    return source


def _check_no_gradient(array: Any) -> None:
    if getattr(array, "requires_grad", False):
        raise InvalidArgumentError(
            "this tensor requires a gradient, and herring cannot compute that: pass tensor.detach()"
        )


def _op(op: Any, sources: Sequence[Any]) -> str:
    value = str(getattr(op, "value", op))
    if value not in _OPS:
        raise InvalidArgumentError(f"op is {op!r}; it must be a herring.ReduceOp, or one of {', '.join(_OPS)}")
    for dtype in map(_composed.dtype_name, sources if value in _BITWISE else ()):
        if "float" in dtype:
            raise InvalidArgumentError(f"{value} needs integers or bool, not {dtype}")
    return value


def _rows(source: Any, what: str) -> None:
    if len(source.shape) == 0:
        raise InvalidArgumentError(f"{what}: the array is a scalar; it must have at least one dimension")


def _maker(session: Session) -> Callable[[Any, tuple[int, ...]], Any]:
    return lambda like, shape: new_result(session.runtime, like, shape)


@overload
def alltoall(
    array: TensorT, splits: None = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> TensorT: ...
@overload
def alltoall(
    array: TensorT, splits: None = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[TensorT]: ...
@overload
def alltoall(
    array: TensorT, splits: Sequence[int], *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> tuple[TensorT, list[int]]: ...
@overload
def alltoall(
    array: TensorT, splits: Sequence[int], *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[tuple[TensorT, list[int]]]: ...
@overload
def alltoall(
    array: npt.NDArray[ScalarT], splits: None = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> npt.NDArray[ScalarT]: ...
@overload
def alltoall(
    array: npt.NDArray[ScalarT], splits: None = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[npt.NDArray[ScalarT]]: ...
@overload
def alltoall(
    array: npt.NDArray[ScalarT], splits: Sequence[int], *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> tuple[npt.NDArray[ScalarT], list[int]]: ...
@overload
def alltoall(
    array: npt.NDArray[ScalarT], splits: Sequence[int], *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[tuple[npt.NDArray[ScalarT], list[int]]]: ...
@overload
def alltoall(
    array: Any, splits: None = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> npt.NDArray[Any]: ...
@overload
def alltoall(
    array: Any, splits: None = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[npt.NDArray[Any]]: ...
@overload
def alltoall(
    array: Any, splits: Sequence[int], *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> tuple[npt.NDArray[Any], list[int]]: ...
@overload
def alltoall(
    array: Any, splits: Sequence[int], *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[tuple[npt.NDArray[Any], list[int]]]: ...
def alltoall(
    array: Any,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    group: Group | None = None,
) -> Any:
    """Rows of `array` to each rank, `splits[i]` of them to the group's i-th: the rows that came, in order of rank.

    Without `splits` each rank gets equally many, and the result alone is returned; with them (result, how many rows
    came from each rank), as MPI's Alltoallv. Goes from rank to rank, not through servers. See allreduce() for the rest;
    of one name, one call at a time. Raises InvalidArgumentError where the splits do not fit. Not in elastic jobs.
    """
    session = _session("alltoall")
    try:
        source = as_sliced(array)
    except InvalidArgumentError as refused:
        return through_host(
            refused, alltoall, array, splits, results="returned", async_op=async_op, timeout=timeout, name=name,
            group=group,
        )  # fmt: skip
    _rows(source, "alltoall")
    size = session.job.size if group is None else group.size
    # Here, so that a bad call starts nothing.
    _core.check_dims(len(source.shape))
    counts = _core.checked_splits(splits, source.shape[0], size)

    def steps(call: _composed.Call) -> Steps:
        result, received = yield from _composed.all_to_all(call, source, counts, _maker(session))
        return result if splits is None else (result, received)

    return _start(session, "alltoall", steps, name=name, timeout=timeout, group=group, async_op=async_op)


@overload
def reduce_scatter(
    array: TensorT, op: str = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> TensorT: ...
@overload
def reduce_scatter(
    array: TensorT, op: str = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[TensorT]: ...
@overload
def reduce_scatter(
    array: npt.NDArray[ScalarT], op: str = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> npt.NDArray[ScalarT]: ...
@overload
def reduce_scatter(
    array: npt.NDArray[ScalarT], op: str = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[npt.NDArray[ScalarT]]: ...
@overload
def reduce_scatter(
    array: Any, op: str = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> npt.NDArray[Any]: ...
@overload
def reduce_scatter(
    array: Any, op: str = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[npt.NDArray[Any]]: ...
def reduce_scatter(
    array: Any,
    op: str = "average",
    *,
    name: str | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    group: Group | None = None,
) -> Any:
    """This rank's rows of what allreduce() would give: the i-th part of numpy.array_split(sum, size) on the i-th rank.

    It moves as much as an allreduce. See there for the arguments; of one name, one call at a time. Not in elastic jobs.
    """
    session = _session("reduce_scatter")
    try:
        source = as_sliced(array)
    except InvalidArgumentError as refused:
        return through_host(
            refused, reduce_scatter, array, op, results="returned", async_op=async_op, timeout=timeout, name=name,
            group=group,
        )  # fmt: skip
    what = _op(op, [source])
    _rows(source, "reduce_scatter")
    if group is not None:
        number_of(session, group)
    whole = new_result(session.runtime, source)

    def steps(call: _composed.Call) -> Steps:
        [part] = yield from _composed.reduce_scatter(call, [source], [whole], what)
        result = new_result(session.runtime, source, tuple(part.shape))
        result[:] = part  # A view would keep all of the sum.
        return result

    return _start(session, "reduce_scatter", steps, name=name, timeout=timeout, group=group, async_op=async_op)


def allgather_uneven(array: Any, async_op: bool, **options: Any) -> Any:
    """allgather(uneven=True)."""
    session = _session("allgather(uneven=True)")
    try:
        source = as_sliced(array)
    except InvalidArgumentError as refused:
        return through_host(refused, allgather_uneven, array, results="returned", async_op=async_op, **options)
    _core.check_dims(max(len(source.shape), 1))

    def steps(call: _composed.Call) -> Steps:
        [result] = yield from _composed.all_gather(call, [source], _maker(session))
        return result

    return _start(session, "allgather", steps, async_op=async_op, **options)


@overload
def grouped_allreduce(
    arrays: Sequence[TensorT], op: str = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> list[TensorT]: ...
@overload
def grouped_allreduce(
    arrays: Sequence[TensorT], op: str = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[list[TensorT]]: ...
@overload
def grouped_allreduce(
    arrays: Sequence[npt.NDArray[ScalarT]], op: str = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> list[npt.NDArray[ScalarT]]: ...
@overload
def grouped_allreduce(
    arrays: Sequence[npt.NDArray[ScalarT]], op: str = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[list[npt.NDArray[ScalarT]]]: ...
@overload
def grouped_allreduce(
    arrays: Sequence[Any], op: str = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> list[Any]: ...
@overload
def grouped_allreduce(
    arrays: Sequence[Any], op: str = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[list[Any]]: ...
def grouped_allreduce(
    arrays: Sequence[Any],
    op: str = "average",
    *,
    name: str | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    group: Group | None = None,
) -> Any:
    """allreduce() of each of `arrays`, as one operation: those of 1 MB and less travel together. A list of results.

    The same list (dtypes, shapes, order) on all ranks. See allreduce(); of one name, one call at a time.
    """
    session, arrays = process.current(), list(arrays)
    try:
        sources = arrays if _are_plain(arrays) else [as_sliced(array) for array in arrays]
    except InvalidArgumentError as refused:
        return through_host(
            refused, grouped_allreduce_, None, op, listed=arrays, results="new", async_op=async_op, timeout=timeout,
            name=name, group=group,
        )  # fmt: skip
    what = _op(op, sources)
    results = [new_result(session.runtime, source) for source in sources]
    return _reduce_list(session, sources, results, what, results, name, timeout, group, async_op)


ArraysT = TypeVar("ArraysT", bound=Sequence[Any])


@overload
def grouped_allreduce_(
    arrays: ArraysT, op: str = ..., *, async_op: Literal[False] = ..., **options: Unpack[Options]
) -> ArraysT: ...
@overload
def grouped_allreduce_(
    arrays: ArraysT, op: str = ..., *, async_op: Literal[True], **options: Unpack[Options]
) -> Handle[ArraysT]: ...
def grouped_allreduce_(
    arrays: Any,
    op: str = "average",
    *,
    name: str | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    group: Group | None = None,
) -> Any:
    """grouped_allreduce() in place: numpy arrays or tensors with new_empty(), contiguous and writable. Returns them."""
    session, places = process.current(), list(arrays)
    if not _are_plain(places) or not all(array.flags.writeable for array in places):
        try:
            for place, array in enumerate(places):
                _check_in_place(array, place)
                _check_no_gradient(array)
                _composed.dtype_name(array)
        except InvalidArgumentError as refused:
            return through_host(
                refused, grouped_allreduce_, arrays, op, listed=places, results="same", async_op=async_op,
                timeout=timeout, name=name, group=group,
            )  # fmt: skip
    what = _op(op, places)
    return _reduce_list(session, places, places, what, arrays, name, timeout, group, async_op)


def _reduce_list(
    session: Session,
    sources: list[Any],
    results: list[Any],
    op: str,
    returned: Any,
    name: str | None,
    timeout: float | timedelta | None,
    group: Group | None,
    async_op: bool,
) -> Any:
    if not sources:
        raise InvalidArgumentError(
            "grouped_allreduce: the list is empty; every rank must pass the same arrays, at least one"
        )

    def steps(call: _composed.Call) -> Steps:
        yield from _composed.all_reduce(call, sources, results, op, is_list=True)
        return returned

    return _start(session, "grouped_allreduce", steps, name=name, timeout=timeout, group=group, async_op=async_op)


def _are_plain(arrays: Sequence[Any]) -> bool:
    """Numpy's, row-major, of dtypes that work: for long lists a quick look at what as_sliced() looks at closely."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and all(
        type(array) is numpy.ndarray
        and array.flags.c_contiguous
        and array.dtype.isnative
        and array.dtype.char in _PLAIN
        for array in arrays
    )


def _check_in_place(array: Any, place: int) -> None:
    import numpy as np

    if isinstance(array, np.ndarray):
        if array.flags.c_contiguous and array.flags.writeable:
            return
        why = "is read-only" if array.flags.c_contiguous else "is not contiguous (row-major)"
    elif hasattr(array, "new_empty"):
        if getattr(array, "is_cuda", False):
            refuse_gpu(array)
        if array.is_contiguous():
            return
        why = "is not contiguous (row-major)"
    else:
        refuse_gpu(array)
        why = f"is a {type(array).__name__}; it must be a numpy array or a torch tensor"
    raise InvalidArgumentError(
        f"grouped_allreduce_: array {place} of the list {why}, but the result is written into it"
    )
