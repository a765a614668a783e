"""An agent's end of the streams: what processes print, and what rank 0 reads, within the windows that are granted."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable

from herring._launch._output import set_size, terminal_like
from herring._launch._protocol import WINDOW, Kind, Writer, binary, message

__all__ = ["Streams"]

_READ = 1 << 16


class _Source:
    """One stream of one process."""

    def __init__(self, fd: int, number: int) -> None:
        self.fd = fd
        self.number = number
        self.window = WINDOW


class Streams:
    """Outlets of a Job whose reader is herringrun, at the other end of a connection."""

    def __init__(self, writer: Writer) -> None:
        self.next_number = 0  # Of the process that is started next; its streams are twice that, and one more.
        self._writer = writer
        self._selector = selectors.DefaultSelector()
        self._sources: dict[int, _Source] = {}
        self._terminals = [False, False]
        self._is_merged = False
        self._size: list[int] | None = None
        self._input: int | None = None
        self._to_write = b""
        self._input_ends = False

    def watch(self, fd: int) -> None:
        """turn() returns it when there is something to read."""
        self._selector.register(fd, selectors.EVENT_READ)

    def set_up(self, terminals: list[bool], is_merged: bool, size: list[int] | None) -> None:
        """What herringrun's stdout and stderr are."""
        self._terminals, self._is_merged, self._size = terminals, is_merged, size

    def open(self, name: str) -> tuple[int, int]:
        """As Outlets'."""
        out = self._open_one(0)
        try:
            return out, out if self._is_merged else self._open_one(1)
        except OSError:
            os.close(out)
            raise

    def _open_one(self, which: int) -> int:
        read, write = terminal_like(self._size) if self._terminals[which] else os.pipe()
        source = _Source(read, 2 * self.next_number + which)
        self._sources[source.number] = source
        self._selector.register(read, selectors.EVENT_READ, source)
        return write

    def open_input(self) -> int:
        """What a process is to have as its stdin; close it when it has started."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._close_input()
        self._input, self._input_ends = write, False
        return read

    def take_input(self, data: bytes) -> None:
        """What herringrun has read; nothing: its end."""
        self._to_write += data
        self._input_ends = self._input_ends or not data
        self._feed()

    def _feed(self) -> None:
        if self._input is None:
            self._to_write = b""
            return
        count = 0
        try:
            while self._to_write:
                written = os.write(self._input, self._to_write[:_READ])
                self._to_write = self._to_write[written:]
                count += written
        except BlockingIOError:
            pass
        except OSError:  # The process has closed it, or ended.
            self._close_input()
            self._to_write = b""
            self._writer.put(binary(Kind.DATA, 0, b""))
            return
        if count:
            self._writer.put(binary(Kind.GRANT, 0, b"%d" % count))
        if self._input_ends and not self._to_write:
            self._close_input()
        elif self._input is not None:
            self._want(self._input, selectors.EVENT_WRITE, bool(self._to_write))

    def _close_input(self) -> None:
        if self._input is not None:
            self._want(self._input, selectors.EVENT_WRITE, False)
            os.close(self._input)
            self._input = None

    def _want(self, fd: int, events: int, wanted: bool, data: object = None) -> None:
        known = fd in self._selector.get_map()
        if wanted and not known:
            self._selector.register(fd, events, data)
        elif known and not wanted:
            self._selector.unregister(fd)

    def grant(self, number: int, count: int) -> None:
        """herringrun has taken so much of that stream."""
        source = self._sources.get(number)
        if source is not None:
            source.window += count
            self._want(source.fd, selectors.EVENT_READ, True, source)

    def say(self, text: str) -> None:
        """As Outlets'; herringrun says it, with the host."""
        self._writer.put(message(Kind.SAY, text=text))

    def turn(self, seconds: float) -> list[int]:
        """As Outlets'."""
        self._want(self._writer.fd, selectors.EVENT_WRITE, self._writer.size > 0)
        watched = []
        for key, _ in self._selector.select(max(0.0, seconds)):
            if isinstance(key.data, _Source):
                self._forward(key.data)
            elif key.fd == self._writer.fd:
                self._writer.flush()
            elif key.fd == self._input:
                self._feed()
            else:
                watched.append(key.fd)
        return watched

    def _forward(self, source: _Source) -> None:
        try:
            data = os.read(source.fd, min(_READ, source.window))
        except BlockingIOError:
            return
        except OSError:  # A terminal that nobody holds open any more.
            data = b""
        if data:
            source.window -= len(data)
            self._writer.put(binary(Kind.DATA, source.number, data))
            if source.window == 0:
                self._selector.unregister(source.fd)
        else:
            self._forget(source)

    def _forget(self, source: _Source) -> None:
        del self._sources[source.number]
        self._want(source.fd, selectors.EVENT_READ, False)
        os.close(source.fd)
        self._writer.put(binary(Kind.DATA, source.number, b""))

    def drain(self, limit_s: float, reader_limit_s: float, go_on: Callable[[list[int]], None]) -> None:
        """As Outlets'."""
        deadline = begun = time.monotonic()
        while self._sources and time.monotonic() < min(deadline + limit_s, begun + reader_limit_s):
            go_on(self.turn(0.05))
            if any(source.window == 0 for source in self._sources.values()):
                deadline = time.monotonic()
        for source in list(self._sources.values()):
            self._forget(source)

    def resize(self) -> None:
        """herringrun says the size (set_size)."""

    def set_size(self, size: list[int] | None) -> None:
        """The terminal has another size."""
        self._size = size
        for source in self._sources.values():
            if self._terminals[source.number % 2]:
                set_size(source.fd, size)
