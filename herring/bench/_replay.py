"""`herring bench replay`: training steps with the gradients of real models, at the pace of a backward pass."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

import herring
from herring._errors import HerringError, InvalidArgumentError
from herring.bench._gloo import GlooContender
from herring.bench._herring import PrivateMemory
from herring.bench._pattern import Array, Pattern
from herring.bench._replay_schedule import Bucket, backward_for, expected_step

Wait = Callable[[], object]

# A backward time for an efficiency: measured, corrected by what a step then took, and once more.
_CALIBRATION_ROUNDS = 2
_CALIBRATION_ITERATIONS = 3


class Reducer(Protocol):
    """Starts sums over all ranks, in place. Every rank calls the same in the same order."""

    @property
    def name(self) -> str:
        """ "herring", "gloo"."""

    @property
    def memory(self) -> str:
        """ "arena" or "private"."""

    def start(self, array: Array) -> Wait:
        """Begins to sum `array`; returns what blocks until that is done, and raises what it failed with."""

    def barrier(self) -> None:
        """Returns when every rank is here."""

    def close(self) -> None:
        """Ends whatever was started."""


class HerringReducer:
    """herring.allreduce_(async_op=True) on numpy arrays."""

    name = "herring"

    def __init__(self, memory: str) -> None:
        self.memory = memory

    def start(self, array: Array) -> Wait:
        """See Reducer."""
        return herring.allreduce_(array, "sum", async_op=True).wait

    def barrier(self) -> None:
        """See Reducer."""
        herring.barrier()

    def close(self) -> None:
        """See Reducer."""


class GlooReducer(GlooContender):
    """The same ProcessGroupGloo as in `herring bench allreduce`, whose own threads do the work, as under DDP."""

    def __init__(self) -> None:
        super().__init__(PrivateMemory())
        self._options.reduceOp = self._dist.ReduceOp.SUM

    def start(self, array: Array) -> Wait:
        """See Reducer."""
        wait: Wait = self._group.allreduce([self._torch.from_numpy(array)], self._options).wait
        return wait

    def barrier(self) -> None:
        """See Reducer."""
        self._group.barrier().wait()


@dataclass
class Samples:
    """Seconds of this rank, of each iteration; and its wrong elements, over all of them."""

    step: list[float] = field(default_factory=list)
    communication: list[float] = field(default_factory=list)
    wrong: int = 0
    copied: int = 0  # operations of Herring that went through a copy


@dataclass(frozen=True)
class ReplayRow:
    """What one contender did with one model. Seconds of each iteration, of the slowest rank; `wrong`: elements of all
    ranks, in all steps, warm-up too. `copied`: operations of Herring that went through a copy, of the communications
    alone. `backward_s`: the pass alone, with nobody communicating."""

    model: str
    scale: float
    gradient_elements: int
    gradient_bytes: int
    tensors: int
    buckets: tuple[Bucket, ...]
    name: str
    memory: str
    nominal_backward_s: float
    step_times_s: tuple[float, ...]
    communication_times_s: tuple[float, ...]
    backward_times_s: tuple[float, ...]
    wrong: int
    copied: int

    @property
    def step_s(self) -> float:
        """Median."""
        return statistics.median(self.step_times_s)

    @property
    def communication_s(self) -> float:
        """Median of all buckets at once with nothing beside them."""
        return statistics.median(self.communication_times_s)

    @property
    def backward_s(self) -> float:
        """Median."""
        return statistics.median(self.backward_times_s)

    @property
    def efficiency(self) -> float:
        """backward / step: 1 where communication costs nothing."""
        return self.backward_s / self.step_s

    @property
    def overlap(self) -> float:
        """The share of the communication that the backward pass hides: 1 - (step - backward) / communication. Below 0
        where a step takes longer than both one after the other."""
        return 1 - (self.step_s - self.backward_s) / self.communication_s


def _sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


def backward_alone(filled: Sequence[Bucket], backward_s: float) -> float:
    """Seconds of the pass with nothing to send: its clock, as this machine keeps it."""
    begin = time.perf_counter()
    for bucket in filled:
        _sleep_until(begin + bucket.ready * backward_s)
    _sleep_until(begin + backward_s)
    return time.perf_counter() - begin


def communication_alone(reducer: Reducer, arrays: Sequence[Array]) -> float:
    """Seconds of all buckets, started at once."""
    begin = time.perf_counter()
    for wait in [reducer.start(array) for array in arrays]:
        wait()
    return time.perf_counter() - begin


def step(reducer: Reducer, filled: Sequence[Bucket], arrays: Sequence[Array], backward_s: float) -> float:
    """Seconds of a training step: each bucket is started when it is ready, and waited for after the backward pass.

    The pass sleeps: it stands for one on an accelerator, which leaves the processor to the communication.
    """
    begin = time.perf_counter()
    waits = []
    for bucket, array in zip(filled, arrays, strict=True):
        _sleep_until(begin + bucket.ready * backward_s)
        waits.append(reducer.start(array))
    _sleep_until(begin + backward_s)
    for wait in waits:
        wait()
    return time.perf_counter() - begin


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Replay:
    """One model's buckets on this rank, in each kind of memory; measures contenders on them. Collective throughout."""

    def __init__(self, filled: Sequence[Bucket], dtype: str, memories: set[str]) -> None:
        self._filled = tuple(filled)
        self._pattern = Pattern(dtype, "sum", herring.rank(), herring.size())
        self._salt = 0
        self._arrays: dict[str, list[Array]] = {}
        for memory in sorted(memories):
            allocate = herring.empty if memory == "arena" else np.empty
            self._arrays[memory] = [allocate(bucket.elements, dtype) for bucket in self._filled]

    def _checked(self, reducer: Reducer, samples: Samples, measure: Callable[[list[Array]], float]) -> float:
        """Fresh data, barrier, the clock's part, barrier, check. The second barrier keeps a rank that is done from
        taking a core from those that are not."""
        arrays = self._arrays[reducer.memory]
        self._salt += 1
        for number, array in enumerate(arrays):
            self._pattern.fill(array, self._salt + number)  # so that a bucket in another's place is found out
        reducer.barrier()
        with _no_garbage_collection():
            seconds = measure(arrays)
        reducer.barrier()
        samples.wrong += sum(
            self._pattern.count_wrong(array, self._salt + number) for number, array in enumerate(arrays)
        )
        return seconds

    def communicate(self, reducer: Reducer, samples: Samples) -> float:
        """One communication alone; seconds of this rank."""

        def measure(arrays: list[Array]) -> float:
            before = herring.stats()["staged_ops"]
            seconds = communication_alone(reducer, arrays)
            samples.copied += herring.stats()["staged_ops"] - before
            return seconds

        return self._checked(reducer, samples, measure)

    def step(self, reducer: Reducer, samples: Samples, backward_s: float) -> float:
        """One step; seconds of this rank."""
        return self._checked(reducer, samples, lambda arrays: step(reducer, self._filled, arrays, backward_s))

    def backward(self, backward_s: float) -> float:
        """One backward pass alone; seconds of this rank."""
        herring.barrier()
        with _no_garbage_collection():
            return backward_alone(self._filled, backward_s)

    def backward_for(self, reducer: Reducer, efficiency: float) -> float:
        """Seconds of backward at which `reducer` comes out at about `efficiency`; the same on every rank.

        Raises InvalidArgumentError for a job of one worker, which has nothing to communicate; HerringError for wrong
        sums.
        """
        if herring.size() == 1:
            raise InvalidArgumentError("--backward-for needs 2 workers or more; with one, give --backward-ms")
        samples = Samples()
        self.communicate(reducer, samples)
        alone = [self.communicate(reducer, samples) for _ in range(_CALIBRATION_ITERATIONS)]
        communication_s = statistics.median(slowest(alone))
        backward_s = backward_for(self._filled, communication_s, efficiency)
        for _ in range(_CALIBRATION_ROUNDS):
            steps = [self.step(reducer, samples, backward_s) for _ in range(_CALIBRATION_ITERATIONS)]
            # While a backward pass goes on, communication is not as fast as alone: by this much.
            communication_s *= statistics.median(slowest(steps)) / expected_step(
                self._filled, backward_s, communication_s
            )
            backward_s = backward_for(self._filled, communication_s, efficiency)
        if total(samples.wrong):
            raise HerringError(f"{reducer.name} gave wrong sums; no backward time can be chosen by it")
        return backward_s


def slowest(seconds: Sequence[float]) -> tuple[float, ...]:
    """Of every iteration, the time of the rank that took longest. Collective."""
    return tuple(float(each) for each in herring.allreduce(np.array(seconds, np.float64), "max"))


def total(count: int) -> int:
    """Of all ranks. Collective."""
    return int(herring.allreduce(np.array([count], np.int64), "sum")[0])


def least(count: int) -> int:
    """Of all ranks. Collective."""
    return int(herring.allreduce(np.array([count], np.int64), "min")[0])


@dataclass
class Measured:
    """What measure_replay() found: by contender, and the backward pass alone."""

    steps: list[tuple[float, ...]]
    communications: list[tuple[float, ...]]
    wrong: list[int]
    copied: list[int]
    backwards: tuple[float, ...]


def measure_replay(
    replay: Replay, reducers: Sequence[Reducer], backward_s: float, iterations: int, warmup: int
) -> Measured:
    """`iterations` rounds after `warmup` (one at least) untimed ones.

    In a round: the backward pass alone, then for each contender its communication alone and a step. So contenders take
    turns, A B A B, and whatever the machine does meanwhile meets everyone.
    """
    samples = [Samples() for _ in reducers]
    backwards = []
    for number in range(-max(warmup, 1), iterations):
        alone = replay.backward(backward_s)
        if number >= 0:
            backwards.append(alone)
        for reducer, mine in zip(reducers, samples, strict=True):
            communication = replay.communicate(reducer, mine)
            taken = replay.step(reducer, mine, backward_s)
            if number >= 0:
                mine.communication.append(communication)
                mine.step.append(taken)
    return Measured(
        [slowest(mine.step) for mine in samples],
        [slowest(mine.communication) for mine in samples],
        [total(mine.wrong) for mine in samples],
        [total(mine.copied) for mine in samples],
        slowest(backwards),
    )
