"""Data whose sum is known: what every rank puts in, and what must come out, to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
OPS = ("sum", "average", "min", "max", "product", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")

# The pattern repeats after this many elements. Prime, so that no chunk or shard boundary falls in step with it.
_PERIOD = 65_521
_LEVELS = 7

Array = np.ndarray[Any, np.dtype[Any]]
Numbers = np.ndarray[Any, np.dtype[np.int32]]


def _reduce(op: str, inputs: Iterable[Numbers]) -> Numbers:
    functions: dict[str, Any] = {
        "sum": np.add,
        "average": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "product": np.multiply,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    result: Numbers | None = None
    for each in inputs:
        result = each if result is None else functions[op](result, each)
    assert result is not None
    return result


class Pattern:
    """Inputs and results of one (dtype, op) over `ranks` ranks, for arrays of `count` elements.

    All inputs are small whole numbers, so that every order of adding gives the same bits in every dtype, and a result
    can be compared with == (an average, with one rounding). Everything is computed here and now: fill() and
    count_wrong() are only copies and comparisons.
    """

    def __init__(self, dtype: str, op: str, rank: int, ranks: int, count: int = _PERIOD) -> None:
        self._op = op
        self._period = min(count, _PERIOD)
        kind = np.dtype(dtype)
        index = np.arange(self._period, dtype=np.int64)
        base = ((index * 2_654_435_761 >> 16) % (2 * _LEVELS)).astype(np.int32)
        low = 0 if dtype.startswith("uint") else -(_LEVELS // 2)
        self._inputs: list[Array] = []
        self._results: list[Array] = []
        for salt in range(_LEVELS):
            self._inputs.append(self._values(base, rank, salt, low).astype(kind))
            result = _reduce(op, (self._values(base, each, salt, low) for each in range(ranks)))
            if op == "average":
                mean = result / ranks
                self._results.append((mean if kind.kind == "f" else np.trunc(mean)).astype(kind))
            else:
                self._results.append(result.astype(kind))

    def _values(self, base: Numbers, rank: int, salt: int, low: int) -> Numbers:
        if self._op == "product":
            # Twos on two ranks only: the product stays small whatever the number of ranks.
            return 1 + (base + rank + salt) % 2 if rank < 2 else np.ones_like(base)
        # One offset is left out: seven ranks with all seven would have the same sum everywhere, in every iteration.
        return (base + 3 * (rank % (_LEVELS - 1)) + salt) % _LEVELS + low

    def fill(self, array: Array, salt: int) -> None:
        """Writes this rank's input into a flat array; `salt` makes iterations differ, so that stale data shows."""
        values = self._inputs[salt % _LEVELS]
        for begin in range(0, array.size, self._period):
            part = array[begin : begin + self._period]
            part[:] = values[: part.size]

    def count_wrong(self, array: Array, salt: int) -> int:
        """Number of elements of a flat array that are not what the op over all ranks' inputs gives."""
        results = self._results[salt % _LEVELS]
        wrong = 0
        for begin in range(0, array.size, self._period):
            part = array[begin : begin + self._period]
            expected = results[: part.size]
            if self._op == "average" and part.dtype.kind == "f":
                epsilon = float(np.finfo(part.dtype).eps)
                close = np.abs(part - expected) <= epsilon * np.maximum(1, np.abs(expected))
                wrong += part.size - int(np.count_nonzero(close))
            else:
                wrong += int(np.count_nonzero(part != expected))
        return wrong
