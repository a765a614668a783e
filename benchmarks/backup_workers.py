#!/usr/bin/env python3
"""Measures what backup workers save: steps in which sometimes a worker is late, with and without backup workers.

  benchmarks/backup_workers.py --pairs 5 --workers 10 --every 10

Each pair is two jobs under herringrun, one after the other, in alternating order: one with
HERRING_BACKUP_WORKERS=`--backup`, one with 0. A step sleeps for `--work-ms`, so that the machine's cores do not matter,
and calls one allreduce (backup=True) of `--mb`. In every `--every`-th step one worker, a different one each time,
sleeps `--late-ms` longer. Prints for each pair, and as medians, the time of a step (the time until the last worker
has done all its steps, divided by their number) and the share of contributions that counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

MARK = "@@backup "


def work(args: argparse.Namespace) -> None:
    """One worker; rank 0 prints the milliseconds of a step and the share of contributions that were in."""
    import numpy as np

    import herring

    herring.init()
    rank, size = herring.rank(), herring.size()
    gradient = np.ones(int(args.mb * (1 << 18)), "float32")
    late = random.Random(1)
    herring.barrier()
    begun = time.perf_counter()
    for step in range(args.steps):
        who = late.randrange(size) if step % args.every == args.every - 1 else None
        time.sleep((args.work_ms + (args.late_ms if who == rank else 0)) / 1e3)
        herring.allreduce(gradient, backup=True)
    herring.barrier()
    took = time.perf_counter() - begun
    dropped = sum(herring.stats()["dropped_contributions"].values())
    if rank == 0:
        print(MARK + json.dumps([took / args.steps * 1e3, 1 - dropped / (args.steps * size)]), flush=True)
    herring.shutdown()


def measure(args: argparse.Namespace, backup: int) -> tuple[float, float]:
    sizes = ["-np", str(args.workers), "--servers", str(args.servers)]
    own = [__file__, "--work", *(f"--{name.replace('_', '-')}={getattr(args, name)}" for name in PASSED)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HERRING_")}
    done = subprocess.run(
        [sys.executable, "-m", "herring._launch", *sizes, sys.executable, *own],
        env={**env, "HERRING_BACKUP_WORKERS": str(backup), "HERRING_INTERFACE": "lo"},
        capture_output=True,
        text=True,
        timeout=args.steps * (args.work_ms + args.late_ms + 100) / 1e3 + 60,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0 or len(lines) != 1:
        raise SystemExit(f"backup_workers: the job ended with {done.returncode}:\n{done.stderr[-3000:]}")
    step_ms, share = json.loads(lines[0].removeprefix(MARK))
    return step_ms, share


PASSED = ("steps", "every", "work_ms", "late_ms", "mb")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of jobs (default 5)")
    parser.add_argument("--workers", type=int, default=10, help="workers of each job (default 10)")
    parser.add_argument("--servers", type=int, default=1, help="server processes of each job (default 1)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each job (default 100)")
    parser.add_argument(
        "--every", type=int, default=10, help="one worker is late in every N-th step (default 10)", metavar="N"
    )
    parser.add_argument("--work-ms", type=float, default=20, help="sleep in each step (default 20)")
    parser.add_argument("--late-ms", type=float, default=50, help="longer sleep of the late worker (default 50)")
    parser.add_argument("--backup", type=int, default=1, help="HERRING_BACKUP_WORKERS to measure (default 1)")
    parser.add_argument("--mb", type=float, default=0.25, help="MB of one allreduce (default 0.25)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return 0
    found = importlib.util.find_spec("herring")
    if found is None or found.origin is None:
        print("backup_workers: herring is not installed for this Python: pip install .", file=sys.stderr)
        return 1
    os.environ["PYTHONPATH"] = str(Path(found.origin).resolve().parents[1])
    rows = []
    for pair in range(args.pairs):
        order = (args.backup, 0) if pair % 2 == 0 else (0, args.backup)
        result = {backup: measure(args, backup) for backup in order}
        rows.append((result[0][0], *result[args.backup]))
        print(
            f"pair {pair}: {rows[-1][0]:6.1f} ms without, {rows[-1][1]:6.1f} ms with; {rows[-1][2]:.1%} in", flush=True
        )
    without, with_one, share = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"medians: {without:.1f} ms without, {with_one:.1f} ms with ({with_one / without:.2f}); {share:.1%} in")
    return 0


if __name__ == "__main__":
    sys.exit(main())
