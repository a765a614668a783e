"""Data whose sum is known: what every rank puts in, and what must come out, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
OPS = ("sum", "average", "min", "max", "product", "band", "bor", "bxor")
BITWISE = ("band", "bor", "bxor")

# The pattern repeats after this many elements. Prime, so that no chunk or shard boundary falls in step with it.
_PERIOD = 65_521
_LEVELS = 7

Array = np.ndarray[Any, np.dtype[Any]]


def _reduce(op: str, inputs: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    functions = {
        "sum": np.add,
        "average": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "product": np.multiply,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    result = inputs[0].copy()
    for each in inputs[1:]:
        functions[op](result, each, out=result)
    return result


@dataclass
class Pattern:
    """Inputs and results of one (dtype, op) over `ranks` ranks.

    All inputs are small whole numbers, so that every order of adding gives the same bits in every dtype, and a result
    can be compared with == (an average, with one rounding).
    """

    dtype: str
    op: str
    rank: int
    ranks: int
    _salt: int = field(default=-1, init=False)
    _input: Array = field(init=False)
    _result: Array = field(init=False)

    def _values(self, rank: int, salt: int) -> npt.NDArray[np.int64]:
        index = np.arange(_PERIOD, dtype=np.int64)
        hashed = (index * 2_654_435_761) >> 16
        if self.op == "product":
            # Twos on two ranks only: the product stays small whatever the number of ranks.
            return 1 + (hashed + rank + salt) % 2 if rank < 2 else np.ones(_PERIOD, np.int64)
        signed = not self.dtype.startswith("uint")
        return (hashed + 3 * rank + salt) % _LEVELS - (_LEVELS // 2 if signed else 0)

    def _prepare(self, salt: int) -> None:
        salt %= _LEVELS
        if salt == self._salt:
            return
        kind = np.dtype(self.dtype)
        result = _reduce(self.op, [self._values(rank, salt) for rank in range(self.ranks)])
        if self.op == "average":
            mean = result / self.ranks
            self._result = (mean if kind.kind == "f" else np.trunc(mean)).astype(kind)
        else:
            self._result = result.astype(kind)
        self._input = self._values(self.rank, salt).astype(kind)
        self._salt = salt

    def fill(self, array: Array, salt: int) -> None:
        """Writes this rank's input into a flat array; `salt` makes iterations differ, so that stale data shows."""
        self._prepare(salt)
        for begin in range(0, array.size, _PERIOD):
            part = array[begin : begin + _PERIOD]
            part[:] = self._input[: part.size]

    def count_wrong(self, array: Array, salt: int) -> int:
        """Number of elements of a flat array that are not what the op over all ranks' inputs gives."""
        self._prepare(salt)
        wrong = 0
        for begin in range(0, array.size, _PERIOD):
            part = array[begin : begin + _PERIOD]
            expected = self._result[: part.size]
            if self.op == "average" and part.dtype.kind == "f":
                epsilon = float(np.finfo(part.dtype).eps)
                close = np.abs(part - expected) <= epsilon * np.maximum(1, np.abs(expected))
                wrong += part.size - int(np.count_nonzero(close))
            else:
                wrong += int(np.count_nonzero(part != expected))
        return wrong
