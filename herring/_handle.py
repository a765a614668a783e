"""A pending operation, as Python sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

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

    __slots__ = ()

    if TYPE_CHECKING:
        # Attributes are slots, or the core's own.
        _begun: float
        _kind: str
        _name: str | None
        _ranks: Sequence[int]
        _result: ResultT
        _timeout: float

        @property
        def _contributors(self) -> list[int]: ...
        def _finish(self) -> bool: ...
        def _is_done(self) -> bool: ...
        def _wait(self, timeout: float, blocks: bool, /) -> bool: ...

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        return self._is_done()

    def wait(self, timeout: float | timedelta | None = None) -> ResultT:
        """Blocks until the operation has ended, and returns its result.

        Raises HerringTimeoutError after `timeout` seconds (the operation goes on; wait again), and what the operation
        failed with. Without `timeout`, waits as long as the operation's own deadline.
        """
        if self._finish():  # Most have ended when somebody asks.
            return self._result
        limit = to_seconds(timeout)
        seconds = max(self._begun + self._timeout + _GRACE_S - _now(), 0.0) if limit is None else limit
        if not self._wait(seconds, limit is None):
            if limit is None:
                raise InternalError(
                    f"{self._what()} did not end at its deadline: this is a bug in Herring, please report it"
                )
            raise HerringTimeoutError(f"{self._what()} is not done after {limit:g} s; it is still running")
        self._finish()
        return self._result

    def result(self) -> ResultT:
        """The same as wait() without a limit."""
        return self.wait()

    def contributors(self) -> list[int]:
        """The ranks whose data is in the result, in order: all, but for a reduction with backup workers.

        The same on every rank, also on those that are not in it. Waits as wait() does, and raises what it raises.
        """
        self.wait()
        return [self._ranks[index] for index in self._contributors] or list(self._ranks)

    def __repr__(self) -> str:
        return f"<herring Handle of {self._what()}, {'done' if self.done() else 'pending'}>"

    def _what(self) -> str:
        return self._kind if self._name is None else f"{self._kind} {self._name!r}"


class WorkHandle(Handle[ResultT]):
    """Of one operation of the runtime."""

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

    @property
    def _contributors(self) -> list[int]:
        return self._work.contributors

    def _finish(self) -> bool:
        return self._work.finish()

    def _is_done(self) -> bool:
        return self._work.done()

    def _wait(self, timeout: float, blocks: bool, /) -> bool:
        return self._work.wait(timeout, blocks=blocks)


class StartedHandle(_core.Started, Handle[ResultT]):
    """Of an allreduce that travels with others: made by the core, which takes half of the time."""

    __slots__ = ()

    _kind = "all_reduce"


class OperationHandle(Handle[ResultT]):
    """Of an operation in several steps, which brings its result with it."""

    __slots__ = ("_operation", "_ranks")

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
