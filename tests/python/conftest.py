"""Jobs of several real processes, each with a deadline, none of which outlives its test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from surroundings import clean_environment

import herring

RUNNER = Path(__file__).with_name("runner.py")
RESULT_MARK = "@@result "


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Outcome:
    """How one process ended: its exit status, what it printed, and what its function returned."""

    code: int
    output: str
    errors: str
    result: Any
    seconds: float


class Job:
    """Starts functions of test modules in processes of their own."""

    def __init__(self) -> None:
        self.take_another_port()
        self._processes: list[tuple[subprocess.Popen[str], float]] = []

    def take_another_port(self) -> None:
        self.port = free_port()

    def start(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        """One more process, which calls `function(**arguments)`; `prefix` goes first (mpirun)."""
        source = sys.modules[function.__module__].__file__
        assert source is not None
        command = [*prefix, sys.executable, str(RUNNER), source, function.__name__, json.dumps(dict(arguments or {}))]
        process = subprocess.Popen(
            command,
            env={**clean_environment(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._processes.append((process, time.monotonic()))

    def start_worker(
        self,
        function: Callable[..., Any],
        rank: int,
        size: int,
        arguments: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """A worker as torchrun would start it on one host."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        self.start(function, arguments, {**place, **self.master(), **(env or {})})

    def master(self) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}

    def finish(self, codes: list[int] | None = None, timeout: float = 90) -> list[Outcome]:
        """Waits for all, in order of start; fails the test, with all output, where exit codes are not `codes` (default
        all 0) or the deadline passes."""
        deadline = time.monotonic() + timeout
        outcomes = [_await(process, begun, deadline) for process, begun in self._processes]
        wanted = [0] * len(outcomes) if codes is None else codes
        if [outcome.code for outcome in outcomes] != wanted:
            report = "\n".join(
                f"--- process {i}: exit {o.code} after {o.seconds:.1f} s\n{o.output}{o.errors}"
                for i, o in enumerate(outcomes)
            )
            pytest.fail(f"expected exit codes {wanted}\n{report}", pytrace=False)
        return outcomes

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        arguments: Mapping[str, Any] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        codes: list[int] | None = None,
        timeout: float = 90,
    ) -> list[Any]:
        """`function` on `size` workers; what each returned, by rank."""
        for rank in range(size):
            self.start_worker(function, rank, size, arguments, env)
        return [outcome.result for outcome in self.finish(codes, timeout)]

    def stop(self) -> None:
        """Ends what still runs: only process groups that this job started."""
        for process, _ in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _await(process: subprocess.Popen[str], begun: float, deadline: float) -> Outcome:
    try:
        output, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        errors += "\n(killed at the test's deadline)\n"
    result = None
    for line in output.splitlines():
        if line.startswith(RESULT_MARK):
            result = json.loads(line.removeprefix(RESULT_MARK))
    return Outcome(process.returncode, output, errors, result, time.monotonic() - begun)


@pytest.fixture
def new_job() -> Iterator[Callable[[], Job]]:
    """For tests of several jobs."""
    started: list[Job] = []

    def start() -> Job:
        started.append(Job())
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def job(new_job: Callable[[], Job]) -> Job:
    return new_job()


def fake_driver(folder: Path, name: str) -> dict[str, str]:
    """What a process needs to see a fake driver of GPUs: that of `libNAME.so`."""
    built = sorted(Path(__file__).parents[2].glob(f"build/temp.*/cmake/tests/lib{name}.so"))
    assert built, "the fake driver is not built: make build-tests"
    (folder / "libcuda.so.1").symlink_to(built[-1])
    path = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{folder}:{path}" if path else str(folder)}


@pytest.fixture
def gpus(tmp_path: Path) -> dict[str, str]:
    """What a process needs to see one fake GPU."""
    return fake_driver(tmp_path, "fake_cuda")


@pytest.fixture
def three_gpus(tmp_path: Path) -> dict[str, str]:
    """The same for three."""
    return fake_driver(tmp_path, "fake_cuda_three")


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as if no launcher had started it."""
    clean = clean_environment()
    for name in list(os.environ):
        if name not in clean:
            monkeypatch.delenv(name)


@pytest.fixture
def single(bare_environment: None) -> Iterator[None]:
    """Herring in this process, as a job of one."""
    herring.init(join_timeout_s=30)
    yield
    herring.shutdown()


@pytest.fixture
def clean_env():
    """An environment of a process that no launcher has started."""
    return clean_environment()


@pytest.fixture
def launches(tmp_path):
    """herringrun with small scripts."""
    from launcher import Launches

    made = Launches(tmp_path)
    yield made
    made.stop()
