"""What is measured: Herring in its variants and its peers, all through one interface and one loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from herring.bench._pattern import Array, Pattern
from herring.bench._profile import Costs, Meter


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


@dataclass(frozen=True)
class Plan:
    """Iterations of one turn, of which the first `lead_in` are not timed. Iteration i uses `salt + i`. `event`: of
    _profile.tracepoint(), where system calls are counted. Of `metered_each` timed iterations one has its costs read."""

    iterations: int
    salt: int
    lead_in: int = 0
    event: int | None = None
    metered_each: int = 1


@dataclass
class Turn:
    """Some iterations of one contender: this process's seconds of each, its costs in all of them (what was read of some
    stands for the others), and its wrong elements in the checked one."""

    seconds: list[float] = field(default_factory=list)
    costs: Costs = field(default_factory=Costs)
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

    def turn(self, plan: Plan) -> Turn:
        """Runs the prepared case; data is refilled before every iteration, outside the timing. The last one's result is
        checked on every rank."""

    def release(self) -> None:
        """Gives the case's memory back."""

    def close(self) -> None:
        """Ends whatever was started. Idempotent."""


def timed(plan: Plan, fill: Callable[[int], None], barrier: Callable[[], None], operate: Callable[[], None]) -> Turn:
    """The measuring loop of every contender: fill(iteration), barrier, clock, operation, clock, barrier.

    The second barrier keeps a rank that is done from filling and checking, which takes a core from those that are not.
    Costs count until after it: a rank may still work for others when its own result is there. To read them takes
    microseconds, by which ranks begin apart: where that matters, only some iterations have it (Plan.metered_each).
    """
    turn = Turn()
    costs = Costs(syscalls=None if plan.event is None else 0)
    metered = 0
    middle = min(plan.metered_each, plan.iterations - plan.lead_in) // 2
    meter = Meter(plan.event)
    spent = Costs(syscalls=meter.overhead())
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        for i in range(plan.iterations):
            timed_before = i - plan.lead_in
            is_metered = timed_before >= 0 and timed_before % plan.metered_each == middle
            fill(i)
            barrier()
            before = meter.read() if is_metered else None
            begin = time.perf_counter()
            operate()
            seconds = time.perf_counter() - begin
            barrier()
            if before is not None:
                costs += meter.read() - before - spent
                metered += 1
            if timed_before >= 0:
                turn.seconds.append(seconds)
        if metered:
            turn.costs = costs.scaled(len(turn.seconds) / metered)
    finally:
        meter.close()
        if gc_was_on:
            gc.enable()
    return turn


def timed_loop(
    pattern: Pattern,
    source: Array,
    result: Array,
    barrier: Callable[[], None],
    operate: Callable[[], None],
    plan: Plan,
) -> Turn:
    """timed(), and at the end the check. `source` and `result` are the same array for an operation in place."""
    turn = timed(plan, lambda i: pattern.fill(source, plan.salt + i), barrier, operate)
    turn.wrong = count_wrong(pattern, source, result, plan, in_place=result is source)
    return turn


def count_wrong(pattern: Pattern, source: Array, result: Array, plan: Plan, *, in_place: bool) -> int:
    """Wrong elements after the last iteration of a plan."""
    if plan.iterations == 0:
        return 0
    last = plan.salt + plan.iterations - 1
    wrong = pattern.count_wrong(result, last)
    if not in_place:
        # An operation that is not in place must leave its input alone.
        untouched = np.empty_like(source)
        pattern.fill(untouched, last)
        wrong += int(np.count_nonzero(untouched != source))
    return wrong
