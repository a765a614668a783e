"""Runs torch's own distributed suite on herring beside gloo: python -m tests.torch.conformance [-k PART]...

Prints a line for each test that ends otherwise than on gloo, with its reason, and a table of counts. Exits with 1 where
a test fails that passes on gloo. "herring as gloo" is the same backend under gloo's name, for tests that look at names.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import herring

SUITE = Path(__file__).resolve().with_name("conformance_suite.py")
COLUMNS = {"gloo": ("gloo", "0"), "herring": ("herring", "0"), "herring as gloo": ("gloo", "1")}

Ended = dict[str, tuple[str, str, float]]


def run(column: str, ranks: int, parts: list[str], limit_s: float, folder: Path) -> Ended:
    """All tests whose names contain one of `parts` (none: all) in one column of the table."""
    backend, alias = COLUMNS[column]
    results = folder / f"{column.replace(' ', '-')}.json"
    (folder / "ranks").mkdir(exist_ok=True)
    env = {
        **os.environ,
        "BACKEND": backend,
        "CONFORMANCE_ALIAS": alias,
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": str(folder / "ranks"),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    env["PYTHONPATH"] = os.pathsep.join([str(Path(herring.__file__).resolve().parents[1]), env.get("PYTHONPATH", "")])
    print(f"--- {column}", flush=True)
    try:
        subprocess.run([sys.executable, str(SUITE), str(results), *parts], env=env, check=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"{column}: stopped after {limit_s:.0f} s; what follows is partial", file=sys.stderr)
    ended: Ended = {name: tuple(value) for name, value in json.loads(results.read_text())["ended"].items()}
    return ended


def report(table: dict[str, Ended]) -> int:
    """Prints the differences and the counts; returns how many tests fail on herring that pass on gloo."""
    gloo = table["gloo"]
    worse = 0
    for column in [name for name in table if name != "gloo"]:
        for name, (how, why, _) in sorted(table[column].items()):
            expected = gloo.get(name, ("absent", "", 0.0))[0]
            if how == expected:
                continue
            worse += how == "fail" and expected == "pass"
            print(f"\n{name}: {expected} on gloo, {how} on {column}\n    {why.strip()[-1500:]}")
    print("\n| backend | pass | fail | skip |\n|---|---|---|---|")
    for column, ended in table.items():
        counts = Counter(how for how, _, _ in ended.values())
        print(f"| {column} | {counts['pass']} | {counts['fail']} | {counts['skip']} |")
    return worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", action="append", default=[], metavar="PART", help="only tests whose names contain PART")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--limit", type=float, default=7200, help="seconds for each column")
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    arguments = parser.parse_args()
    if importlib.util.find_spec("expecttest") is None:
        sys.exit("torch's suite needs the package expecttest: pip install expecttest")
    with tempfile.TemporaryDirectory() as folder:
        table = {
            name: run(name, arguments.ranks, arguments.k, arguments.limit, Path(folder)) for name in arguments.columns
        }
    sys.exit(1 if "gloo" in table and report(table) > 0 else 0)


if __name__ == "__main__":
    main()
