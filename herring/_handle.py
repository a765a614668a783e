"""A pending operation, as Python sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Generic, TypeVar

from herring import _core
from herring._errors import HerringTimeoutError, InternalError, InvalidArgumentError
from herring._operation import Operation

ResultT = TypeVar("ResultT")

# An operation ends by itself at its deadline, and what reports it adds a little; past this much more it never will.
_GRACE_S = 60.0

# A method looked up in a module at each call costs a twentieth of what a small operation takes.
_now = time.monotonic


def to_seconds(timeout: float | timedelta | None) -> float | None:
    """Seconds of a number or a timedelta. Raises InvalidArgumentError unless above zero."""
    if timeout is None:
        return None
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"timeout is {timeout!r}; it must be a number of seconds or a timedelta") from None
    if not seconds > 0:
        raise InvalidArgumentError(f"timeout is {timeout}; it must be above 0 seconds")
    return seconds


class Handle(Generic[ResultT]):
    """What a call with async_op=True returns. Dropping it does not stop the operation."""

    __slots__ = ("_begun", "_kind", "_name", "_ranks", "_result", "_timeout", "_work")

    def __init__(
        self, work: _core.Work, result: ResultT, timeout: float, kind: str, name: str | None, ranks: Sequence[int]
    ) -> None:
        self._work = work
        self._result = result
        self._kind = kind
        self._name = name
        self._ranks = ranks
        self._timeout = timeout
        self._begun = _now()

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        return self._work.done()

    def wait(self, timeout: float | timedelta | None = None) -> ResultT:
        """Blocks until the operation has ended, and returns its result.

        Raises HerringTimeoutError after `timeout` seconds (the operation goes on; wait again), and what the operation
        failed with. Without `timeout`, waits as long as the operation's own deadline.
        """
        if self._work.finish():  # Most have ended when somebody asks.
            return self._result
        limit = to_seconds(timeout)
        seconds = max(self._begun + self._timeout + _GRACE_S - _now(), 0.0) if limit is None else limit
        if not self._work.wait(seconds, blocks=limit is None):
            if limit is None:
                raise InternalError(
                    f"{self._what()} did not end at its deadline: this is a bug in Herring, please report it"
                )
            raise HerringTimeoutError(f"{self._what()} is not done after {limit:g} s; it is still running")
        self._work.check()
        return self._result

    def result(self) -> ResultT:
        """The same as wait() without a limit."""
        return self.wait()

    def contributors(self) -> list[int]:
        """The ranks whose data is in the result, in order: all, but for a reduction with backup workers.

        The same on every rank, also on those that are not in it. Waits as wait() does, and raises what it raises.
        """
        self.wait()
        return [self._ranks[index] for index in self._work.contributors] or list(self._ranks)

    def __repr__(self) -> str:
        return f"<herring Handle of {self._what()}, {'done' if self.done() else 'pending'}>"

    def _what(self) -> str:
        return self._kind if self._name is None else f"{self._kind} {self._name!r}"


class OperationHandle(Handle[ResultT]):
    """Of an operation in several steps, which brings its result with it."""

    __slots__ = ("_operation",)

    def __init__(self, operation: Operation, ranks: Sequence[int]) -> None:
        self._operation = operation
        self._ranks = ranks

    def done(self) -> bool:
        return self._operation.is_done()

    def wait(self, timeout: float | timedelta | None = None) -> ResultT:
        limit = to_seconds(timeout)
        if limit is not None and not self._operation.wait_for(limit):
            raise HerringTimeoutError(f"{self._what()} is not done after {limit:g} s; it is still running")
        result: ResultT = self._operation.wait()
        return result

    def contributors(self) -> list[int]:
        self.wait()
        return list(self._ranks)

    def _what(self) -> str:
        return self._operation.what
