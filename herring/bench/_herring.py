"""Herring itself, with gradients in the fusion buffer ("arena") or in ordinary memory ("private")."""

from __future__ import annotations

import numpy as np

import herring
from herring.bench._contender import Case, Plan, Turn, timed_loop
from herring.bench._pattern import Array, Pattern


class PrivateMemory:
    """Ordinary arrays that all contenders of one process share, so that the largest sizes fit the machine."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}

    def take(self, case: Case) -> tuple[Array, Array]:
        """(source, result) for a case; the same array twice for one in place."""
        source = self._one("source", case)
        return source, source if case.in_place else self._one("result", case)

    def release(self) -> None:
        """Forgets the arrays; they live on while a contender uses them."""
        self._arrays.clear()

    def _one(self, role: str, case: Case) -> Array:
        array = self._arrays.get(role)
        if array is None or array.size != case.count or array.dtype != np.dtype(case.dtype):
            array = np.empty(case.count, case.dtype)
            self._arrays[role] = array
        return array


class HerringContender:
    """herring.allreduce() on numpy arrays."""

    name = "herring"

    def __init__(self, memory: str, private: PrivateMemory) -> None:
        self.memory = memory
        self._private = private
        self._pattern: Pattern | None = None
        self._arrays: tuple[Array, Array] | None = None
        self._op = "sum"

    def refusal(self, case: Case) -> str:
        """See Contender."""
        return ""

    def prepare(self, case: Case) -> None:
        """See Contender."""
        self.release()
        if self.memory == "arena":
            source = herring.empty(case.count, case.dtype)
            self._arrays = (source, source if case.in_place else herring.empty(case.count, case.dtype))
        else:
            self._arrays = self._private.take(case)
        self._op = case.op
        self._pattern = Pattern(case.dtype, case.op, herring.rank(), herring.size(), case.count)

    def turn(self, plan: Plan) -> Turn:
        """See Contender."""
        assert self._arrays is not None
        assert self._pattern is not None
        source, result = self._arrays
        op = self._op

        def in_place() -> None:
            herring.allreduce_(source, op)

        def out_of_place() -> None:
            herring.allreduce(source, op, out=result)

        operate = in_place if source is result else out_of_place
        return timed_loop(self._pattern, source, result, herring.barrier, operate, plan)

    def release(self) -> None:
        """See Contender."""
        self._arrays = None

    def close(self) -> None:
        """See Contender."""
        self.release()
