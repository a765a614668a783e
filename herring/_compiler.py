"""Runs a C++ compiler, for what is built where it is used.

setup.py reads this file before there is a package: it needs the standard library alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable

_LIMIT_S = 600
_COMPILERS = ("g++", "c++", "clang++")


class BuildError(RuntimeError):
    """Something cannot be built; the message says what is missing or what the compiler said."""


def compiler(what: str) -> list[str]:
    """The command that `what` is compiled with. Raises BuildError."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        try:
            command = shlex.split(chosen)
        except ValueError as error:
            raise BuildError(f"CXX is {chosen!r}, which is no command ({error}); unset it, or correct it") from None
        if shutil.which(command[0]) is None:
            raise BuildError(f"CXX is {chosen!r}, which is not there; unset it, or install that compiler")
        return command
    for name in _COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise BuildError(
        f"{what} needs a C++ compiler with C++20 and there is none (looked for {', '.join(_COMPILERS)}): "
        "apt-get install g++ (10 or newer), or set CXX"
    )


def run(commands: list[list[str]], what: str) -> None:
    """All at the same time. Raises BuildError for the first that fails; none is left behind."""
    deadline = time.monotonic() + _LIMIT_S
    runs: list[subprocess.Popen[str]] = []
    pipe = subprocess.PIPE
    try:
        for command in commands:
            # In a session of its own: what a compiler has started ends with it.
            try:
                started = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
                )
            except OSError as error:
                raise BuildError(f"the compiler {command[0]} does not start: {error}") from error
            runs.append(started)
        for command, started in zip(commands, runs, strict=True):
            try:
                _, errors = started.communicate(timeout=max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                raise BuildError(f"the compiler did not finish in {_LIMIT_S} s: {shlex.join(command)}") from None
            if started.returncode != 0:
                raise BuildError(
                    f"{what} does not compile (exit {started.returncode}):\n{_tail(errors.splitlines())}\n"
                    f"The command was: {shlex.join(command)}"
                )
    finally:
        for started in runs:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGTERM)  # It removes its temporary files.
            started.wait()


def _tail(lines: Iterable[str], count: int = 30) -> str:
    return "\n".join(list(lines)[-count:])
