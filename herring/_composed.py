"""What each collective is made of, for arrays of any library.

An array here is contiguous, in CPU memory, with `shape`, slices along the first axis, and the buffer protocol or
DLPack: numpy's and torch's are. Every function is a generator for herring._operation.Operation. No framework is known
here; Horovod's names (herring.horovod) and the numpy library (herring._exchanges) stand on it.
"""

from __future__ import annotations

import functools
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
        return _core.message_tag(self.wire_name(), self.instance)

    def exchange(self, sources: Sequence[Any], splits: Sequence[int] | None) -> _core.RowExchange:
        """Rows of arrays, of which ranks have different numbers, between all ranks."""
        return _core.RowExchange(
            sources, splits, group=self.group, ranks=self.ranks, index=self.index, name=self.wire_name(),
            use=self.instance, timeout=self.timeout_s,
        )  # fmt: skip


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
            f"ranks give lists of different lengths, from {least} to {most} arrays; "
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
    exchange = call.exchange(sources, None)
    yield [exchange.tell(call.runtime)]
    counts = [exchange.counts(number) for number in range(len(sources))]
    results = [new(each, (sum(rows), *each.shape[1:])) for each, rows in zip(sources, counts, strict=True)]
    yield [work for number, result in enumerate(results) for work in exchange.move(call.runtime, number, result)]
    return results


def all_to_all(call: Call, source: Any, splits: Sequence[int], new: Callable[[Any, tuple[int, ...]], Any]) -> Steps:
    """Rows of `source` to each rank, `splits[i]` of them to rank i (_core.checked_splits()); returns the rows that
    came, and how many from each."""
    exchange = call.exchange([source], splits)
    yield [exchange.tell(call.runtime)]
    counts = exchange.counts()
    result = new(source, (sum(counts), *source.shape[1:]))
    yield exchange.move(call.runtime, 0, result)
    return result, counts


def reduce_scatter(call: Call, sources: Sequence[Any], whole: Sequence[Any], op: str) -> Steps:
    """This rank's rows of each sum: as many to each rank, one more to the first ones where they do not come out even.

    `whole` is memory for all of each sum: made of an all_reduce, whose sums every rank holds anyway.
    """
    yield from all_reduce(call, sources, whole, op)
    results = []
    for each in whole:
        start, stop = _core.rows_of(each.shape[0], len(call.ranks), call.index)
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


def _nth(number: int) -> str:
    return "" if number == 0 else f"{_MARK}{number}"
