"""Small tensors that are reduced by name travel together (docs/adr/0015-fusion-rounds.md)."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from herring import _core
from herring._errors import HerringError
from herring._operation import Operation
from herring.horovod._engine.environment import read_number
from herring.horovod.common.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from herring.horovod._engine.engine import Engine

# Groups of Horovod's process sets are numbered from 0; their small tensors have groups of their own, from here.
_FIRST_GROUP = 1 << 20
# Tickets are from here on, and have the number of the process set above their lowest 40 bits.
FIRST_TICKET = 1 << 60
_MOST_SETS = 0xFFFFF
# Past this a bucket saves no more than its copies cost.
_MOST_TENSOR_BYTES = 1 << 20
# What ends an operation at its deadline adds a little; past this much more it never will.
_GRACE_S = 60.0
_LONGEST_CLOSE_S = 30.0
# Handles of an engine that has gone must not be those of the next one.
_SERIES = itertools.count()
# Stands before the names of what is no allreduce.
_OTHER = "\x1f"


# Starts the ordinary operation of one that goes alone: tensor, output, name, number of the operator, prescale,
# postscale, number of the process set.
StartAlone = Callable[[Any, Any, str, int, float, float, int], Operation]


class Fusions:
    """The small tensors of each process set, by their tickets. Safe from any thread that holds no other lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        config = engine.session.config
        # A round may begin late in a tensor's time, and has a time of its own.
        self.longest_s = 2 * config.timeout_s + _GRACE_S
        self._timeout_s = config.timeout_s
        # Elastic jobs have a journal of their operations by name, and a job of one has nothing to send.
        self._is_off = engine.session.elastic is not None or engine.size == 1
        self._series = next(_SERIES)
        self.bucket_bytes = _threshold(config.fusion_bytes)  # 0: no fusion
        self._cycle_s = _cycle_ms(config.fusion_cycle_ms) / 1e3
        self.tensor_bytes = min(self.bucket_bytes, _MOST_TENSOR_BYTES)  # what is larger goes alone
        self.by_set: dict[int | None, _core.Fusion] = {}
        self.start_alone: StartAlone | None = None  # of the framework whose tensors come here
        self._all: dict[int, _core.Fusion] = {}  # by process set; those of sets that have gone, too
        self._alone: dict[int, Operation] = {}  # of those in flight that went alone
        # Process set and key of what is going alone just now: the timeline has had it since it was submitted.
        self.going_alone: set[tuple[int, str]] = set()

    def open(self, set_id: int, ranks: Sequence[int], index: int) -> None:
        """For a new process set that this rank is in; every rank of it calls this."""
        if self._is_off or self.bucket_bytes == 0 or len(ranks) == 1:
            return
        self.by_set[set_id] = self._all[set_id] = _core.Fusion(
            runtime=self._engine.runtime, group=_FIRST_GROUP + set_id, ranks=ranks, index=index,
            bucket_bytes=self.bucket_bytes, tensor_bytes=self.tensor_bytes,
            cycle=self._cycle_s, timeout=self._timeout_s, series=self._series,
            checks_finite=self._engine.session.config.check_finite == "on",
            go_alone=functools.partial(self._go_alone, set_id),
        )  # fmt: skip

    def place(self, set_id: int, names: list[str], sizes: list[int]) -> tuple[_core.Memory, list[int]]:
        """Memory for tensors of this process set by name, of so many bytes, which are reduced in place there; and where
        each begins."""
        fusion = self.by_set.get(set_id)
        # Without fusion nothing goes by these names, and any group will do.
        return self._engine.runtime.place(0, names, sizes) if fusion is None else fusion.place(names, sizes)

    def watch(self, fusion: _core.Fusion, ticket: int, name: str) -> None:
        """For the timeline: it has been submitted."""
        timeline = self._engine.timeline
        if timeline is not None:
            timeline.watch(
                functools.partial(self.on_end, fusion, ticket), functools.partial(self.wait_for, fusion, ticket, 0.0),
                "allreduce", f"allreduce.{name}",
            )  # fmt: skip

    def find(self, ticket: object) -> _core.Fusion | None:
        """Where somebody has to finish it yet; None where nobody has, or it is no ticket of this engine."""
        if type(ticket) is not int or ticket < FIRST_TICKET:
            return None
        fusion = self._all.get(ticket >> 40 & _MOST_SETS)
        return fusion if fusion is not None and ticket in fusion else None

    @property
    def in_flight(self) -> list[int]:
        """Tickets until somebody has seen the end."""
        return [ticket for fusion in list(self._all.values()) for ticket, _ in fusion.in_flight()]

    def poll(self, ticket: int) -> bool | None:
        """Whether it has ended, well or not; None where it is not in flight."""
        fusion = self.find(ticket)
        if fusion is None:
            return None
        if not fusion.poll(ticket):
            return False
        alone = self._alone.get(ticket)
        return alone is None or alone.poll()

    def finish(self, ticket: int) -> Any:
        """Waits for its end, and forgets it; its result, or raises why there is none. None: it is not in flight."""
        fusion = self._all.get(ticket >> 40 & _MOST_SETS)
        if fusion is None:
            return None
        try:
            result = fusion.finish(ticket, self.longest_s)
        except HerringError as error:
            raise HorovodInternalError(f"allreduce.{fusion.drop(ticket)}: {error}") from error
        return self._alone.pop(ticket).wait()[0] if result is False else result

    def wait_for_all(self) -> None:
        """Returns when what is in flight now has ended, well or not. It stays in flight."""
        for fusion in list(self._all.values()):
            for ticket, _ in fusion.in_flight():
                if fusion.wait(ticket, self.longest_s) is False:
                    try:
                        self._alone[ticket].wait()
                    except HorovodInternalError:  # Belongs to who started it.
                        continue

    def pending(self) -> dict[tuple[int, str], int]:
        """Tickets of what has not ended, by process set and key. Those that went alone are the engine's."""
        return {
            (set_id, f"allreduce.{name}"): ticket
            for set_id, fusion in list(self.by_set.items())
            if set_id is not None
            for ticket, name in fusion.in_flight()
            if fusion.wait(ticket, 0.0) is None
        }

    def has_pending(self, set_id: int, key: str) -> bool:
        """Whether a tensor of this key has neither ended nor started by itself."""
        fusion, name = self.by_set.get(set_id), key.removeprefix("allreduce.")
        return fusion is not None and name != key and fusion.has_pending(name)

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

    def close(self, set_id: int, leaves_job: bool = False) -> None:
        """The process set goes, on all ranks of it. What all of them have called ends first; the rest fails."""
        fusion = self.by_set.pop(set_id, None)
        if fusion is not None:
            fusion.close(_LONGEST_CLOSE_S, leaves_job)

    def close_all(self) -> None:
        """The engine goes."""
        for set_id in list(self.by_set):
            if set_id is not None:
                self.close(set_id, leaves_job=True)

    def _go_alone(
        self, set_id: int, ticket: int, tensor: Any, output: Any, name: str, op: int, prescale: float, postscale: float
    ) -> None:
        assert self.start_alone is not None
        place = (set_id, f"allreduce.{name}")
        self.going_alone.add(place)
        try:
            self._alone[ticket] = self.start_alone(tensor, output, name, op, prescale, postscale, set_id)
        finally:
            self.going_alone.discard(place)

    def is_done(self, fusion: _core.Fusion, ticket: int) -> bool:
        """poll() for who is not its owner; also of one that is not in flight any more."""
        if not fusion.poll(ticket):
            return False
        alone = self._alone.get(ticket)
        return alone is None or alone.is_done()

    def wait_for(self, fusion: _core.Fusion, ticket: int, limit_s: float) -> bool:
        """Blocks until that is so, but no longer than that; whether it is."""
        ended = fusion.wait(ticket, limit_s)
        if ended is None:
            return False
        alone = None if ended else self._alone.get(ticket)
        return alone is None or alone.wait_for(limit_s)

    def on_end(self, fusion: _core.Fusion, ticket: int, callback: Callable[[], object]) -> None:
        """Calls it when that is so, or when somebody asks an operation that went alone; while it is in flight."""

        def tell(ended: bool) -> None:
            alone = None if ended else self._alone.get(ticket)
            if alone is None:
                callback()
            else:
                alone.on_done(callback)

        fusion.on_end(ticket, tell)


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
