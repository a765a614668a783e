"""The standard streams, as this process was given them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["checked_stdout", "open_standard_descriptors"]


def open_standard_descriptors() -> None:
    """Who has closed one of them must not get a socket or a pipe of ours in its place: what some library then writes to
    stderr would be bytes of a gradient."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)


class _LostError(Exception):
    """What was printed on stdout did not get there. No OSError: argparse is silent about those."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.is_unread = error.errno == errno.EPIPE
        self.text = "stdout is closed" if error.errno == errno.EBADF else f"stdout: {error.strerror}"


class _Stdout(io.FileIO):
    """Tells its errors from those of other files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _LostError(error) from error


def _replace_stdout() -> None:
    """Python's own is None where stdout was closed, and takes everything in silence."""
    given = sys.stdout
    if given is not sys.__stdout__:
        return  # It has been done; or a test looks at it.
    if isinstance(given, io.TextIOWrapper):
        buffer = io.BufferedWriter(_Stdout(given.fileno(), "w", closefd=False))
        by_line = given.line_buffering or given.write_through
        # Rather backslashes than no output where the locale lacks a character.
        sys.stdout = io.TextIOWrapper(buffer, given.encoding, "backslashreplace", line_buffering=by_line)
    elif given is None:
        # Each write fails, as it should; who prints nothing does not notice.
        buffer = io.BufferedWriter(_Stdout(os.open(os.devnull, os.O_RDONLY), "w"))
        sys.stdout = io.TextIOWrapper(buffer, "utf-8")


@contextlib.contextmanager
def checked_stdout(name: str) -> Iterator[None]:
    """Within, what is printed on stdout gets there; else the process ends (SystemExit): with a sentence and status 1,
    or as by SIGPIPE where nobody reads any more (| head). `name`: the command, for the sentence."""
    _replace_stdout()
    try:
        try:
            yield
        finally:  # Also after argparse's SystemExit, with --help.
            if sys.stdout is not None:
                sys.stdout.flush()
    except _LostError as lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For what is left in the buffer.
        if lost.is_unread:
            sys.exit(128 + signal.SIGPIPE)
        print(f"{name}: {lost.text}; a part of the output is lost", file=sys.stderr)
        sys.exit(1)
