"""join(): ranks that have run out of data take part in the others' reductions without any.

A rank that joins tells all others. From then on each of them tells it of every operation that it has in flight or
starts; the joined rank adds zeros (what changes nothing, for other reductions) to allreduces, and makes everything else
fail, as Horovod does: once every rank has said that it knows who joined, so that all of them can tell why. Nobody asks
anybody before an operation, so where nobody joins, joining costs nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from herring import _composed as collectives
from herring import _core
from herring._bfloat16 import Bfloat16Array
from herring._composed import Call
from herring._errors import HerringTimeoutError, InvalidArgumentError
from herring._operation import Steps
from herring.horovod.common.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from herring.horovod._engine.engine import Engine

_LENGTH_TAG = 1 << 63 | 1
_BODY_TAG = 1 << 63 | 2
_YEAR_S = 365 * 86400.0
_LONGEST_BODY = 64 << 20


@dataclass(frozen=True)
class Announcement:
    """What a rank that has joined must know of an operation."""

    set_id: int
    key: str
    kind: str
    use: int  # how often the key has been used, this time included
    unnamed: int | None  # number among the operations without a name
    op: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape; none: cannot go on without a rank's data


class Outside(Protocol):
    """Operations with keys (others than Engine.start()'s) that start elsewhere: in TensorFlow's graphs."""

    def tell(self, to: Callable[[Announcement], None]) -> None:
        """Calls it for each one in flight, and for each that starts from now on; from any thread."""

    def stop_telling(self) -> None:
        """What starts is no news any more."""

    def uses(self) -> dict[tuple[int, str], int]:
        """How often each key of each process set has been used."""

    def learn(self, uses: dict[tuple[int, str], int]) -> None:
        """They have been used so often, by whom it may be."""


class Joins:
    """Who has joined, and the messages about it. Its state is guarded by the engine's lock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._epoch = 0
        self._joined: defaultdict[int, set[int]] = defaultdict(set)
        self._aware: defaultdict[int, set[int]] = defaultdict(set)  # ranks that have heard that this one joined
        self._unanswered: list[Announcement] = []  # to be taken part in when all are aware
        self._changed = threading.Condition(engine.lock)
        self._last_heard = time.monotonic()
        self._failure: Exception | None = None
        self._closed = False
        if engine.size > 1 and engine.session.elastic is None:
            self._listen()

    def joined(self) -> set[int]:
        """Ranks that have called join() and wait for the others."""
        return self._joined[self._epoch]

    @property
    def epoch(self) -> int:
        """How often all ranks have joined."""
        return self._epoch

    def announce(self, announcement: Announcement) -> None:
        """Tells the ranks that have joined what is about to start. Call with the engine's lock held."""
        for rank in self.joined():
            if self._concerns(rank, announcement):
                self.tell(rank, {"operation": asdict(announcement)})

    def join(self) -> int:
        """Returns, when all have joined, the rank that did so last: the same on every rank.

        Raises HerringTimeoutError naming the ranks that have not joined, where for the timeout no rank has started an
        operation or joined; HorovodInternalError where the job has failed.
        """
        engine = self._engine
        if engine.session.elastic is not None:
            raise InvalidArgumentError(
                "join() does not work in an elastic job: give all ranks the same number of batches"
            )
        if engine.size == 1:
            return 0
        engine.settle()
        with engine.lock:
            if engine.outside is not None:
                engine.learn(engine.outside.uses())
            joined = self.joined()
            seen = len(joined)
            joined.add(engine.rank)
            self._aware[self._epoch].add(engine.rank)
            for rank in range(engine.size):
                if rank != engine.rank:
                    self.tell(rank, {"joined": self._epoch})
            self._last_heard = time.monotonic()
            engine.fusions.pause()
            self._wait_for_all(joined)
            mine = engine.in_flight()
        # Until these have ended, some rank may still have to hear of one.
        engine.fusions.wait_for_all()
        for operation, _ in mine:
            try:
                operation.wait()
            except HorovodInternalError:  # Belongs to who started it.
                continue
        table = np.empty(engine.size, np.int64)

        def steps(call: Call) -> Steps:
            yield [call.submit("all_gather", np.asarray([seen], np.int64), table)]

        engine.run("join", "last", 0, steps)
        with engine.lock:
            del self._joined[self._epoch], self._aware[self._epoch]
            self._epoch += 1
            engine.fusions.resume()
            if engine.outside is not None:
                engine.outside.stop_telling()
                engine.outside.learn(engine.uses())
        # Who saw most others join before it came last; of several that saw as many, the highest.
        return max(range(engine.size), key=lambda rank: (int(table[rank]), rank))

    def close(self) -> None:
        """What comes from now on is no news."""
        self._closed = True

    def _wait_for_all(self, joined: set[int]) -> None:
        limit_s = self._engine.session.config.timeout_s
        while len(joined) < self._engine.size:
            if self._failure is not None:
                raise HorovodInternalError(f"join: {self._failure}") from self._failure
            left = self._last_heard + limit_s - time.monotonic()
            if left <= 0:
                missing = sorted(set(range(self._engine.size)) - joined)
                raise HerringTimeoutError(
                    f"join: ranks {missing} have neither joined nor started an operation for {limit_s:g} s"
                )
            self._changed.wait(left)

    def _concerns(self, rank: int, announcement: Announcement) -> bool:
        """Whether that operation cannot go on without what another rank, which has joined, does."""
        if rank == self._engine.rank or announcement.kind == "join":
            return False
        return any(each.set_id == announcement.set_id and rank in each.ranks for each in self._engine.sets())

    def tell(self, rank: int, message: dict[str, Any]) -> None:
        """Messages to one rank arrive in the order in which they were sent. A failure shows in the operations. Call
        with the engine's lock held."""
        body = np.frombuffer(json.dumps(message).encode(), np.uint8)
        runtime = self._engine.runtime
        runtime.send(np.asarray([len(body)], np.int64), to=rank, tag=_LENGTH_TAG)
        runtime.send(body, to=rank, tag=_BODY_TAG)

    def _listen(self) -> None:
        length = np.zeros(1, np.int64)
        work = self._engine.runtime.receive(length, tag=_LENGTH_TAG, timeout=_YEAR_S)
        work.on_done(lambda: self._on_length(work, length))

    def _on_length(self, work: _core.Work, length: Any) -> None:
        try:
            work.check()
            source, size = work.source, int(length[0])
            if not 0 < size <= _LONGEST_BODY:
                raise HorovodInternalError(f"rank {source} sent a notice of {size} bytes")
            body = np.empty(size, np.uint8)
            message = self._engine.runtime.receive(body, source=source, tag=_BODY_TAG)
            message.on_done(lambda: self._on_body(message, source, body))
        except Exception as error:
            self._fail(error)

    def _on_body(self, work: _core.Work, source: int, body: Any) -> None:
        try:
            work.check()
            self._take(source, json.loads(body.tobytes()))
            self._listen()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._engine.lock:
            if not self._closed:
                self._failure = error
            self._changed.notify_all()

    def _take(self, source: int, message: dict[str, Any]) -> None:
        with self._engine.lock:
            if "question" in message:
                self._engine.stalls.take(source, message)
                return
            self._last_heard = time.monotonic()
            if "joined" in message:
                self._take_joined(source, int(message["joined"]))
            elif "aware" in message:
                self._take_aware(source, int(message["aware"]))
            else:
                told = message["operation"]
                told["tensors"] = tuple((dtype, tuple(shape)) for dtype, shape in told["tensors"])
                self._take_part(Announcement(**told))
            self._changed.notify_all()

    def _take_joined(self, source: int, epoch: int) -> None:
        self._joined[epoch].add(source)
        self.tell(source, {"aware": epoch})
        if epoch == self._epoch:
            for _, announcement in self._engine.in_flight():
                if self._concerns(source, announcement):
                    self.tell(source, {"operation": asdict(announcement)})
            if self._engine.outside is not None:
                self._engine.outside.tell(self._announce_outside)

    def _announce_outside(self, announcement: Announcement) -> None:
        with self._engine.lock:
            self.announce(announcement)

    def _take_aware(self, source: int, epoch: int) -> None:
        if epoch < self._epoch:  # Everybody has joined since: it came late, and nothing waits for it.
            return
        self._aware[epoch].add(source)
        if self._all_are_aware():
            unanswered, self._unanswered = self._unanswered, []
            for announcement in unanswered:
                self._take_part(announcement)

    def _all_are_aware(self) -> bool:
        return len(self._aware[self._epoch]) == self._engine.size

    def _take_part(self, announcement: Announcement) -> None:
        if announcement.tensors:
            self._engine.shadow(announcement, lambda call: _reduce_nothing(call, announcement))
        elif self._all_are_aware():
            # In a barrier it counts as come; nothing else is a barrier, and the mismatch ends that on all ranks.
            self._engine.shadow(announcement, collectives.barrier)
        else:
            self._unanswered.append(announcement)


def _reduce_nothing(call: Call, announcement: Announcement) -> Steps:
    arrays = [_neutral(dtype, shape, announcement.op) for dtype, shape in announcement.tensors]
    return collectives.all_reduce(call, arrays, arrays, announcement.op)


def _neutral(dtype: str, shape: tuple[int, ...], op: str) -> Any:
    """What changes nothing: zeros, ones for a product, the largest value for a minimum."""
    if dtype == "bfloat16":
        # The upper half of a float32: 1 is 0x3f80, infinity 0x7f80, and the sign is the top bit.
        bits = {"product": 0x3F80, "min": 0x7F80, "max": -0x80}.get(op, 0)
        return Bfloat16Array(np.full(shape, bits, np.int16))
    kind = np.dtype(dtype)
    if op == "product":
        return np.ones(shape, kind)
    if op not in ("min", "max"):
        return np.zeros(shape, kind)
    if kind.kind == "f":
        return np.full(shape, np.inf if op == "min" else -np.inf, kind)
    if kind.kind == "b":
        return np.full(shape, op == "min", kind)
    limits = np.iinfo(kind)
    return np.full(shape, limits.max if op == "min" else limits.min, kind)
