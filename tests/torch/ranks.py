"""Runs a function of a case module on several ranks, each its own process; shows everything where one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from preloaded import ForkedProcess

import herring

HERE = Path(__file__).resolve().parent
# Not inherited: what launched the tests says nothing about the processes that they start.
_LAUNCHER_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "HERRING_")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without any launcher's variables; children import the Herring that this process imports."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(herring.__file__).resolve().parents[1]), str(HERE)])
    env["OMP_NUM_THREADS"] = "1"  # More ranks than cores.
    env.update(extra or {})
    return env


class Child:
    """A process that leads its own process group, so that stop() ends what it started as well."""

    def __init__(self, start: Callable[[IO[bytes]], subprocess.Popen[bytes] | ForkedProcess]) -> None:
        # A file: a pipe that nobody reads yet would stop the child.
        self._output: IO[bytes] = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed by stop())
        self._process = start(self._output)

    @classmethod
    def of_command(cls, command: Sequence[str], env: Mapping[str, str]) -> Child:
        return cls(
            lambda output: subprocess.Popen(
                list(command), env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )  # fmt: skip

    @classmethod
    def of_case(cls, case: str, arguments: Sequence[str], env: Mapping[str, str]) -> Child:
        """ "module:function" of this folder, which need not import torch first."""
        return cls(lambda output: ForkedProcess(case, arguments, env, clean_environment(), output.name))

    def wait(self, deadline: float) -> bool:
        """False where it still runs at the deadline; it is then told to print its stacks and end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline - time.monotonic(), 0.1))
            return True
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.kill(self._process.pid, signal.SIGABRT)
            self._process.wait(10)
        return False

    def stop(self) -> None:
        if self._process.poll() is None:
            for kill in (os.killpg, os.kill):  # The second where it does not lead a group yet.
                with contextlib.suppress(ProcessLookupError):
                    kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()

    @property
    def code(self) -> int | None:
        return self._process.poll()

    @property
    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")


def run_children(
    commands: Iterable[tuple[Sequence[str], Mapping[str, str]]], timeout: float, expect: Mapping[int, int] | None = None
) -> list[str]:
    """Runs (command, environment) at the same time; returns their outputs, or fails showing all of them."""
    return _finish((Child.of_command(command, env) for command, env in commands), timeout, expect)


def _finish(started: Iterable[Child], timeout: float, expect: Mapping[int, int] | None = None) -> list[str]:
    children: list[Child] = []
    try:
        children.extend(started)
        deadline = time.monotonic() + timeout
        late = [rank for rank, child in enumerate(children) if not child.wait(deadline)]
        wanted = [(expect or {}).get(rank, 0) for rank in range(len(children))]
        codes = [child.code for child in children]
        outputs = [child.output for child in children]
    finally:
        for child in children:
            child.stop()
    if late or codes != wanted:
        told = "\n".join(
            f"--- rank {rank} (exit {codes[rank]}) ---\n{text[-6000:]}" for rank, text in enumerate(outputs)
        )
        over = f"ranks {late} were not done after {timeout:.0f} s; " if late else ""
        raise AssertionError(f"{over}expected exits {wanted}, got {codes}\n{told}")
    return outputs


def run_ranks(
    size: int,
    case: str,
    *arguments: object,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    expect: Mapping[int, int] | None = None,
) -> list[str]:
    """Runs "module:function" (in this folder) on `size` ranks as torchrun would; returns their outputs by rank.

    `expect` gives the exit codes of ranks that shall not exit with 0.
    """
    port = str(free_port())

    def start(rank: int) -> Child:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        variables |= env or {}
        return Child.of_case(case, [str(each) for each in arguments], clean_environment(variables))

    return _finish(map(start, range(size)), timeout, expect)
