"""herringrun's end of the connection to one host's agent."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from herring._launch import _processes
from herring._launch._hosts import Host
from herring._launch._protocol import Decoder, Kind, ProtocolError, Writer, binary

__all__ = ["Link", "Stream", "prepare_child"]

_READ = 1 << 16
_SAID = 1 << 14
_GRANT_BYTES = 1 << 15
_LAST_WORDS_S = 2.0


@dataclass
class Stream:
    """One stream of a process of another host, on its way into a pipe that Outputs reads."""

    number: int
    fd: int
    taken: int = 0  # What has been written since the last grant.
    is_closed: bool = False  # All has come.

    def __post_init__(self) -> None:
        self.waiting: deque[bytes] = deque()
        os.set_blocking(self.fd, False)

    def write(self) -> None:
        """Writes what the pipe takes."""
        try:
            while self.waiting:
                count = os.write(self.fd, self.waiting[0])
                self.taken += count
                if count == len(self.waiting[0]):
                    self.waiting.popleft()
                else:
                    self.waiting[0] = self.waiting[0][count:]
        except BlockingIOError:
            pass
        except OSError:
            self.waiting.clear()
            self.is_closed = True


class Link:
    """One agent: how it was started, what comes from it, what goes to it."""

    def __init__(self, index: int, host: Host, selector: selectors.BaseSelector) -> None:
        self.index = index
        self.host = host
        self.hello: dict[str, Any] | None = None
        self.is_ready = False
        self.is_lost = False  # The connection has ended before its time.
        self.is_done = False  # The agent has said goodbye.
        self.said = b""  # On stderr, and before it was an agent: the last of it.
        self.heard = time.monotonic()
        self.why = ""  # Why it is lost.
        self._selector = selector
        self._streams: dict[int, Stream] = {}
        self._decoder = Decoder(awaits_magic=True)
        self._popen: subprocess.Popen[bytes] | None = None
        self._reader = self._errors = -1
        self._writer: Writer | None = None
        self._is_polled = False

    @property
    def name(self) -> str:
        """The host's, as the user has written it."""
        return self.host.name

    @property
    def is_open(self) -> bool:
        """It can be talked to."""
        return self._writer is not None and not self.is_lost and not self.is_done

    def open(
        self,
        command: Sequence[str],
        prepare_child: Callable[[], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it, with this environment or herringrun's. Raises OSError."""
        self._popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            preexec_fn=prepare_child,  # noqa: PLW1509 (the launcher has no threads)
        )
        pipes = self._popen.stdin, self._popen.stdout, self._popen.stderr
        fds = [os.dup(pipe.fileno()) for pipe in pipes if pipe is not None]
        for pipe in pipes:
            if pipe is not None:
                pipe.close()
        to, self._reader, self._errors = fds
        self._writer = Writer(to)
        for fd in (self._reader, self._errors):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, self)

    def send(self, frame: bytes) -> None:
        """Now or later; nothing where it is gone."""
        if self.is_open and self._writer is not None:
            self._writer.put(frame)
            self._watch_writer()

    def _watch_writer(self) -> None:
        if self._writer is None:
            return
        wanted = self._writer.size > 0
        if wanted and not self._is_polled:
            self._selector.register(self._writer.fd, selectors.EVENT_WRITE, self)
        elif self._is_polled and not wanted:
            self._selector.unregister(self._writer.fd)
        self._is_polled = wanted

    def handle(self, fd: int) -> list[tuple[Kind, bytes]]:
        """A descriptor of its own is ready: the frames that came, but for DATA and pings."""
        if fd == self._errors:
            self._read_errors()
        elif fd == self._reader:
            return self._read()
        elif self._writer is not None:
            try:
                self._writer.flush()
            except OSError as error:
                self.lose(str(error.strerror))
            self._watch_writer()
        return []

    def _read(self) -> list[tuple[Kind, bytes]]:
        try:
            data = os.read(self._reader, _READ)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        self.heard = time.monotonic()
        if not data:
            self._end()
            return []
        try:
            frames = self._decoder.feed(data)
        except ProtocolError as error:
            self.lose(f"it sent {error}")
            return []
        return frames

    def _read_errors(self) -> None:
        try:
            data = os.read(self._errors, _READ)
        except OSError:
            data = b""
        self.said = (self.said + data)[-_SAID:]
        if not data:
            self._selector.unregister(self._errors)
            os.close(self._errors)
            self._errors = -1

    def take_errors(self) -> list[str]:
        """Whole lines that its stderr has brought since."""
        text, newline, rest = self.said.rpartition(b"\n")
        self.said = rest
        return text.decode(errors="replace").splitlines() if newline else []

    def _end(self) -> None:
        """Nothing more comes."""
        if self._decoder.awaits_magic:
            self.said = (self._decoder.noise + self.said)[-_SAID:]
        self.lose("the connection has ended")

    def lose(self, why: str) -> None:
        """It counts as lost from now on; what it started ends there by itself."""
        if self.is_lost or self.is_done:
            return
        self.is_lost, self.why = True, why
        for stream in self._streams.values():
            stream.is_closed = True
        self.pump_all()
        self.close()

    def exit_code(self) -> int:
        """How the command that started it ended; waits a moment for it, and for its last words."""
        code = 0
        if self._popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._popen.wait(_LAST_WORDS_S)
            while self._errors >= 0 and self._has_errors():
                self._read_errors()
        return code

    def _has_errors(self) -> bool:
        return bool(select.select([self._errors], [], [], 0.2)[0])

    def close(self) -> None:
        """Closes the connection. An agent ends then, with all that it has started."""
        if self._writer is not None:
            if self._is_polled:
                self._selector.unregister(self._writer.fd)
                self._is_polled = False
            os.close(self._writer.fd)
            self._writer = None
        if self._reader >= 0:
            self._selector.unregister(self._reader)
            os.close(self._reader)
            self._reader = -1

    def end(self) -> None:
        """Ends what connects to it."""
        self.close()
        if self._popen is not None and self._popen.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(1 if self.is_done else 0)
            if self._popen.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait()

    def add_stream(self, number: int, fd: int) -> None:
        """What comes for that number goes into the pipe `fd`."""
        self._streams[number] = Stream(number, fd)

    def deliver(self, number: int, data: bytes) -> None:
        """DATA has come."""
        stream = self._streams.get(number)
        if stream is None:
            return
        if data:
            stream.waiting.append(data)
        else:
            stream.is_closed = True
        self.pump(stream)

    def pump_all(self) -> None:
        """Where there is room again."""
        for stream in list(self._streams.values()):
            self.pump(stream)

    def pump(self, stream: Stream) -> None:
        """Moves what can be moved, and grants the agent as much again.

        Nothing where it has been closed: its pipe may be ready in the same turn in which its end comes, and its number
        is another file's then.
        """
        if self._streams.get(stream.number) is not stream:
            return
        stream.write()
        if stream.taken >= _GRANT_BYTES or (stream.taken and not stream.waiting):
            self.send(binary(Kind.GRANT, stream.number, b"%d" % stream.taken))
            stream.taken = 0
        known = stream.fd in self._selector.get_map()
        if stream.waiting and not known:
            self._selector.register(stream.fd, selectors.EVENT_WRITE, (self, stream))
        elif known and not stream.waiting:
            self._selector.unregister(stream.fd)
        if stream.is_closed and not stream.waiting:
            del self._streams[stream.number]
            os.close(stream.fd)


def prepare_child() -> None:
    """What connects to a host ends with herringrun."""
    _processes.end_with_parent()
