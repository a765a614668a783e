"""Small tensors that are reduced by name travel together (docs/adr/0015-fusion-rounds.md)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from herring import _core
from herring._errors import HerringError, InternalError
from herring._operation import Operation
from herring.horovod._engine.environment import read_number
from herring.horovod.common.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from herring.horovod._engine.engine import Engine
    from herring.horovod._engine.process_sets import ProcessSet

# Groups of Horovod's process sets are numbered from 0; their small tensors have groups of their own, from here.
_FIRST_GROUP = 1 << 20
# Past this a bucket saves no more than its copies cost.
_MOST_TENSOR_BYTES = 1 << 20
# What ends an operation at its deadline adds a little; past this much more it never will.
_GRACE_S = 60.0
_LONGEST_CLOSE_S = 30.0
# Handles of an engine that has gone must not be those of the next one.
_SERIES = itertools.count()
# Stands before the names of what is no allreduce.
_OTHER = "\x1f"


# Addresses of source and result, numbers of dtype and operator, shape, prescale and postscale.
Tensor = tuple[int, int, int, int, tuple[int, ...], float, float]


class Fused(NamedTuple):
    """One tensor that travels with others. A single tuple, because Python's garbage collector looks at each of a
    thousand of them."""

    fusion: _core.Fusion
    start_alone: Callable[[Fused], Operation]
    source: Any
    result: Any  # what synchronize() returns
    name: str
    op: int
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet


class Fusions:
    """The small tensors of each process set, by their tickets. Safe from any thread that holds no other lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        config = engine.session.config
        # A round may begin late in a tensor's time, and has a time of its own.
        self._longest_s = 2 * config.timeout_s + _GRACE_S
        self._timeout_s = config.timeout_s
        # Elastic jobs have a journal of their operations by name, and a job of one has nothing to send.
        is_off = engine.session.elastic is not None or engine.size == 1
        self._series = next(_SERIES)
        self._bucket_bytes = 0 if is_off else _threshold(config.fusion_bytes)
        self._cycle_s = _cycle_ms(config.fusion_cycle_ms) / 1e3
        self.by_set: dict[int | None, _core.Fusion] = {}
        self.in_flight: dict[int, Fused] = {}  # until somebody has seen the end
        self._alone: dict[int, Operation] = {}  # of those in flight that went alone

    def open(self, set_id: int, ranks: Sequence[int], index: int) -> None:
        """For a new process set that this rank is in; every rank of it calls this."""
        if self._bucket_bytes == 0 or len(ranks) == 1:
            return
        self.by_set[set_id] = _core.Fusion(
            runtime=self._engine.runtime, group=_FIRST_GROUP + set_id, ranks=ranks, index=index,
            bucket_bytes=self._bucket_bytes, tensor_bytes=min(self._bucket_bytes, _MOST_TENSOR_BYTES),
            cycle=self._cycle_s, timeout=self._timeout_s, series=self._series,
            go_alone=self._go_alone,
        )  # fmt: skip

    def start(self, fused: Fused, tensor: Tensor) -> int:
        """Starts an allreduce that travels with others: its ticket, from 1 << 60 on. 0: it has to go alone, now.

        Raises InvalidArgumentError where the name or the memory is in use.
        """
        ticket = fused.fusion.submit(fused.name, *tensor, fused)
        if ticket:
            self.in_flight[ticket] = fused
            timeline = self._engine.timeline
            if timeline is not None:
                timeline.watch(lambda callback: self._on_end(ticket, callback), "allreduce", f"allreduce.{fused.name}")
        return ticket

    def poll(self, ticket: int) -> bool:
        """Whether it has ended, well or not."""
        if not self.in_flight[ticket].fusion.poll(ticket):
            return False
        alone = self._alone.get(ticket)
        return alone is None or alone.poll()

    def finish(self, ticket: int) -> Any:
        """Waits for its end, and forgets it; its result, or raises why there is none."""
        fused = self.in_flight[ticket]
        try:
            ended = fused.fusion.finish(ticket, self._longest_s)
        except HerringError as error:
            del self.in_flight[ticket]
            raise HorovodInternalError(f"allreduce.{fused.name}: {error}") from error
        if ended is None:
            raise InternalError(
                f"allreduce.{fused.name} did not end at its deadline: a bug in Herring, please report it"
            )
        del self.in_flight[ticket]
        if not ended:
            self._alone.pop(ticket).wait()
        return fused.result

    def wait_for_all(self) -> None:
        """Returns when what is in flight now has ended, well or not. It stays in flight."""
        for ticket, fused in list(self.in_flight.items()):
            if fused.fusion.wait(ticket, self._longest_s) is False:
                try:
                    self._alone[ticket].wait()
                except HorovodInternalError:  # Belongs to who started it.
                    continue

    def pending(self) -> dict[tuple[int, str], int]:
        """Tickets of what has not ended, by process set and key. Those that went alone are the engine's."""
        sets = {id(fusion): set_id for set_id, fusion in list(self.by_set.items()) if set_id is not None}
        return {
            (sets[id(fused.fusion)], f"allreduce.{fused.name}"): ticket
            for ticket, fused in list(self.in_flight.items())
            if id(fused.fusion) in sets and fused.fusion.wait(ticket, 0.0) is None
        }

    def went_outside(self, set_id: int, kind: str, key: str, name: str | None) -> None:
        """Tells ranks that wait here that the tensor goes by itself on this rank.

        Raises InvalidArgumentError where the name is in flight.
        """
        fusion = self.by_set.get(set_id)
        if fusion is not None:
            fusion.went_outside(name if kind == "allreduce" and name is not None else _OTHER + key)

    def came_back(self, set_id: int, kind: str, key: str, name: str | None) -> None:
        """The same has ended."""
        fusion = self.by_set.get(set_id)
        if fusion is not None:
            fusion.came_back(name if kind == "allreduce" and name is not None else _OTHER + key)

    def pause(self) -> None:
        """From now on nothing travels together, until resume()."""
        for fusion in self.by_set.values():
            fusion.pause()

    def resume(self) -> None:
        """On all ranks, when nothing is under way."""
        for fusion in self.by_set.values():
            fusion.resume()

    def close(self, set_id: int) -> None:
        """The process set goes. What is pending ends first."""
        fusion = self.by_set.pop(set_id, None)
        if fusion is not None:
            fusion.close(_LONGEST_CLOSE_S)

    def close_all(self) -> None:
        """The engine goes."""
        for set_id in list(self.by_set):
            if set_id is not None:
                self.close(set_id)

    def _go_alone(self, ticket: int, fused: Fused) -> None:
        self._alone[ticket] = fused.start_alone(fused)

    def _on_end(self, ticket: int, callback: Callable[[], object]) -> None:
        def tell(ended: bool) -> None:
            alone = None if ended else self._alone.get(ticket)
            if alone is None:
                callback()
            else:
                alone.on_done(callback)

        self.in_flight[ticket].fusion.on_end(ticket, tell)


def _threshold(otherwise: int) -> int:
    """HERRING_FUSION_BYTES where that is set, else Horovod's own name for it."""
    if "HERRING_FUSION_BYTES" in os.environ:
        return otherwise
    return read_number("HOROVOD_FUSION_THRESHOLD", otherwise, "a number of bytes, 0 for no fusion", int)


def _cycle_ms(otherwise: float) -> float:
    """Likewise."""
    if "HERRING_FUSION_CYCLE_MS" in os.environ:
        return otherwise
    return read_number("HOROVOD_CYCLE_TIME", otherwise, "a number of milliseconds", float, 1e6)
