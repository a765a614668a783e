"""herringrun's stdin on its way to rank 0 on another host."""

from __future__ import annotations

import contextlib
import os
import termios
from collections.abc import Iterator
from pathlib import Path

from herring._launch._agent_link import Link
from herring._launch._output import Outputs
from herring._launch._protocol import WINDOW, Kind, binary

__all__ = ["Input", "is_in_background", "restored_terminal"]

_READ = 1 << 16
_GROUP, _FOREGROUND = 2, 5  # In /proc/N/stat, counted from the state.


def _groups(pid: int) -> tuple[int, int]:
    """The process's group, and the one in the foreground of its terminal; -1: it has none, or is gone."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        return int(fields[_GROUP]), int(fields[_FOREGROUND])
    except (OSError, IndexError, ValueError):
        return -1, -1


def is_in_background(pid: int) -> bool:
    """Whether the process has a terminal in whose foreground it is not: what is typed there is not meant for it."""
    own, foreground = _groups(pid)
    return foreground > 0 and foreground != own


@contextlib.contextmanager
def restored_terminal(front: int) -> Iterator[None]:
    """A terminal is afterwards as it was: rank 0 may be killed while it reads one with other settings (a debugger).

    Only while the process `front` is in its foreground: else the settings are another program's.
    """
    try:
        before = termios.tcgetattr(0)
    except termios.error:
        yield
        return
    try:
        yield
    finally:
        own, foreground = _groups(front)
        if own == foreground and own > 0:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(0, termios.TCSANOW, before)


class Input:
    """Reads stdin as far as rank 0 does."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._link: Link | None = None
        self._window = 0
        self._is_watched = False
        self._is_terminal = os.isatty(0)

    def send_to(self, link: Link) -> None:
        """Rank 0 has been started there."""
        self._link, self._window = link, WINDOW
        self._watch()

    def _watch(self) -> None:
        wanted = self._link is not None and self._link.is_open and self._window > 0
        wanted = wanted and not (self._is_terminal and is_in_background(os.getppid()))
        if wanted != self._is_watched:
            (self._outputs.watch if wanted else self._outputs.unwatch)(0)
            self._is_watched = wanted

    def turn(self, ready: list[int]) -> None:
        """Sends what there is."""
        if self._link is not None and self._is_watched and 0 in ready:
            try:
                data = os.read(0, min(_READ, self._window))
            except OSError:
                data = b""
            self._link.send(binary(Kind.DATA, 0, data))
            self._window -= len(data)
            if not data:
                self._link = None
        if self._link is not None or self._is_watched:
            self._watch()

    def grant(self, count: int) -> None:
        """Rank 0 has been given so much."""
        self._window += count

    def stop(self) -> None:
        """Rank 0 reads no more."""
        self._link = None
        self._watch()
