"""Rows and files for the tests, with times that are easy to work with."""

from __future__ import annotations

from typing import Any

from herring.bench import _report
from herring.bench._bounds import Links
from herring.bench._contender import Case
from herring.bench._measure import Row
from herring.bench._profile import Costs

MB = 1 << 20
CASE = Case(25 * MB, "float32", "sum", True)


def row(name: str, memory: str, *milliseconds: float, case: Case = CASE, wrong: int = 0,
        costs: Costs | None = None) -> Row:  # fmt: skip
    return Row(case, name, memory, tuple(each / 1e3 for each in milliseconds), wrong, costs or Costs())


def run(herring_ms: float = 500, gloo_ms: float = 1000, *, links: Links | None = None, ranks: int = 8, wrong: int = 0,
        sizes: tuple[int, ...] = (25 * MB,)) -> dict[str, Any]:  # fmt: skip
    """A --json file's content."""
    rows = []
    for size in sizes:
        case, scale = Case(size, "float32", "sum", True), size / (25 * MB)
        rows += [
            row("herring", "arena", herring_ms * scale, case=case, wrong=wrong),
            row("gloo", "private", gloo_ms * scale, case=case),
        ]
    job = {"ranks": ranks, "ranks_per_host": 1, "servers": ranks, "transport": "tcp"}
    return _report.report(rows, links or Links(ranks, ranks, 500e6), job, {})
