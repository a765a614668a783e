"""torch's own distributed suites on one backend: suite.py RESULTS.json JOBS LIMIT_S K N [TEXT]...

Runs every Nth test, from the Kth, of those whose names have one of the texts (none: of all).

A column of the table (run.py) is one such process, with the backend's name in BACKEND. With CONFORMANCE_ALIAS=1 the
name "gloo" means herring: tests that open for gloo alone, or that name it, then run on herring.

torch and the suites are imported once; each test then runs in a forked process that leads its own process group, and
its ranks are forked from that. So a test costs no imports, what it leaves running is ended with its group, and no test
sees another one's globals.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.testing._internal.common_distributed as common
from torch.distributed import Backend
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as autograd_suite
from torch.testing._internal.distributed import distributed_test as suite
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

import herring.torch  # noqa: F401  (registers the backend)
from herring.torch.distributed import monitored_barrier

# "[rank1]:E1121 09:00:59.344000 26031 torch/testing/_internal/common_distributed.py:1068] ", which torch puts before
# every line of a traceback.
_LOG_PREFIX = re.compile(r"^(\[rank\d+\]:)?[IWE]\d{4} [\d:.]+ \d+ \S+\] ", re.MULTILINE)

ALIAS = os.environ.get("CONFORMANCE_ALIAS") == "1"


def let_gloo_mean_herring() -> None:
    """After the suites were imported: what they skip is decided by then, by gloo's name."""
    original = Backend.__new__

    def aliased(cls: Any, name: str) -> Any:
        return "herring" if isinstance(name, str) and name.lower() == "gloo" else original(cls, name)

    Backend.__new__ = aliased  # type: ignore[method-assign,assignment]
    # torch's own compares the backend with gloo's name; Herring's is the same call without that.
    suite.dist.monitored_barrier = monitored_barrier
    for listed in (suite.PROFILING_SUPPORTED_BACKENDS, suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        listed.append("herring")


class _Forks:
    """Ranks are forked: the parent has imported everything and has no thread."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self._start_processes(  # type: ignore[attr-defined]
            torch.multiprocessing.get_context("fork").Process
        )


class Distributed(_Forks, suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """distributed_test.py: c10d and DistributedDataParallel."""


class DdpUnderDistAutograd(
    _Forks, TensorPipeRpcAgentTestFixture, autograd_suite.DdpUnderDistAutogradTest, common.MultiProcessTestCase
):
    """Hybrid models: RPC beside DDP. Names gloo itself."""


class DdpComparison(
    _Forks, TensorPipeRpcAgentTestFixture, autograd_suite.DdpComparisonTest, common.MultiProcessTestCase
):
    """Gradients of local, DDP and RPC training compared. Names gloo itself."""


def suites() -> list[type[unittest.TestCase]]:
    """Those that name gloo run on herring under gloo's name only."""
    by_name: list[type[unittest.TestCase]] = [DdpUnderDistAutograd, DdpComparison]
    return [Distributed, *(by_name if os.environ["BACKEND"] == "gloo" else [])]


def names() -> dict[str, unittest.TestCase]:
    loader = unittest.TestLoader()
    return {
        f"{each.__name__}.{name}": each(name)  # type: ignore[call-arg]
        for each in suites()
        for name in loader.getTestCaseNames(each)
    }


class _Record(unittest.TestResult):
    """How the one test ended: pass, skip (with the reason) or fail (with the end of what was raised)."""

    def __init__(self) -> None:
        super().__init__()
        self.how, self.why = "fail", "the test ended without a result"

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.how, self.why = "pass", ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.how, self.why = "skip", reason

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.how, self.why = "fail", self._exc_info_to_string(err, test)[-6000:]

    addError = addFailure  # noqa: N815


class Running:
    """One test in its own process group; what it prints goes to a file."""

    def __init__(self, name: str, test: unittest.TestCase, folder: Path, limit_s: float) -> None:
        self.name = name
        self.begun = time.monotonic()
        self._deadline = self.begun + limit_s
        self._limit_s = limit_s
        self._result = folder / f"{name}.json"
        self._output = folder / f"{name}.txt"
        self._pid = os.fork()
        if self._pid == 0:
            self._run(test, folder)

    def _run(self, test: unittest.TestCase, folder: Path) -> None:
        code = 1
        try:
            os.setsid()
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            own = Path(tempfile.mkdtemp(dir=folder))
            tempfile.tempdir = str(own)
            os.environ.update(TMPDIR=str(own), MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port())
            common.TIMEOUT_DEFAULT = int(self._limit_s * 0.9)  # With stacks; the limit outside comes without.
            type(test).setUpClass()
            record = _Record()
            test.run(record)
            self._result.write_text(json.dumps([record.how, record.why]))
            code = 0
        finally:
            os._exit(code)

    def ended(self) -> tuple[str, str, float] | None:
        """How it ended (pass, fail, skip), why, and its seconds; None while it runs."""
        finished, _ = os.waitpid(self._pid, os.WNOHANG)
        is_late = not finished and time.monotonic() > self._deadline
        if not finished and not is_late:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if is_late:
            os.waitpid(self._pid, 0)
        how, why = "fail", f"not done after {self._limit_s:.0f} s" if is_late else "the test's process ended early"
        if not is_late and self._result.exists():
            how, why = json.loads(self._result.read_text())
        if how == "fail" and self._output.exists():
            printed = _LOG_PREFIX.sub("", self._output.read_text(errors="replace"))
            why = f"{why}\n--- printed ---\n{printed[-4000:]}"
        return how, why, round(time.monotonic() - self.begun, 1)


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def run(tests: dict[str, unittest.TestCase], jobs: int, limit_s: float) -> Iterator[tuple[str, tuple[str, str, float]]]:
    """Each test's name and how it ended, in the order of their ends; `jobs` at a time."""
    waiting = list(tests.items())
    running: list[Running] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, test = waiting.pop(0)
                reason = _skip_reason(test)
                if reason is None:
                    running.append(Running(name, test, Path(folder), limit_s))
                else:
                    yield name, ("skip", reason, 0.0)
            for each in list(running):
                ended = each.ended()
                if ended is not None:
                    running.remove(each)
                    yield each.name, ended
            time.sleep(0.02)


def _skip_reason(test: unittest.TestCase) -> str | None:
    """What unittest's own decorators say, without starting ranks to hear it from them."""
    method = getattr(type(test), test._testMethodName)
    return getattr(method, "__unittest_skip_why__", "") if getattr(method, "__unittest_skip__", False) else None


def main() -> None:
    if ALIAS:
        let_gloo_mean_herring()
    results, jobs, limit_s, shard, shards, *match = sys.argv[1:]
    wanted = [(name, test) for name, test in names().items() if not match or any(part in name for part in match)]
    ended: dict[str, tuple[str, str, float]] = {}
    for name, how in run(dict(wanted[int(shard) - 1 :: int(shards)]), int(jobs), float(limit_s)):
        ended[name] = how
        print(f"{how[0]:5} {how[2]:6} s  {name}", flush=True)
        with open(results, "w") as file:  # After each: what is known survives an interruption.
            json.dump({"torch": torch.__version__, "ended": ended}, file)


if __name__ == "__main__":
    main()
