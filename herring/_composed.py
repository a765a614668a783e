"""What each collective is made of, for arrays of any library.

An array here is contiguous, in CPU memory, with `shape`, slices along the first axis, and the buffer protocol or
DLPack: numpy's and torch's are. Every function is a generator for herring._operation.Operation. No framework is known
here; Horovod's names (herring.horovod) and the numpy library (herring._exchanges) stand on it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from herring import _core
from herring._arrays import new_result
from herring._errors import HerringError, InvalidArgumentError, MismatchError, NotFiniteError
from herring._operation import Steps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
_MAX_DIMS = 12
_EXACT_TAG = 1 << 63
# Between an operation's key and a step of it; not in anybody's names.
_MARK = "\x1f"


@dataclass(frozen=True)
class Call:
    """One operation of one process set, as this rank sees it: where its pieces go."""

    runtime: _core.Runtime
    group: int
    ranks: tuple[int, ...]  # global ranks of the process set, in order
    index: int  # of this rank in `ranks`
    key: str  # the same on all ranks, unlike any other operation's in flight
    instance: int  # how often `key` has been used before
    waits: bool  # the calling thread waits at once
    space: str = "hvd/"  # stands before every key: names of one library do not meet another's
    timeout_s: float | None = None  # of each step; None: the setting timeout_s

    def submit(self, collective: Any, source: Any, result: Any, step: str = "", **arguments: Any) -> _core.Work:
        """A collective of the runtime; `step` tells several of one operation apart."""
        return self.runtime.submit(
            collective, source, result, group=self.group, name=self.wire_name(step), timeout=self.timeout_s, **arguments
        )

    def send(self, data: Any, to: int) -> _core.Work:
        """A message to a rank of the process set, under this call's tag."""
        return self.runtime.send(data, to=to, tag=self.tag(), group=self.group, timeout=self.timeout_s)

    def receive(self, memory: Any, source: int) -> _core.Work:
        """The same, from it."""
        return self.runtime.receive(memory, source=source, tag=self.tag(), group=self.group, timeout=self.timeout_s)

    def wire_name(self, step: str = "") -> str:
        """What the runtime matches ranks by."""
        return f"{self.space}{self.key}{step}"

    def tag(self) -> int:
        """For messages: another one for each use of the key, so that none meets what an earlier use left behind."""
        digest = hashlib.sha256(f"{self.space}{self.key}#{self.instance}".encode()).digest()
        return _EXACT_TAG | int.from_bytes(digest[:8], "little") >> 2


def all_reduce(
    call: Call, sources: Sequence[Any], results: Sequence[Any], op: str, is_list: bool | None = None
) -> Steps:
    """Each of `sources` into its place in `results` (which may be the same). Small ones of a list travel together.

    `is_list`: also a single one is a list, and meets lists alone. None: where there are several.
    """
    if len(sources) == 1 and not is_list:
        yield [_reduce_one(call, sources[0], results[0], "", op, call.waits)]
        return
    lists = _Lists(sources, results)
    parts = lists.sources.parts(_SMALL_BYTES)
    # The first part tells whether all ranks have the same list: only then the others are the same, too. Where it is
    # large a number goes before all of them: they are under way together.
    is_first_large = lists.sources.are_all_above(_SMALL_BYTES)
    first = [] if is_first_large else parts[:1]
    for some in (first, parts[len(first) :]):
        again = [index for part in (parts if some is first else some) for index in part]
        try:
            if some is first and is_first_large:
                yield [_compare(call, lists.digest)]
            else:
                yield from _reduce_parts(call, lists, op, some)
        except (MismatchError, NotFiniteError) as error:
            # On all ranks alike. By itself each says what is wrong with it, where all have as many.
            yield from _compare_lengths(call, len(sources), error)
            yield [_reduce_one(call, sources[i], results[i], f"{_nth(i)}{_MARK}again", op) for i in again]
            return


class _Lists:
    """The arrays of a call, and their memory."""

    def __init__(self, sources: Sequence[Any], results: Sequence[Any]) -> None:
        self.pairs = list(zip(sources, results, strict=True))
        self.results = _core.Arrays(results, writable=True)
        is_in_place = all(source is result for source, result in self.pairs)
        self.sources = self.results if is_in_place else _core.Arrays(sources)
        self.digest = self.sources.digest()


def _compare(call: Call, digest: int) -> _core.Work:
    """Fails with MismatchError on all ranks where one of them has another list."""
    import numpy as np

    return call.submit("all_reduce", None, np.zeros(1, np.int64), op="max", digest=digest)


def _compare_lengths(call: Call, length: int, error: Exception) -> Steps:
    """Raises MismatchError on all ranks where their lists are not equally long; `error` where some rank has no list."""
    import numpy as np

    extremes: npt.NDArray[np.int64] = np.asarray([length, -length], np.int64)
    # A rank that has no list does not come.
    limit = _COMPARE_S if call.timeout_s is None else min(call.timeout_s, _COMPARE_S)
    try:
        yield [replace(call, timeout_s=limit).submit("all_reduce", None, extremes, f"{_MARK}lengths", op="max")]
    except HerringError:
        raise error from None
    most, least = int(extremes[0]), -int(extremes[1])
    if most != least:
        raise MismatchError(
            f"{call.key}: ranks give lists of different lengths, from {least} to {most} arrays; "
            f"rank {call.ranks[call.index]} gives {length}"
        )


def _reduce_one(call: Call, source: Any, result: Any, step: str, op: str, waits: bool = False) -> _core.Work:
    return call.submit("all_reduce", None if source is result else source, result, step, op=op, is_waited_for=waits)


def _reduce_parts(call: Call, lists: _Lists, op: str, parts: Sequence[list[int]]) -> Steps:
    buckets: list[Any] = []
    works = []
    for part in parts:
        first = part[0]
        source, memory = lists.pairs[first]
        bucket = None
        if len(part) > 1:
            bucket = source = memory = new_result(call.runtime, source, (lists.sources.elements(part),))
            lists.sources.pack(part, bucket)
        source = None if source is memory else source
        works.append(call.submit("all_reduce", source, memory, _nth(first), op=op, digest=lists.digest))
        buckets.append(bucket)
    yield works
    for bucket, part in zip(buckets, parts, strict=True):
        if bucket is not None:
            lists.results.unpack(part, bucket)


# Larger ones travel by themselves: a bucket saves no more than its copies cost.
_SMALL_BYTES = 1 << 20
# So long ranks whose lists differ wait to learn how.
_COMPARE_S = 5.0


def broadcast(call: Call, source: Any, result: Any, root: int) -> Steps:
    """`root` counts within the process set."""
    source = None if source is result else source
    yield [call.submit("broadcast", source, result, root=root, is_waited_for=call.waits)]


def barrier(call: Call) -> Steps:
    """Ends when all have come."""
    yield [call.submit("barrier", None, None, is_waited_for=call.waits)]


def all_gather(call: Call, sources: Sequence[Any], new: Callable[[Any, tuple[int, ...]], Any]) -> Steps:
    """The ranks' blocks, whose first dimensions may differ, joined along that. `new(like, shape)` makes the results."""
    told = [_Meta.of(source) for source in sources]
    said = _Table(call, [each.values for each in told])
    yield said.works
    results, works = [], []
    for number, source in enumerate(sources):
        metas = [_Meta(said.row(number, member)) for member in range(len(call.ranks))]
        _check_same_but_first(call, metas)
        counts = [meta.first for meta in metas]
        result = new(source, (sum(counts), *told[number].rest))
        results.append(result)
        works += _gather_blocks(call, number, source, result, counts)
    yield works
    return results


def _gather_blocks(call: Call, number: int, source: Any, result: Any, counts: list[int]) -> list[_core.Work]:
    if _count(result.shape) == 0:
        return []
    if len(set(counts)) == 1:
        return [call.submit("all_gather", source, result, f"{_nth(number)}{_MARK}all")]
    works, start = [], 0
    for member, count in enumerate(counts):
        if count > 0:
            block = result[start : start + count]
            mine = source if member == call.index else None
            works.append(call.submit("broadcast", mine, block, f"{_nth(number)}{_MARK}from{member}", root=member))
        start += count
    return works


def all_to_all(
    call: Call, source: Any, splits: Sequence[int] | None, new: Callable[[Any, tuple[int, ...]], Any]
) -> Steps:
    """Rows of `source` to each rank, `splits[i]` of them to rank i (equally many where None); returns the rows that
    came, and how many from each."""
    size = len(call.ranks)
    meta = _Meta.of(source)
    sent = equal_splits(meta.first, size) if splits is None else checked_splits(splits, meta.first, size)
    said = _Table(call, [meta.values + sent])
    yield said.works
    rows = [said.row(0, member) for member in range(size)]
    _check_same_but_first(call, [_Meta(row) for row in rows])
    received = [row[_Meta.LENGTH + call.index] for row in rows]
    result = new(source, (sum(received), *meta.rest))
    works: list[_core.Work] = []
    if _count(meta.rest) > 0:
        starts = [0, *itertools.accumulate(sent)], [0, *itertools.accumulate(received)]
        for member in range(size):
            out = source[starts[0][member] : starts[0][member + 1]]
            into = result[starts[1][member] : starts[1][member + 1]]
            if member == call.index:
                into[:] = out
                continue
            if received[member] > 0:
                works.append(call.receive(into, member))
            if sent[member] > 0:
                works.append(call.send(out, member))
    yield works
    return result, received


def reduce_scatter(call: Call, sources: Sequence[Any], whole: Sequence[Any], op: str) -> Steps:
    """This rank's rows of each sum: as many to each rank, one more to the first ones where they do not come out even.

    `whole` is memory for all of each sum: made of an all_reduce, whose sums every rank holds anyway.
    """
    yield from all_reduce(call, sources, whole, op)
    results = []
    for each in whole:
        start, stop = rows_of(each.shape[0], len(call.ranks), call.index)
        results.append(each[start:stop])
    return results


def adasum(call: Call, sources: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Steps:
    """Adasum: a binary tree over the ranks (their number is a power of two), each node of it `combine(lower, upper)`.

    At each level two ranks exchange what they have and both compute the same node; so all end with the same bits.
    """
    values = list(sources)
    distance = 1
    while distance < len(call.ranks):
        partner = call.index ^ distance
        works, theirs = [], []
        for number, value in enumerate(values):
            other = value + 0  # memory of the same kind
            name = f"{_nth(number)}{_MARK}adasum{distance}"
            level = replace(call, key=call.key + name)
            works.append(level.receive(other, partner))
            works.append(level.send(value, partner))
            theirs.append(other)
        yield works
        pairs = zip(values, theirs, strict=True)
        values = [combine(a, b) if call.index < partner else combine(b, a) for a, b in pairs]
        distance *= 2
    return values


def equal_splits(rows: int, size: int) -> list[int]:
    """Raises InvalidArgumentError where `rows` is no multiple of `size`."""
    if rows % size != 0:
        raise InvalidArgumentError(
            f"alltoall without splits: {rows} rows cannot be divided equally among {size} ranks; pass splits"
        )
    return [rows // size] * size


def checked_splits(splits: Sequence[int], rows: int, size: int) -> list[int]:
    """Raises InvalidArgumentError unless there is one for each rank and all rows have a place."""
    try:
        values = [operator.index(each) for each in splits]
    except TypeError:
        raise InvalidArgumentError(
            f"alltoall: splits are {splits!r}; they must be whole numbers, one for each rank"
        ) from None
    if len(values) != size or any(each < 0 for each in values) or sum(values) > rows:
        raise InvalidArgumentError(
            f"alltoall: splits are {values}; there must be {size}, none negative, with a sum of at most {rows} rows"
        )
    return values


def rows_of(rows: int, size: int, index: int) -> tuple[int, int]:
    """The first row of member `index`, and the one after its last."""
    each, more = divmod(rows, size)
    start = index * each + min(index, more)
    return start, start + each + (1 if index < more else 0)


class _Meta:
    """What ranks tell each other of an array: dtype, number of dimensions, dimensions."""

    LENGTH = _MAX_DIMS + 2

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values[: self.LENGTH])

    @staticmethod
    def of(array: Any) -> _Meta:
        check_dims(array)
        dims = [int(size) for size in array.shape] or [1]
        return _Meta([DTYPES.index(dtype_name(array)), len(dims), *dims, *[0] * (_MAX_DIMS - len(dims))])

    @property
    def first(self) -> int:
        return self.values[2]

    @property
    def rest(self) -> tuple[int, ...]:
        return tuple(self.values[3 : 2 + self.values[1]])

    def __str__(self) -> str:
        return f"{DTYPES[self.values[0]]}{[self.first, *self.rest]}"


class _Table:
    """One row of integers for each array of each rank, gathered; `works` has to end before row() is asked."""

    def __init__(self, call: Call, rows: list[list[int]]) -> None:
        import numpy as np

        mine: npt.NDArray[np.int64] = np.asarray(rows, np.int64)
        self._all: npt.NDArray[np.int64] = np.empty((len(call.ranks), *mine.shape), np.int64)
        self.works = [call.submit("all_gather", mine, self._all)]

    def row(self, number: int, member: int) -> list[int]:
        return [int(value) for value in self._all[member, number]]


def _check_same_but_first(call: Call, metas: list[_Meta]) -> None:
    """All ranks see the same, so all raise or none does."""
    odd = [i for i, meta in enumerate(metas) if (meta.values[0], meta.rest) != (metas[0].values[0], metas[0].rest)]
    if odd:
        told = ", ".join(f"rank {call.ranks[i]}: {metas[i]}" for i in (0, *odd))
        raise MismatchError(f"{call.key}: ranks disagree, and only the first dimension may differ: {told}")


def check_dims(array: Any) -> None:
    """Raises InvalidArgumentError for more dimensions than ranks tell each other of."""
    if len(array.shape) > _MAX_DIMS:
        raise InvalidArgumentError(f"the array has {len(array.shape)} dimensions; at most {_MAX_DIMS} are supported")


def dtype_name(array: Any) -> str:
    """ "float32". Raises InvalidArgumentError for a dtype that Herring does not move."""
    name = _text(array.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InvalidArgumentError(f"dtype {name} is not supported; those that are: {', '.join(DTYPES)}")
    return name


@functools.lru_cache(maxsize=64)
def _text(dtype: Any) -> str:
    """numpy takes microseconds to write one."""
    return str(dtype)


def _count(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= int(size)
    return product


def _nth(number: int) -> str:
    return "" if number == 0 else f"{_MARK}{number}"
