"""What herringrun and its agents on other hosts say to each other, over an agent's stdin and stdout.

A frame is the length of what follows the kind (4 bytes, big-endian), the kind (1 byte), and that: JSON, or for the
kinds of BINARY a number of 4 bytes and bytes. An agent begins with MAGIC: what a login shell prints before is no frame.
Nothing is pickled. Environments, and the job's secret with them, travel in frames: no command line has them.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import struct
from collections import deque
from typing import Any

__all__ = [
    "MAGIC",
    "VERSION",
    "WINDOW",
    "Decoder",
    "Kind",
    "ProtocolError",
    "Writer",
    "binary",
    "fields_of",
    "message",
    "split_binary",
]

VERSION = 1
MAGIC = b"\0herring-agent %d\n" % VERSION
#: Bytes of one stream that may be under way: the reader grants more as it takes them.
WINDOW = 1 << 18
_HEAD = struct.Struct("!IB")
_NUMBER = struct.Struct("!I")
_MOST = 1 << 26
_NOISE = 1 << 16
_READ = 1 << 16


class Kind(enum.IntEnum):
    """What a frame is. Numbers are not used again."""

    # To the agent.
    SETUP = 1
    START = 2
    SIGNAL = 3
    STOP = 4
    BURY = 5
    LEAVE = 6
    PAUSE = 7
    RESUME = 8
    RESIZE = 9
    # To herringrun.
    HELLO = 20
    READY = 21
    STARTED = 22
    NOT_STARTED = 23
    ENDED = 24
    STANDS = 25
    SAY = 26
    BYE = 27
    # Both ways.
    PING = 40
    DATA = 41  # The number is the stream; no bytes: it is closed.
    GRANT = 42
    FILE = 43  # The number is the length of the name, which follows; then a piece of the content.


class ProtocolError(Exception):
    """What came cannot be a frame."""


def message(kind: Kind, **fields: Any) -> bytes:
    """A frame with JSON."""
    body = json.dumps(fields).encode()
    return _HEAD.pack(len(body), kind) + body


def binary(kind: Kind, number: int, data: bytes) -> bytes:
    """A frame with a number and bytes."""
    return _HEAD.pack(_NUMBER.size + len(data), kind) + _NUMBER.pack(number) + data


def fields_of(body: bytes) -> dict[str, Any]:
    """The inverse of message()."""
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"a message that is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ProtocolError("a message that has no fields")
    return fields


def split_binary(body: bytes) -> tuple[int, bytes]:
    """The inverse of binary()."""
    if len(body) < _NUMBER.size:
        raise ProtocolError("a message that is too short")
    return _NUMBER.unpack_from(body)[0], body[_NUMBER.size :]


class Decoder:
    """Bytes as they come -> frames."""

    def __init__(self, awaits_magic: bool) -> None:
        self.awaits_magic = awaits_magic
        self.noise = b""  # What came before MAGIC.
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """The frames that are complete now. Raises ProtocolError."""
        self._data += data
        if self.awaits_magic and not self._find_magic():
            return []
        frames = []
        while len(self._data) >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._data)
            if size > _MOST:
                raise ProtocolError(f"a message of {size} bytes")
            end = _HEAD.size + size
            if len(self._data) < end:
                break
            try:
                frames.append((Kind(kind), bytes(self._data[_HEAD.size : end])))
            except ValueError:
                raise ProtocolError(f"a message of the unknown kind {kind}") from None
            del self._data[:end]
        return frames

    def _find_magic(self) -> bool:
        at = self._data.find(MAGIC)
        self.noise = bytes(self._data[: at if at >= 0 else None])
        if at < 0:
            if len(self.noise) > _NOISE:
                raise ProtocolError("much output, but not an agent's")
            return False
        del self._data[: at + len(MAGIC)]
        self.awaits_magic = False
        return True


class Writer:
    """Frames on their way out; never waits."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = 0  # What waits, in bytes.
        self._queue: deque[bytes] = deque()
        os.set_blocking(fd, False)

    def put(self, data: bytes) -> None:
        """Writes it, now or when flush() can."""
        self._queue.append(data)
        self.size += len(data)
        with contextlib.suppress(BrokenPipeError):  # The reader's side sees the end.
            self.flush()

    def flush(self) -> None:
        """Writes as much as is taken without waiting. Raises OSError where nobody reads any more."""
        while self._queue:
            data = self._queue[0]
            try:
                count = os.write(self.fd, data[:_READ] if len(data) > _READ else data)
            except BlockingIOError:
                return
            self.size -= count
            if count == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = data[count:]
