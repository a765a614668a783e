"""What came out of torch's suites, for people: differences, counts, and docs/conformance.md."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from differences import FAILS, why_skipped

# Test -> (pass, fail or skip; why; seconds).
Ended = dict[str, tuple[str, str, float]]
Table = dict[str, Ended]

GLOO, OWN, ALIAS = "gloo", "herring", "herring as gloo"
ABSENT = ("absent", "the suite names gloo itself", 0.0)


@dataclass(frozen=True)
class Difference:
    """A test that does not end on herring as it ends on gloo."""

    name: str
    gloo: str
    own: str
    alias: str
    why: str  # What the test or the suite said.
    explanation: str | None  # None: nobody has explained it yet.

    @property
    def is_worse(self) -> bool:
        """Passes on gloo, and fails on herring, or is opened for it under no name."""
        return self.gloo == "pass" and ("fail" in (self.own, self.alias) or "pass" not in (self.own, self.alias))


def differences(table: Table) -> list[Difference]:
    found = []
    for name, (expected, _, _) in sorted(table.get(GLOO, {}).items()):
        own = table.get(OWN, {}).get(name, ABSENT)
        alias = table.get(ALIAS, {}).get(name, ABSENT)
        if own[0] == expected and alias[0] in (expected, "absent"):
            continue
        bad = next((each for each in (own, alias) if each[0] == "fail"), own)
        found.append(Difference(name, expected, own[0], alias[0], bad[1].strip(), _explain(name, own, alias)))
    return found


def _explain(name: str, own: tuple[str, str, float], alias: tuple[str, str, float]) -> str | None:
    if name in FAILS:
        return FAILS[name]
    if alias[0] == "fail" or own[0] == "fail":
        return None
    if own[0] == "absent" and alias[0] == "pass":
        return "the suite names gloo itself; passes under gloo's name"
    meaning = why_skipped(own[1]) if own[0] == "skip" else None
    return f"{meaning}; passes under gloo's name" if meaning and alias[0] == "pass" else meaning


def show(table: Table) -> int:
    """Prints the differences and the counts; returns how many unexplained ones are worse than gloo."""
    unexplained = 0
    for each in differences(table) if GLOO in table else []:
        is_open = each.is_worse and each.explanation is None
        unexplained += is_open
        print(f"{'WORSE' if is_open else 'differs':7} {each.name}: {each.gloo} on gloo, {each.own} on herring, "
              f"{each.alias} as gloo: {each.explanation or each.why[-3000:]}")  # fmt: skip
    failed = {
        name for column, ended in table.items() if column != GLOO for name, how in ended.items() if how[0] == "fail"
    }
    if GLOO not in table:
        for name in sorted(failed):
            print(f"fails: {name}: {next(t[name][1] for t in table.values() if name in t)[-3000:]}")
        unexplained = len(failed - set(FAILS))
    print("\n".join(counts(table)))
    return unexplained


def counts(table: Table) -> list[str]:
    lines = ["", "| backend | pass | fail | skip | seconds |", "|---|---|---|---|---|"]
    for column, ended in table.items():
        count = Counter(how for how, _, _ in ended.values())
        seconds = sum(took for _, _, took in ended.values())
        lines.append(f"| {column} | {count['pass']} | {count['fail']} | {count['skip']} | {seconds:.0f} |")
    return [*lines, ""]


def document(table: Table, facts: dict[str, str], seconds: float) -> str:
    found = differences(table)
    worse = [each for each in found if each.is_worse and each.explanation is None]
    lines = [
        "# Conformance: torch's own tests on backend herring",
        "",
        "Written by `make conformance`, which runs the distributed suites that torch ships in its wheel",
        "(`torch.testing._internal.distributed`) on gloo and on herring in one run, each test in a process group of",
        f"its own with a time limit. This page: torch {facts['torch']}, Python {facts['python']},",
        f"{facts['ranks']} ranks, CPU only, {seconds:.0f} s.",
        "",
        "*herring as gloo* is the same backend with gloo's name made to mean it: many of the tests open for the name",
        "gloo alone, and that is how they run on herring. Seconds are the tests' own, several at a time.",
        *counts(table),
        f"Tests that pass on gloo and fail on herring, unexplained: **{len(worse)}**.",
        "",
        "## Every difference",
        "",
        "| test | gloo | herring | herring as gloo | why |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        why = each.explanation or f"**not explained**: {each.why.splitlines()[-1] if each.why else ''}"
        lines.append(f"| {each.name} | {each.gloo} | {each.own} | {each.alias} | {why} |")
    skipped = Counter(how[1] for how in table.get(GLOO, {}).values() if how[0] == "skip")
    lines += ["", "## What gloo skips too", "", "| reason given by the suite | tests |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in skipped.most_common()]
    lines += ["", "## Each test", "", "| test | gloo | herring | herring as gloo |", "|---|---|---|---|"]
    for name in sorted({name for ended in table.values() for name in ended}):
        row = [table.get(column, {}).get(name, ABSENT)[0] for column in (GLOO, OWN, ALIAS)]
        if set(row) != {"skip"}:
            lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join([*lines, ""])
