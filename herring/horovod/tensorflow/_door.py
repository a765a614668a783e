"""Between the engine, which knows the job and its process sets, and TensorFlow's operations, which run without it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from herring.horovod._engine.engine import GLOBAL_SET, Engine, Members, home
from herring.horovod._engine.join import Announcement
from herring.horovod._engine.process_sets import ProcessSet, members_of
from herring.tensorflow._ops import TAKE_USE, TELL, Group, is_loaded, library

_OWN_KEYS = "tensorflow/"  # As bindings/tensorflow/keys.cc makes them.


class _Door:
    """What this process's library of operations has been told. Also the engine's Outside."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._known: set[int] = set()
        self._listener: Callable[[Announcement], None] | None = None
        self._on_operation = TELL(self._hear)  # Kept as long as the library may call it.
        home.on_start(self._open)

    def _open(self) -> None:
        """Graphs that are there go to the job, whoever has joined it (herring.horovod.torch's init(), for example)."""
        if is_loaded():
            with self._lock:
                self._attach(home.current())

    def members(self, process_set: ProcessSet) -> Members:
        """Of a process set, which operations can go to from now on.

        Raises InvalidArgumentError (a ValueError) before init(), and for a set that does not work (any more).
        """
        members = members_of(process_set)
        self.know(members)
        return members

    def know(self, members: Members) -> None:
        """Operations can go to these from now on."""
        with self._lock:
            self._attach(home.current())
            if members.set_id not in self._known:
                ranks = (ctypes.c_uint32 * len(members.ranks))(*members.ranks)
                library().native.herring_tensorflow_set_group(members.set_id, ranks, len(members.ranks))
                self._known.add(members.set_id)

    def _attach(self, engine: Engine) -> None:
        library().attach()
        if self._engine is not engine:  # Another job, or another generation of it.
            library().native.herring_tensorflow_begin_again()
            self._engine, self._known = engine, {GLOBAL_SET}
            engine.outside = self

    # -- Outside ------------------------------------------------------------------------------------------------

    def tell(self, to: Callable[[Announcement], None]) -> None:
        self._listener = to
        library().native.herring_tensorflow_listen(self._on_operation)

    def stop_telling(self) -> None:
        library().native.herring_tensorflow_listen(TELL())
        self._listener = None

    def uses(self) -> dict[tuple[int, str], int]:
        found: dict[tuple[int, str], int] = {}

        def take(group: int, key: bytes, use: int) -> None:
            found[group, key.decode()] = use

        library().native.herring_tensorflow_uses(TAKE_USE(take))
        return found

    def learn(self, uses: dict[tuple[int, str], int]) -> None:
        for (set_id, key), use in uses.items():
            if key.startswith(_OWN_KEYS):
                library().native.herring_tensorflow_learn(set_id, key.encode(), use)

    def _hear(
        self, group: int, key: bytes, kind: bytes, use: int, op: bytes, dtype: bytes, shape: Any, dims: int
    ) -> None:
        listener = self._listener
        if listener is None:
            return
        tensors = ((dtype.decode(), tuple(shape[i] for i in range(dims))),) if dtype else ()
        listener(Announcement(group, key.decode(), kind.decode(), use, None, op.decode() or "sum", tensors))


door = _Door()


def group_of(members: Members) -> Group:
    """As operations take it."""
    return Group(members.set_id, has_key=True)
