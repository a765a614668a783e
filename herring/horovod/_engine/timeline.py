"""The timeline that Horovod's tools show: a Chrome trace (chrome://tracing, ui.perfetto.dev) of rank 0's operations."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from herring._errors import InvalidArgumentError
from herring._log import say
from herring.horovod._engine.environment import is_set

# Beyond this many the file would be too large to show; the rest is counted.
_MOST_EVENTS = 1_000_000
# No reason to lose the training: a warning, and no timeline.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, eq=False)
class _Span:
    """An operation from its beginning to its end."""

    activity: str
    key: str
    is_done: Callable[[], bool]


class Timeline:
    """Writes events as they come, so that the file is there however the process ends; the viewers need no `]` at its
    end, which close() adds, at the latest when Python exits. On ranks other than 0 it does nothing.

    Raises InvalidArgumentError, with `what` the path is, where the file cannot be written; on a full disk it warns.
    """

    def __init__(self, path: str, rank: int, mark_cycles: bool = False, what: str = "file_path") -> None:
        self._file: TextIO | None = None
        self._lock = threading.RLock()
        self._begun = time.monotonic()
        self._rows: dict[str, int] = {}
        self._open: set[_Span] = set()  # what has begun; guarded by _lock
        self._events = 0
        self._left_out = 0
        self._mark_cycles = mark_cycles
        if rank != 0:
            return
        self._path = path
        self._pid = os.getpid()
        start = int(time.time() * 1e6)
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (close() does)
            self._write({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "herring"}})
            self._write({"name": "start_time_since_epoch_in_micros", "ph": "M", "pid": 0, "args": {"value": start}})
        except OSError as error:
            self._abandon()
            if error.errno in _FULL:
                self._say(error)
                return
            raise InvalidArgumentError(
                f"{what} is {path!r}, where no timeline can be written: {error.strerror}; name a file in a folder that "
                "exists"
            ) from error
        # After the session has registered its own end, so before that.
        atexit.register(self.close)

    def watch(
        self, on_done: Callable[[Callable[[], object]], object], is_done: Callable[[], bool], kind: str, key: str
    ) -> None:
        """`on_done` takes what is called at the operation's end, maybe only after who waits for it has gone on.
        NEGOTIATE_ is Horovod's word for what is waited for other ranks in: here the ranks meet in the servers, so it
        has no length."""
        if self._file is None:
            return
        activity = kind.upper()
        if self._mark_cycles:
            self._add("CYCLE_START", "i", "cycles", s="g")
        self._add(f"NEGOTIATE_{activity}", "i", key, s="t")
        span = _Span(activity, key, is_done)
        with self._lock:
            self._add(activity, "B", key)
            self._open.add(span)
        on_done(lambda: self._end(span))

    def close(self) -> None:
        """Ends the file; not in a forked child, whose parent still writes it."""
        if self._file is None or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        with self._lock:
            spans = list(self._open)
        for span in spans:
            if span.is_done():
                self._end(span)
        with self._lock:
            if self._file is None:
                return
            try:
                if self._left_out:
                    self._write({"name": "left_out", "ph": "M", "pid": 0, "args": {"events": self._left_out}})
                self._file.write("\n]\n")
                self._file.flush()
            except OSError as error:
                self._say(error)
            self._abandon()

    def _end(self, span: _Span) -> None:
        with self._lock:
            if span not in self._open:
                return
            self._open.remove(span)
            self._add(span.activity, "E", span.key)

    def _add(self, name: str, phase: str, row: str, **more: Any) -> None:
        now = (time.monotonic() - self._begun) * 1e6
        with self._lock:
            if self._file is None:
                return
            if self._events >= _MOST_EVENTS:
                self._left_out += 1
                return
            thread = self._rows.get(row)
            try:
                if thread is None:
                    thread = self._rows[row] = len(self._rows) + 1
                    self._write({"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": row}})
                self._write({"name": name, "ph": phase, "pid": 0, "tid": thread, "ts": now, **more})
            except OSError as error:
                self._say(error)
                self._abandon()

    def _say(self, error: OSError) -> None:
        say(logging.WARNING, f"{self._path}: {error.strerror}; the timeline ends here, the job goes on", "herring")

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # What could not be written is tried again.
                file.close()

    def _write(self, event: dict[str, Any]) -> None:
        """Call with the lock held, or where nobody else is there yet."""
        assert self._file is not None
        # In lines that begin with what separates them: the last one is whole, and so is the file, but for its `]`.
        self._file.write(("[\n" if self._events == 0 else ",\n") + json.dumps(event))
        self._file.flush()
        self._events += 1


def timeline_of_environment(rank: int) -> Timeline | None:
    """What HOROVOD_TIMELINE and HOROVOD_TIMELINE_MARK_CYCLES ask for."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if not path or path.upper() == "DYNAMIC":  # Horovod's word for "may be started later", as it may always.
        return None
    mark_cycles = is_set("HOROVOD_TIMELINE_MARK_CYCLES")
    return Timeline(path, rank, mark_cycles, "HOROVOD_TIMELINE")
