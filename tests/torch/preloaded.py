"""Ranks that are forked from a process that has imported torch: importing it is most of what a short test costs.

Everything else of a rank is as if it had been started: its environment, output, session, and how it ends.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

# torch._dynamo: torch imports it with the first optimizer, which takes as long as torch itself.
_PRELOADED = ["torch.distributed", "torch.nn.parallel", "torch._dynamo", "herring.torch"]


def _context(base: Mapping[str, str]) -> ForkServerContext:
    """`base` is the environment that torch is imported in, once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(base)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class ForkedProcess:
    """Runs "module:function" with arguments in a session of its own. What ranks.Child needs of a subprocess.Popen."""

    def __init__(
        self, case: str, arguments: Sequence[str], env: Mapping[str, str], base: Mapping[str, str], output: str
    ) -> None:
        self._process = _context(base).Process(target=_be_rank, args=([case, *arguments], dict(env), output))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, the signal that ended it below zero; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return code


def _be_rank(arguments: list[str], env: dict[str, str], output: str) -> None:
    """In the forked process."""
    os.setsid()
    with open(os.devnull, "rb") as nothing, open(output, "ab") as told:
        os.dup2(nothing.fileno(), 0)
        for number in (1, 2):
            os.dup2(told.fileno(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    faulthandler.enable()
    sys.argv = arguments
    module, _, function = arguments[0].partition(":")
    try:
        getattr(importlib.import_module(module), function)(*arguments[1:])
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
