"""Small tensors that are reduced by name travel together (docs/adr/0015-fusion-rounds.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from herring import _core
from herring._errors import HerringError, InternalError, InvalidArgumentError
from herring.horovod._engine.operation import Operation
from herring.horovod.common.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from herring.horovod._engine.engine import Engine

# Groups of Horovod's process sets are numbered from 0; their small tensors have groups of their own, from here.
_FIRST_GROUP = 1 << 20
# Past this a bucket saves no more than its copies cost.
_MOST_TENSOR_BYTES = 1 << 20
# What ends an operation at its deadline adds a little; past this much more it never will.
_GRACE_S = 60.0
_LONGEST_CLOSE_S = 30.0


class FusedOperation:
    """One tensor that travels with others: to its caller what Operation is."""

    __slots__ = ("_alone", "_engine", "_error", "_fusion", "_on_done", "_result", "_ticket", "key", "start_alone")

    def __init__(self, engine: Engine, fusion: _core.Fusion, key: str, result: Any) -> None:
        self._engine = engine
        self._fusion = fusion
        self._ticket = 0  # 0: it is over here
        self._result = result
        self._error: Exception | None = None
        self._alone: Operation | None = None
        self.key = key
        self.start_alone: Callable[[], Operation] | None = None

    def begin(self, ticket: int) -> None:
        """It travels under this number. Call with the engine's lock held."""
        self._ticket = ticket

    def go_alone(self) -> None:
        """It does not travel with others after all."""
        if self.start_alone is not None:
            self._alone = self.start_alone()

    def poll(self) -> bool:
        """Whether it has ended, well or not."""
        if self._alone is not None:
            return self._alone.poll()
        if self._ticket == 0:
            return True
        if self._fusion.is_pending(self._ticket):
            return False
        self._finish()
        return self._alone is None or self._alone.poll()

    def is_done(self) -> bool:
        """The same, for those who look on."""
        if self._alone is not None:
            return self._alone.is_done()
        return self._ticket == 0 or not self._fusion.is_pending(self._ticket)

    def wait(self) -> Any:
        """Blocks until it has ended; returns its result or raises why there is none."""
        if self._ticket != 0:
            self._finish()
        if self._alone is not None:
            return self._alone.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def on_done(self, callback: Callable[[], object]) -> None:
        """Calls it when the operation has ended; at once where it has."""
        if self._ticket == 0:
            callback()
            return
        self._fusion.on_end(self._ticket, lambda ended: self._tell(callback, ended))

    def _tell(self, callback: Callable[[], object], ended: bool) -> None:
        if ended or self._alone is None:
            callback()
        else:
            self._alone.on_done(callback)

    def _finish(self) -> None:
        limit_s = self._engine.session.config.timeout_s
        try:
            # A round may begin late in a tensor's time, and has a time of its own.
            if self._fusion.finish(self._ticket, 2 * limit_s + _GRACE_S) is None:
                raise InternalError(f"{self.key} did not end at its deadline: a bug in Herring, please report it")
        except InternalError as error:
            self._error = error
        except HerringError as error:
            self._error = HorovodInternalError(f"{self.key}: {error}")
            self._error.__cause__ = error
        ticket, self._ticket = self._ticket, 0
        self._engine.fusions.forget(ticket)


class Fusions:
    """The small tensors of each process set. Its state is guarded by the engine's lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        config = engine.session.config
        # Elastic jobs have a journal of their operations by name, and a job of one has nothing to send.
        is_off = engine.session.elastic is not None or engine.size == 1
        self._bucket_bytes = 0 if is_off else _threshold(config.fusion_bytes)
        self._cycle_s = _cycle_s(config.fusion_cycle_ms / 1e3)
        self._by_set: dict[int, _core.Fusion] = {}
        self._in_flight: dict[int, FusedOperation] = {}

    def of(self, set_id: int) -> _core.Fusion | None:
        """Of a process set; None where tensors travel by themselves."""
        return self._by_set.get(set_id)

    def open(self, set_id: int, ranks: Sequence[int], index: int) -> None:
        """For a new process set that this rank is in; every rank of it calls this."""
        if self._bucket_bytes == 0 or len(ranks) == 1:
            return
        self._by_set[set_id] = _core.Fusion(
            runtime=self._engine.runtime, group=_FIRST_GROUP + set_id, ranks=ranks, index=index,
            bucket_bytes=self._bucket_bytes, tensor_bytes=min(self._bucket_bytes, _MOST_TENSOR_BYTES),
            cycle=self._cycle_s, timeout=self._engine.session.config.timeout_s,
            go_alone=self._go_alone,
        )  # fmt: skip

    def start(self, ticket: int, operation: FusedOperation) -> None:
        """Call with the engine's lock held since before the ticket was given."""
        operation.begin(ticket)
        self._in_flight[ticket] = operation

    def forget(self, ticket: int) -> None:
        """Somebody has seen its end."""
        self._in_flight.pop(ticket, None)

    def _go_alone(self, ticket: int) -> None:
        with self._engine.lock:
            operation = self._in_flight[ticket]
            operation.go_alone()

    def in_flight(self) -> list[FusedOperation]:
        """Those that nobody has seen the end of."""
        return list(self._in_flight.values())

    def went_outside(self, set_id: int, key: str) -> None:
        """Ranks that wait here for what goes by itself on this rank hear of it."""
        fusion = self._by_set.get(set_id)
        if fusion is not None:
            fusion.went_outside(key)

    def came_back(self, set_id: int, key: str) -> None:
        """The same has ended."""
        fusion = self._by_set.get(set_id)
        if fusion is not None:
            fusion.came_back(key)

    def pause(self) -> None:
        """From now on nothing travels together, until resume()."""
        for fusion in self._by_set.values():
            fusion.pause()

    def resume(self) -> None:
        """On all ranks, when nothing is under way."""
        for fusion in self._by_set.values():
            fusion.resume()

    def close(self, set_id: int) -> None:
        """The process set goes. Call without the engine's lock: what is pending ends first."""
        fusion = self._by_set.pop(set_id, None)
        if fusion is not None:
            fusion.close(_LONGEST_CLOSE_S)

    def close_all(self) -> None:
        """The engine goes."""
        for set_id in list(self._by_set):
            self.close(set_id)


def _threshold(otherwise: int) -> int:
    """HERRING_FUSION_BYTES where that is set, else Horovod's own name for it."""
    text = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    if not text or "HERRING_FUSION_BYTES" in os.environ:
        return otherwise
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise InvalidArgumentError(f"HOROVOD_FUSION_THRESHOLD is {text!r}; it takes a number of bytes, 0 for no fusion")
    return value


def _cycle_s(otherwise: float) -> float:
    """Likewise."""
    text = os.environ.get("HOROVOD_CYCLE_TIME", "")
    if not text or "HERRING_FUSION_CYCLE_MS" in os.environ:
        return otherwise
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise InvalidArgumentError(f"HOROVOD_CYCLE_TIME is {text!r}; it takes a number of milliseconds")
    return value / 1e3
