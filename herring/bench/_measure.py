"""The order of measuring: A B A B per size, so that whatever the machine does meanwhile meets everyone alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

import herring
from herring.bench._contender import Case, Contender, Plan
from herring.bench._profile import Costs

# Large ones take turns one by one, small ones in groups, a quarter of all within these limits. A turn is led in by some
# that are not timed: the first ones after somebody else's turn are of waking up, of finding ranks and cores together,
# and of finding out that the other one no longer polls on these cores.
_SMALL_BYTES = 1 << 20
_SMALL_TURN = (5, 50)
_SMALL_LEAD_IN = 20
_LEAD_IN_S = 0.05
_MOST_LEAD_IN = 5000
_SMALL_METERED_EACH = 10


@dataclass(frozen=True)
class Schedule:
    """How often: `iterations` timed ones after `warmup` that are not; `turn` at a time (0: by size), each turn after
    `lead_in` that are not timed (None: by their time)."""

    iterations: int
    warmup: int
    turn: int = 0
    lead_in: int | None = None
    event: int | None = None  # Plan's

    def turns(self, size_bytes: int) -> Iterator[int]:
        """Timed iterations of each turn."""
        least, most = _SMALL_TURN if size_bytes < _SMALL_BYTES else (1, 1)
        length = self.turn or min(max(self.iterations // 4, least), most)
        left = self.iterations
        while left > 0:
            yield min(length, left)
            left -= length

    def lead_in_of(self, size_bytes: int, seconds: float) -> int:
        """Iterations before those of each turn; one takes about so many seconds."""
        if self.lead_in is not None:
            return self.lead_in
        least = _SMALL_LEAD_IN if size_bytes < _SMALL_BYTES else 0
        return min(max(int(_LEAD_IN_S / max(seconds, 1e-9)), least), _MOST_LEAD_IN)


@dataclass(frozen=True)
class Row:
    """What one contender did in one case. `times_s`: of each timed iteration, the slowest rank. `wrong`: elements of
    all ranks, over all checked iterations. `costs`: of all ranks, over all timed iterations."""

    case: Case
    name: str
    memory: str
    times_s: tuple[float, ...]
    wrong: int
    costs: Costs = field(default_factory=Costs)

    @property
    def minimum_s(self) -> float:
        """The fastest iteration."""
        return min(self.times_s)

    @property
    def median_s(self) -> float:
        """Half of the iterations took at most this long."""
        return statistics.median(self.times_s)

    @property
    def p95_s(self) -> float:
        """95 % of the iterations took at most this long (nearest rank: of fewer than 20, the slowest)."""
        ordered = sorted(self.times_s)
        return ordered[-(-95 * len(ordered) // 100) - 1]

    @property
    def processor_s_per_gb(self) -> float:
        """Processor seconds of all ranks for 1 GB (1e9 bytes) of one rank's array."""
        return self.costs.processor_s / (len(self.times_s) * self.case.nbytes / 1e9)

    @property
    def syscalls(self) -> float | None:
        """System calls of one operation, all ranks; None where they were not counted."""
        return None if self.costs.syscalls is None else self.costs.syscalls / len(self.times_s)

    @property
    def sleeps(self) -> float:
        """How often threads of all ranks went to sleep in one operation."""
        return self.costs.sleeps / len(self.times_s)


def _slowest(seconds: Sequence[float]) -> tuple[float, ...]:
    """Of every iteration, the time of the rank that took longest. Collective."""
    times = np.array(seconds, np.float64)
    return tuple(float(each) for each in herring.allreduce(times, "max"))


def _total(wrong: int) -> int:
    return int(herring.allreduce(np.array([wrong], np.int64), "sum")[0])


def _total_costs(costs: Costs) -> Costs:
    counted = costs.syscalls is not None
    numbers = np.array([costs.processor_s, costs.syscalls or 0, costs.sleeps], np.float64)
    processor_s, syscalls, sleeps = herring.allreduce(numbers, "sum")
    return Costs(float(processor_s), int(syscalls) if counted else None, int(sleeps))


def measure(case: Case, contenders: Sequence[Contender], schedule: Schedule) -> list[Row]:
    """One row for each contender, in their order. Collective: every rank passes the same.

    Results are checked in the last warm-up iteration (one is run where none is asked for) and at the end of every turn,
    on every rank.
    """
    for contender in contenders:
        contender.prepare(case)
    wrong = [0] * len(contenders)
    seconds: list[list[float]] = [[] for _ in contenders]
    costs = [Costs(syscalls=None if schedule.event is None else 0)] * len(contenders)
    fastest = []
    for index, contender in enumerate(contenders):
        turn = contender.turn(Plan(max(schedule.warmup, 1), salt=0))
        fastest.append(min(_slowest(turn.seconds)))
        wrong[index] += turn.wrong
    salt = max(schedule.warmup, 1)
    lead_ins = [schedule.lead_in_of(case.nbytes, each) for each in fastest]
    metered_each = _SMALL_METERED_EACH if case.nbytes < _SMALL_BYTES else 1
    for length in schedule.turns(case.nbytes):
        for index, contender in enumerate(contenders):
            lead_in = lead_ins[index]
            turn = contender.turn(Plan(lead_in + length, salt, lead_in, schedule.event, metered_each))
            seconds[index] += turn.seconds
            costs[index] += turn.costs
            wrong[index] += turn.wrong
        salt += max(lead_ins) + length
    for contender in contenders:
        contender.release()
    return [
        Row(case, each.name, each.memory, _slowest(seconds[i]), _total(wrong[i]), _total_costs(costs[i]))
        for i, each in enumerate(contenders)
    ]


def measure_all(
    cases: Sequence[Case],
    contenders: Sequence[Contender],
    schedule: Schedule,
    on_rows: Callable[[list[Row]], None],
    on_refusal: Callable[[str], None],
) -> list[Row]:
    """All cases in order; `on_rows` gets each case's rows as soon as they are known. A contender that cannot run a case
    is left out of it, and `on_refusal` gets the reason once."""
    rows: list[Row] = []
    refused: set[str] = set()
    for case in cases:
        able = []
        for contender in contenders:
            reason = contender.refusal(case)
            if not reason:
                able.append(contender)
            elif reason not in refused:
                refused.add(reason)
                on_refusal(reason)
        found = measure(case, able, schedule)
        on_rows(found)
        rows += found
    return rows
