"""Ranks that are forked from a process that has imported torch already: importing it is most of what a short test costs.

Everything else of a rank is as if it had been started: its environment, output, session, and how it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from typing import IO, Any

_PRELOADED = ["torch.distributed", "torch.nn.parallel", "herring.torch"]


def _context(environment: Mapping[str, str]) -> ForkServerContext:
    """`environment` is the one that torch is imported in."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class ForkedChild:
    """A process that runs "module:function" with arguments, in a session of its own. The face of ranks.Child."""

    def __init__(self, case: str, arguments: Sequence[str], env: Mapping[str, str], base: Mapping[str, str]) -> None:
        self._output: IO[bytes] = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed by stop())
        arguments = [case, *arguments]
        self._process = _context(base).Process(target=_be_rank, args=(arguments, dict(env), self._output.name))
        self._process.start()

    def wait(self, deadline: float) -> bool:
        """False where it still runs at the deadline; it is then told to print its stacks and end."""
        self._process.join(max(deadline - time.monotonic(), 0.1))
        if self._process.exitcode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGABRT)
            self._process.join(10)
        return False

    def stop(self) -> None:
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # Not yet in a session of its own.
            self._process.join()
        self._output.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.exitcode

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")


def _be_rank(arguments: list[str], env: dict[str, str], output: str) -> None:
    """In the forked process."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(output, "ab") as told:
        os.dup2(nothing.fileno(), 0)
        for number in (1, 2):
            os.dup2(told.fileno(), number)
    # What multiprocessing gave it reads nothing and may be of another encoding.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    faulthandler.enable()
    sys.argv = ["child.py", *arguments]
    try:
        _run(arguments)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _run(arguments: list[str]) -> Any:
    import child

    return child.call(arguments)
