"""torch's own distributed test-suite on the backend in BACKEND: conformance_suite.py RESULTS.json [names...].

With CONFORMANCE_ALIAS=1 the name "gloo" means herring: the tests that open for gloo alone then run on herring.
Every test's ranks are spawned from this file.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest
from typing import Any

import torch
import torch.distributed as dist

import herring.torch  # noqa: F401  (registers the backend)

if os.environ.get("CONFORMANCE_ALIAS") == "1":
    _new = dist.Backend.__new__

    def _aliased(cls: Any, name: str) -> Any:
        return "herring" if isinstance(name, str) and name.lower() == "gloo" else _new(cls, name)

    dist.Backend.__new__ = _aliased  # type: ignore[method-assign,assignment]

from torch.testing._internal.distributed.distributed_test import (
    DistributedTest,
    TestDistBackend,
)


class Conformance(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class _Record(unittest.TestResult):
    """How each test ended: pass, skip (with the reason) or fail (with the end of what was printed)."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: dict[str, tuple[str, str, float]] = {}
        self._begun = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._begun = time.monotonic()

    def _end(self, test: unittest.TestCase, how: str, why: str) -> None:
        name = test.id().rpartition(".")[2]
        self.ended[name] = (how, why, round(time.monotonic() - self._begun, 1))
        print(f"{how:5} {self.ended[name][2]:6} s  {name}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self._end(test, "pass", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self._end(test, "skip", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self._end(test, "fail", self._exc_info_to_string(err, test)[-4000:])

    addError = addFailure  # noqa: N815


def main() -> None:
    results, *wanted = sys.argv[1:]
    names = [
        name
        for name in unittest.TestLoader().getTestCaseNames(Conformance)
        if not wanted or any(part in name for part in wanted)
    ]
    record = _Record()
    for name in names:
        unittest.TestSuite([Conformance(name)]).run(record)
        with open(results, "w") as file:  # After each: what is known survives an interruption.
            json.dump({"torch": torch.__version__, "ended": record.ended}, file)


if __name__ == "__main__":
    main()
