"""Runs torch's own distributed suites on herring beside gloo: make conformance, or python tests/conformance/run.py.

Three columns: gloo; herring under its own name; and herring under gloo's name, for the many tests that open for gloo
alone. Prints a line for each test as it ends, then the differences and a table of counts. Exits with 1 where a test
fails on herring that passes on gloo and the difference is not explained in differences.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report
import torch
from report import Ended, Table

import herring

SUITE = Path(__file__).resolve().with_name("suite.py")
# Title: the name given to init_process_group, and whether gloo's name stands for herring.
COLUMNS = {"gloo": ("gloo", "0"), "herring": ("herring", "0"), "herring as gloo": ("gloo", "1")}


def environment(column: str, ranks: int, folder: Path) -> dict[str, str]:
    """Without a launcher's variables; children import the Herring that this process imports."""
    backend, alias = COLUMNS[column]
    launchers = ("RANK", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "HERRING_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    path = [str(Path(herring.__file__).resolve().parents[1]), env.get("PYTHONPATH", "")]
    env.update(
        BACKEND=backend,
        CONFORMANCE_ALIAS=alias,
        WORLD_SIZE=str(ranks),
        TEMP_DIR=str(folder),
        TMPDIR=str(folder),
        OMP_NUM_THREADS="1",  # More ranks than cores.
        PYTHONPATH=os.pathsep.join(part for part in path if part),
    )
    return env


def run_column(column: str, arguments: argparse.Namespace, folder: Path) -> Ended:
    """Runs the chosen tests in one column; gives what ended, also where the time ran out."""
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    print(f"--- {column}", flush=True)
    command = [sys.executable, str(SUITE), str(results), str(arguments.jobs), str(arguments.test_limit)]
    command += [*map(str, arguments.shard), *arguments.match]
    try:
        subprocess.run(
            command, env=environment(column, arguments.ranks, folder), check=True, timeout=arguments.column_limit
        )
    except subprocess.TimeoutExpired:
        print(f"{column}: stopped after {arguments.column_limit:.0f} s; the table is partial", file=sys.stderr)
    if not results.exists():
        return {}
    ended: Ended = {name: tuple(value) for name, value in json.loads(results.read_text())["ended"].items()}
    return ended


def shard_of(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"a shard is K/N with 1 <= K <= N, got {text!r}")
    return int(number), int(count)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", action="append", default=[], metavar="TEXT", help="only tests whose names have TEXT")
    parser.add_argument("--shard", type=shard_of, default=(1, 1), metavar="K/N", help="every Nth test, from the Kth")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time (each has its own ranks)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--test-limit", type=float, default=90, metavar="S", help="seconds for one test")
    parser.add_argument("--column-limit", type=float, default=3600, metavar="S", help="seconds for one column")
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--json", type=Path, help="writes how each test ended")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="writes the table and the differences")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if importlib.util.find_spec("expecttest") is None:
        sys.exit("torch's suites need the package expecttest: pip install expecttest")
    begun = time.monotonic()
    table: Table = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for column in arguments.columns:
            table[column] = run_column(column, arguments, folder)
    seconds = time.monotonic() - begun
    facts = {"torch": torch.__version__, "python": platform.python_version(), "ranks": str(arguments.ranks)}
    if arguments.json:
        arguments.json.write_text(json.dumps({**facts, "seconds": round(seconds), "ended": table}, indent=1) + "\n")
    unexplained = report.show(table)
    if arguments.write:
        arguments.write.write_text(report.document(table, facts, seconds))
    missing = [column for column, ended in table.items() if not ended]
    print(f"conformance: {'OK' if not unexplained and not missing else 'FAILED'} ({seconds:.0f} s)")
    sys.exit(1 if unexplained or missing else 0)


if __name__ == "__main__":
    main()
