"""What the ranks print, on its way to herringrun's stdout and stderr.

Bytes pass unchanged. A line is written in one piece: lines of several ranks, or of one rank's stdout and stderr, never
mix. What has no end yet:

* A progress bar (text after a carriage return) is forwarded within BAR_S.
* Other text is shown on a terminal after PREVIEW_S; where another line comes in between, it is shown again in full. In
  a file or pipe it waits for the end of its line.
* A line of more than LONG_LINE bytes has the stream to itself until it ends, or its rank pauses for FLOOR_S.

Nothing here waits for a reader: what is not taken waits in a queue, and past QUEUE_LIMIT the ranks wait in their
writes. Where nobody reads any more (a closed pipe), what comes is dropped and the job goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import selectors
import stat
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

__all__ = ["Destination", "Outputs", "Source", "set_size", "terminal_like"]

BAR_S = 0.1
PREVIEW_S = 0.25
FLOOR_S = 1.0
LONG_LINE = 1 << 20
QUEUE_LIMIT = 1 << 20
_READ = 1 << 16
_WRITE = 4096  # A pipe that is ready takes this much without waiting (PIPE_BUF).
_END = re.compile(rb"\r\n|[\r\n]")
_PIECE = re.compile(rb"[^\r\n]+(?:\r\n|[\r\n])?|\n")


class Destination:
    """herringrun's stdout or stderr; one where both are the same terminal, pipe or file."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd = fd
        self.name = name
        self.owner: Source | None = None  # Whose unfinished text stands at the end.
        self.floor: Source | None = None  # Whose long line has it to itself.
        self.problem = ""  # Said once; for who asks.
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._broken = False
        self._told: set[int | None] = set()  # Of which errors there has been a problem.
        self._takes_all = False
        self.is_terminal = False
        try:
            self._takes_all = stat.S_ISREG(os.fstat(fd).st_mode)
            self.is_terminal = os.isatty(fd)
        except OSError:
            self._broken = True

    @property
    def waits(self) -> bool:
        """Something is to be written that could not be yet."""
        return self._queued > 0

    @property
    def is_full(self) -> bool:
        """Nothing more should be read for it."""
        return self._queued >= QUEUE_LIMIT

    def put(self, data: bytes) -> None:
        """Writes it, now or when flush() can."""
        if data and not self._broken:
            whole = memoryview(data)
            self._queue.extend(bytes(whole[at : at + _READ]) for at in range(0, len(whole), _READ))
            self._queued += len(data)
            self.flush()

    def flush(self) -> None:
        """Writes as much as is taken without waiting."""
        while self._queue and not self._broken:
            data = self._queue[0]
            try:
                if not self._is_ready():
                    return
                count = os.write(self.fd, data if self._takes_all else data[:_WRITE])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._give_up(error)
                return
            self._queued -= count
            if count == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = data[count:]

    def _is_ready(self) -> bool:
        if self._takes_all:
            return True
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return bool(poll.poll(0))

    def _give_up(self, error: OSError) -> None:
        self._queue.clear()
        self._queued = 0
        is_new = error.errno not in self._told
        self._told.add(error.errno)
        if error.errno in (errno.EPIPE, errno.EBADF, errno.EIO):
            self._broken = True
            why = "nobody reads it any more" if error.errno == errno.EPIPE else error.strerror
            self.problem = f"{self.name}: {why}; the job goes on, and its output there is dropped"
        elif is_new:  # Each line to a full disk fails again.
            self.problem = f"{self.name}: {error.strerror}; the job goes on, and a part of its output there is lost"


class Source:
    """One rank's stdout or stderr, or both where they go to one place."""

    def __init__(self, fd: int, tag: bytes, destination: Destination, copy: BinaryIO | None = None) -> None:
        self.fd = fd
        self.copy = copy  # A file that gets all of it, too.
        self.problem = ""  # Said once; for who asks.
        self.destination = destination
        self.ended = False
        self._tag = tag
        self._parts: list[bytes] = []  # Unfinished text.
        self._size = 0
        self._shown = 0  # So much of it stands at the end of the destination already.
        self._is_bar = False  # The line began with a carriage return, or goes on with one.
        self._since = 0.0  # When text came that is not shown yet.
        self._last = 0.0  # When anything came.

    @property
    def has_floor(self) -> bool:
        """No other's long line has the stream to itself."""
        return self.destination.floor in (None, self)

    def read(self) -> None:
        """Takes what is there, unless a long line has come between; call it when there is something."""
        if not self.has_floor:
            return
        try:
            data = os.read(self.fd, _READ)
        except BlockingIOError:
            return
        except OSError:  # A terminal that nobody holds open any more.
            data = b""
        if data:
            if self.copy is not None:
                self._write_copy(self.copy, data)
            self.take(data, time.monotonic())
        else:
            self.finish()

    def _write_copy(self, copy: BinaryIO, data: bytes) -> None:
        try:
            copy.write(data)
        except OSError as error:
            self.problem = f"{copy.name}: {error.strerror}; the job goes on; the rest is not in this file"
            self.copy = None

    def take(self, data: bytes, now: float) -> None:
        """What the rank has printed next."""
        self._last = now
        if self._size == self._shown:
            self._since = now
        end, start = data.rfind(b"\n") + 1, data.rfind(b"\r")
        if end or start >= 0:  # What is up to there is complete: a carriage return begins what it draws over.
            at = max(end, start)
            complete = b"".join([*self._parts, data[:at]])
            skip, self._parts, self._size, self._shown = self._shown, [], 0, 0
            self._is_bar = start >= end
            self._write(complete, skip)
            data = data[at:]
            self._since = now
            if self.destination.floor is self:
                self.destination.floor = None
        if data:
            self._parts.append(data)
            self._size += len(data)
        if self._size > LONG_LINE or (self._size and self.destination.floor is self):
            self._write_unfinished()
            self.destination.floor = self

    def finish(self) -> None:
        """The rank has closed it."""
        self.ended = True
        self._write_unfinished()
        if self.destination.owner is self and self._tag:
            self._write(b"\n", 0)
        self.give_floor()

    def due(self) -> float | None:
        """When (time.monotonic()) to call show(); None: not before more comes."""
        if self.destination.floor is self:
            return self._last + FLOOR_S
        if self._size == self._shown or not self.has_floor:
            return None
        if self._is_bar:
            return self._since + BAR_S
        return self._since + PREVIEW_S if self.destination.is_terminal else None

    def show(self) -> None:
        """due() has come."""
        if self.destination.floor is self:
            self.give_floor()
        elif self._is_bar:
            self._write_unfinished()
        else:
            text = b"".join(self._parts)
            self._write(text, self._shown)
            self._parts, self._shown = [text], len(text)

    def hold(self, now: float) -> None:
        """It is not read now, for its destination takes nothing: that is no pause of the rank."""
        self._last = now

    def give_floor(self) -> None:
        """Its long line is not waited for any longer."""
        if self.destination.floor is self:
            self.destination.floor = None

    def lose_end(self) -> None:
        """Other text follows what was shown: it is shown again when it is complete."""
        self._shown = 0

    def _write_unfinished(self) -> None:
        text = b"".join(self._parts)
        skip, self._parts, self._size, self._shown = self._shown, [], 0, 0
        self._write(text, skip)

    def _write(self, text: bytes, skip: int) -> None:
        """Writes it, without the first `skip` bytes where those stand there already."""
        to = self.destination
        if to.owner is self:
            text = text[skip:]
        elif text:
            self._end_other(starts_over=text.startswith(b"\r"))
        if not text:
            return
        to.put(self._tagged(text, in_line=to.owner is self))
        to.owner = None if text.endswith(b"\n") else self

    def _end_other(self, starts_over: bool) -> None:
        to = self.destination
        if to.owner is not None:
            # Bars may draw over each other on a terminal: as many lines as updates would be worse.
            if not (to.is_terminal and starts_over and to.owner._is_bar):
                to.put(b"\n")
            to.owner.lose_end()
            to.owner = None

    def _tagged(self, text: bytes, in_line: bool) -> bytes:
        if not self._tag:
            return text
        head = b""
        if in_line:
            end = _END.search(text)
            at = end.end() if end else len(text)
            head, text = text[:at], text[at:]
        if not text:
            return head
        if b"\r" in text:
            return head + _PIECE.sub(lambda match: self._tag + match[0], text)
        body = text[:-1].replace(b"\n", b"\n" + self._tag)
        return b"".join([head, self._tag, body, text[-1:]])


class Outputs:
    """All of them, and who else is to be waited for meanwhile."""

    def __init__(self, tag_output: bool, folder: Path | None = None, digits: int = 1) -> None:
        """`folder`: gets a copy of all output, rank.N/stdout and so on, N with so many digits at least."""
        self._tag_output = tag_output
        self._folder = folder
        self._digits = digits
        self._selector = selectors.PollSelector()
        self._sources: list[Source] = []
        out = Destination(1, "stdout")
        self._out = out
        self._err = out if _is_same(1, 2) else Destination(2, "stderr")

    def watch(self, fd: int) -> None:
        """turn() returns it when there is something to read."""
        self._selector.register(fd, selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        """turn() returns it no longer."""
        self._selector.unregister(fd)

    @property
    def is_merged(self) -> bool:
        """stdout and stderr are one place: each process has one stream for both, which keeps their order."""
        return self._out is self._err and self._folder is None

    @property
    def terminals(self) -> list[bool]:
        """Whether stdout and stderr are terminals."""
        return [self._out.is_terminal, self._err.is_terminal]

    @property
    def size(self) -> list[int] | None:
        """Rows and columns of the terminal; None where there is none."""
        terminal = next((each for each in (self._out, self._err) if each.is_terminal), None)
        return None if terminal is None else _size_of(terminal.fd)

    def open(self, name: str, pipes: bool = False) -> tuple[int, int]:
        """What a process is to have as stdout and stderr; close both (or the one) when it has started. `pipes`: no
        terminals, for what comes from a terminal of another host."""
        tag = f"[{name}] ".encode() if self._tag_output else b""
        out = self._open_one(tag, self._out, pipes, self._copy(name, "stdout"))
        try:
            return out, out if self.is_merged else self._open_one(tag, self._err, pipes, self._copy(name, "stderr"))
        except OSError:
            os.close(out)
            raise

    def _copy(self, name: str, stream: str) -> BinaryIO | None:
        if self._folder is None:
            return None
        role, _, number = name.partition(" ")
        folder = self._folder / (f"{role}.{int(number):0{self._digits}d}" if number else role)
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / stream).open("ab", buffering=0)

    def _open_one(self, tag: bytes, destination: Destination, pipes: bool, copy: BinaryIO | None) -> int:
        is_terminal = destination.is_terminal and not pipes
        read, write = terminal_like(_size_of(destination.fd)) if is_terminal else os.pipe()
        source = Source(read, tag, destination, copy)
        self._sources.append(source)
        self._selector.register(read, selectors.EVENT_READ, source)
        return write

    def say(self, text: str) -> None:
        """A line of herringrun's own, on stderr."""
        to = self._err
        if to.owner is not None:
            to.put(b"\n")
            to.owner.lose_end()
            to.owner = None
        to.put(f"herringrun: {text}\n".encode(errors="replace"))

    def turn(self, seconds: float) -> list[int]:
        """Forwards what there is; waits for something at most this long. Which of the watched can be read."""
        now = time.monotonic()
        self._choose_sources(now)
        due = [at for at in (source.due() for source in self._sources) if at is not None]
        wait = max(0.0, min([seconds, *(at - now for at in due)]))
        watched = []
        for key, events in self._selector.select(wait):
            if isinstance(key.data, Source):
                key.data.read()
            elif isinstance(key.data, Destination):
                key.data.flush()
            elif events:
                watched.append(key.fd)
        for source in list(self._sources):
            at = source.due()  # At a time before the select: what had come by then is read.
            if at is not None and at <= now:
                source.show()
            if source.ended:
                self._forget(source)
        self._say_problems()
        return watched

    def _say_problems(self) -> None:
        for each in (self._out, self._err):
            problem, each.problem = each.problem, ""
            if problem and each is not self._err:
                self.say(problem)
        for source in self._sources:
            problem, source.problem = source.problem, ""
            if problem:
                self.say(problem)

    def _choose_sources(self, now: float) -> None:
        """Who is read in this turn, and who is waited for to take more."""
        for source in self._sources:
            to = source.destination
            if to.is_full:
                source.hold(now)
            self._select(source.fd, source, selectors.EVENT_READ, source.has_floor and not to.is_full)
        for each in {self._out, self._err}:
            self._select(each.fd, each, selectors.EVENT_WRITE, each.waits)

    def _select(self, fd: int, data: Source | Destination, events: int, wanted: bool) -> None:
        known = fd in self._selector.get_map()
        if wanted and not known:
            self._selector.register(fd, events, data)
        elif known and not wanted:
            self._selector.unregister(fd)

    def _forget(self, source: Source) -> None:
        self._sources.remove(source)
        with contextlib.suppress(KeyError):
            self._selector.unregister(source.fd)
        os.close(source.fd)
        if source.copy is not None:
            source.copy.close()

    def drain(self, limit_s: float, reader_limit_s: float, go_on: Callable[[list[int]], None]) -> None:
        """The processes have ended: forwards what is left in their pipes, and waits until it is taken.

        `limit_s` is for who still holds a pipe open, `reader_limit_s` for who reads. `go_on` hears what turn() returns.
        """
        deadline = begun = time.monotonic()
        while self._sources and time.monotonic() < min(deadline + limit_s, begun + reader_limit_s):
            go_on(self.turn(0.1))
            if self._out.is_full or self._err.is_full:
                deadline = time.monotonic()
        for source in self._sources:
            source.finish()
        while (self._out.waits or self._err.waits) and time.monotonic() < begun + reader_limit_s:
            go_on(self.turn(0.1))

    def resize(self) -> None:
        """The terminal has another size."""
        for source in self._sources:
            if source.destination.is_terminal:
                set_size(source.fd, _size_of(source.destination.fd))


def _is_same(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def terminal_like(size: Sequence[int] | None) -> tuple[int, int]:
    """A terminal for the rank where herringrun has one: colours, progress bars and line buffering stay."""
    try:
        master, slave = os.openpty()
    except OSError:
        return os.pipe()
    with contextlib.suppress(termios.error):
        attributes = termios.tcgetattr(slave)
        attributes[1] &= ~termios.OPOST  # The real one does that.
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
    set_size(slave, size)
    return master, slave


def _size_of(fd: int) -> list[int] | None:
    """Rows and columns of a terminal; None where it is none."""
    with contextlib.suppress(OSError):
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(fd, termios.TIOCGWINSZ, b"\0" * 8))
        return [rows, columns]
    return None


def set_size(fd: int, size: Sequence[int] | None) -> None:
    """Gives a terminal these rows and columns; nothing for None."""
    if size is not None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
