"""Who wants to know when the job has others in it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from herring import _core


@dataclass(frozen=True)
class MembershipChange:
    """The job has others in it than before; size() and rank() say so already."""

    generation: int
    rank: int  #: This worker's, from now on.
    size: int
    lost: int  #: Workers that were here before and are not any more.
    joined: int  #: Workers that are new.
    reason: str  #: For people; empty where workers have only come.


Callback = Callable[[MembershipChange], object]


class Listeners:
    """Callbacks, in the order in which they were given. They outlive a session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callback] = []

    def add(self, callback: Callback) -> None:
        """From now on; twice the same is once."""
        with self._lock:
            if callback not in self._callbacks:
                self._callbacks.append(callback)

    def remove(self, callback: Callback) -> None:
        """No more; nothing where it was not there."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def listen_to(self, runtime: _core.ElasticRuntime) -> None:
        """Tells the callbacks of this runtime's changes."""
        runtime.on_change(self._tell)

    def _tell(self, generation: int, rank: int, size: int, lost: int, joined: int, reason: str) -> None:
        change = MembershipChange(generation, rank, size, lost, joined, reason)
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback(change)


listeners = Listeners()
