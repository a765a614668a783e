"""An operation in several steps, each of which is one or more pieces of work of the runtime."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from herring._errors import HerringError, InternalError


class Started(Protocol):
    """What a step waits for: work of the runtime (_core.Work, which says what these do), or what acts as such."""

    def done(self) -> bool: ...
    def wait(self, timeout: float, *, blocks: bool = False) -> bool: ...
    def check(self) -> None: ...
    def on_done(self, callback: Callable[[], object]) -> None: ...


# Yields what was started; is resumed when all of it has ended, with the error where not well; returns the operation's
# result.
Steps = Generator[Sequence[Started], None, Any]

# Work ends by itself at its deadline, and what reports it adds a little; past this much more it never will.
_GRACE_S = 60.0


def _first_error(works: Sequence[Started]) -> HerringError | None:
    """Of works that have all ended."""
    for work in works:
        try:
            work.check()
        except HerringError as error:
            return error
    return None


class Operation:
    """Goes from step to step: on the runtime's threads where it is watched, else when somebody waits or asks."""

    def __init__(self, what: str, steps: Steps, timeout_s: float, explain: Callable[[HerringError], Exception]) -> None:
        self.what = what
        self._steps = steps
        self._timeout_s = timeout_s
        self._explain = explain
        self._lock = threading.RLock()
        self._watched = False
        self._works: Sequence[Started] = ()  # of the current step; guarded by _lock
        self._step = -1  # guarded by _lock; below 0: begin() has not been called
        self._done = False
        self._result: Any = None
        self._error: Exception | None = None
        self._on_done: list[Callable[[], object]] = []  # guarded by _lock
        self._on_seen: Callable[[], object] | None = None

    def begin(self, *, watched: bool) -> None:
        """Starts the first step. Watched: later steps start by themselves, whoever waits or not."""
        self._watched = watched
        with self._lock:
            self._step = 0
            self._resume()
        self._go_on()

    def poll(self) -> bool:
        """Whether it has ended, well or not."""
        if not self.is_done():
            return False
        self._tell_seen()
        return True

    def is_done(self) -> bool:
        """The same, for those who look on: it does not count as somebody's having seen the end."""
        if not self._done:
            self._advance(self._step)
        return self._done

    def wait(self) -> Any:
        """Blocks until it has ended; returns its result or raises why there is none."""
        while not self._done:
            if not self._wait_for_step(self._timeout_s + _GRACE_S, blocks=True):
                raise InternalError(f"{self.what} did not end at its deadline: a bug in Herring, please report it")
        self._tell_seen()
        if self._error is not None:
            raise self._error
        return self._result

    def wait_for(self, limit_s: float) -> bool:
        """Blocks until it has ended, but no longer than that; whether it has."""
        last = time.monotonic() + limit_s
        while not self._done:
            if not self._wait_for_step(max(last - time.monotonic(), 0.0)):
                return False
        return True

    def _wait_for_step(self, limit_s: float, *, blocks: bool = False) -> bool:
        with self._lock:
            works, step = self._works, self._step
        last = time.monotonic() + limit_s
        if not all(work.wait(max(last - time.monotonic(), 0.0), blocks=blocks) for work in works):
            return False
        self._advance(step)
        return True

    def on_done(self, callback: Callable[[], object]) -> None:
        """Calls it when the operation has ended; at once where it has."""
        with self._lock:
            if not self._done:
                self._on_done.append(callback)
                return
        callback()

    def on_seen(self, callback: Callable[[], object]) -> None:
        """Calls it when poll() or wait() has first told somebody that the operation has ended. Call before begin()."""
        self._on_seen = callback

    def _tell_seen(self) -> None:
        callback, self._on_seen = self._on_seen, None
        if callback is not None:
            callback()

    def _advance(self, step: int) -> None:
        """Starts the step after `step`, once all of it has ended and where nobody else has done so."""
        with self._lock:
            if self._done or step < 0 or step != self._step or not all(work.done() for work in self._works):
                return
            self._step += 1
            self._resume(_first_error(self._works))
        self._go_on()

    def _resume(self, error: HerringError | None = None) -> None:
        """With the next step, or with what failed in the last one: raised where that was yielded."""
        try:
            works = next(self._steps) if error is None else self._steps.throw(error)
            while not works:
                works = next(self._steps)
        except StopIteration as end:
            self._finish(end.value, None)
        except HerringError as failure:
            self._finish(None, self._explain(failure))
        except Exception as failure:  # A bug, or the framework's: belongs to whoever waits.
            self._finish(None, failure)
        else:
            self._works = works

    def _finish(self, result: Any, error: Exception | None) -> None:
        self._result, self._error, self._works = result, error, ()
        self._done = True

    def _go_on(self) -> None:
        """After _resume(), and without the lock: callbacks take locks of their own, whose holders ask operations how
        they are; and work that has ended calls back at once."""
        with self._lock:
            works, step = self._works, self._step
            callbacks, self._on_done = (self._on_done, []) if self._done else ([], self._on_done)
        if self._watched:
            for work in works:
                work.on_done(lambda: self._advance(step))
        for callback in callbacks:
            callback()
