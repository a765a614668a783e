"""The timeline that Horovod's tools show: a Chrome trace (chrome://tracing, ui.perfetto.dev) of rank 0's operations."""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Beyond this many the file would be too large to show; the rest is counted.
_MOST_EVENTS = 1_000_000


class Timeline:
    """Collects events in memory; close() writes them, also at exit. On ranks other than 0 it does nothing."""

    def __init__(self, path: str, rank: int, mark_cycles: bool = False) -> None:
        self._path = Path(path) if rank == 0 else None
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._rows: dict[str, int] = {}
        self._left_out = 0
        self._mark_cycles = mark_cycles
        start = int(time.time() * 1e6)
        self._events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "herring"}},
            {"name": "start_time_since_epoch_in_micros", "ph": "M", "pid": 0, "args": {"value": start}},
        ]
        if self._path is not None:
            self._path.write_text("[]\n")  # A path that cannot be written is an error now, not at the end.
            atexit.register(self.close)  # Many scripts end without hvd.shutdown().

    def watch(self, on_done: Callable[[Callable[[], object]], object], kind: str, key: str) -> None:
        """`on_done` takes what is called at the operation's end. NEGOTIATE_ is Horovod's word for what is waited for
        other ranks in: here the ranks meet in the servers, so it has no length."""
        if self._path is None:
            return
        activity = kind.upper()
        if self._mark_cycles:
            self._add("CYCLE_START", "i", "cycles", s="g")
        self._add(f"NEGOTIATE_{activity}", "i", key, s="t")
        self._add(activity, "B", key)
        on_done(lambda: self._add(activity, "E", key))

    def close(self) -> None:
        """Writes the file."""
        if self._path is None:
            return
        with self._lock:
            path, self._path = self._path, None
            atexit.unregister(self.close)
            if self._left_out:
                note = {"name": "left_out", "ph": "M", "pid": 0, "args": {"events": self._left_out}}
                self._events.append(note)
            path.write_text(json.dumps(self._events))

    def _add(self, name: str, phase: str, row: str, **more: Any) -> None:
        now = (time.monotonic() - self._begun) * 1e6
        with self._lock:
            if len(self._events) >= _MOST_EVENTS:
                self._left_out += 1
                return
            thread = self._rows.get(row)
            if thread is None:
                thread = self._rows[row] = len(self._rows) + 1
                self._events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": row}})
            self._events.append({"name": name, "ph": phase, "pid": 0, "tid": thread, "ts": now, **more})
