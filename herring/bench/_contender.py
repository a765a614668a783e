"""What is measured: Herring in its variants and its peers, all through one interface and one loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from herring.bench._pattern import Array, Pattern


@dataclass(frozen=True)
class Case:
    """One line of the table, less who runs it. `in_place`: the result replaces the input."""

    size_bytes: int
    dtype: str
    op: str
    in_place: bool

    @property
    def count(self) -> int:
        """Elements: what fits in the size, at least one."""
        return max(1, self.size_bytes // np.dtype(self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of these elements."""
        return self.count * np.dtype(self.dtype).itemsize


@dataclass
class Turn:
    """Some iterations of one contender: this process's seconds of each, its processor seconds (user and system, all
    threads) in all of them, and its wrong elements in the checked one."""

    seconds: list[float] = field(default_factory=list)
    processor_s: float = 0.0
    wrong: int = 0


class Contender(Protocol):
    """Something that can allreduce. Every rank calls the same methods in the same order."""

    @property
    def name(self) -> str:
        """ "herring", "gloo", "mpi" ..."""

    @property
    def memory(self) -> str:
        """ "arena" or "private"."""

    def refusal(self, case: Case) -> str:
        """Why it cannot run this case (the same answer on every rank); empty where it can."""

    def prepare(self, case: Case) -> None:
        """Takes memory for a case; forgets the one before."""

    def turn(self, iterations: int, salt: int, lead_in: int = 0) -> Turn:
        """Runs the prepared case: `iterations` of which the first `lead_in` are not timed; data is refilled before
        every one, outside the timing. The last one's result is checked on every rank. Iteration i uses `salt + i`."""

    def release(self) -> None:
        """Gives the case's memory back."""

    def close(self) -> None:
        """Ends whatever was started. Idempotent."""


def timed_loop(
    pattern: Pattern,
    source: Array,
    result: Array,
    barrier: Callable[[], None],
    operate: Callable[[], None],
    iterations: int,
    salt: int,
    lead_in: int = 0,
) -> Turn:
    """The measuring loop of every contender: fill, barrier, clock, operation, clock, barrier; at the end, the check.

    The second barrier keeps a rank that is done from filling and checking, which takes a core from those that are not.
    Processor seconds count until after it: a rank may still work for others when its own result is there.
    `source` and `result` are the same array for an operation in place.
    """
    turn = Turn()
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        for i in range(iterations):
            pattern.fill(source, salt + i)
            barrier()
            begin_processor = time.process_time()
            begin = time.perf_counter()
            operate()
            seconds = time.perf_counter() - begin
            barrier()
            if i >= lead_in:
                turn.seconds.append(seconds)
                turn.processor_s += time.process_time() - begin_processor
    finally:
        if gc_was_on:
            gc.enable()
    if iterations > 0:
        turn.wrong = pattern.count_wrong(result, salt + iterations - 1)
        if result is not source:
            # An operation that is not in place must leave its input alone.
            before = np.empty_like(source)
            pattern.fill(before, salt + iterations - 1)
            turn.wrong += int(np.count_nonzero(before != source))
    return turn
