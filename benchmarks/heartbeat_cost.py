#!/usr/bin/env python3
"""Measures what heartbeats cost: steps with the default heartbeat, and steps with almost none, in pairs.

  benchmarks/heartbeat_cost.py --pairs 10 --workers 4 --servers 2

Each pair is two jobs under herringrun, one after the other, in alternating order: one with HERRING_HEARTBEAT_S as set
(default 1), one with 3600 (no heartbeat in the whole job). Each job measures the median time of a step (allreduce of
1 MB and of 4 bytes, and 5 ms of computing) over some seconds. Prints the ratio of each pair, their median and their
spread. Prints also the processor time, per second of the job, of the threads in worker 0's process that do nothing but
heartbeats (the hub, and the process's connection to it): other load on the machine does not change this figure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MARK = "@@heartbeat "
WORK_S = 0.005
BARELY = {"HERRING_HEARTBEAT_S": "3600", "HERRING_DEAD_AFTER_S": "86400"}


def watching_ns() -> int:
    """Processor time of this process's watching threads so far."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # A thread that has ended since.
            if (task / "comm").read_text().strip() in {"herring-hub", "herring-member"}:
                total += int((task / "schedstat").read_text().split()[0])
    return total


def work(seconds: float) -> None:
    """One worker: steps until the time is up; rank 0 prints the mean and the median step in microseconds."""
    import numpy as np

    import herring

    herring.init()
    gradient, flag = np.ones(1 << 18, "float32"), np.zeros(1, "float32")
    times: list[float] = []
    watched_before, job_begun = watching_ns(), time.perf_counter()
    while True:
        begun = time.perf_counter()
        while time.perf_counter() - begun < WORK_S:
            gradient[:1000] += 1e-6
        herring.allreduce_(gradient)
        flag[0] = float(sum(times) > seconds)
        herring.allreduce_(flag, "max")
        times.append(time.perf_counter() - begun)
        if flag[0]:
            break
    share = (watching_ns() - watched_before) / 1e9 / (time.perf_counter() - job_begun)
    if herring.rank() == 0:
        settled = times[len(times) // 10 :]
        print(MARK + json.dumps([statistics.mean(settled) * 1e6, statistics.median(settled) * 1e6, share]), flush=True)


def measure(args: argparse.Namespace, settings: dict[str, str]) -> list[float]:
    sizes = ["-np", str(args.workers), "--servers", str(args.servers)]
    command = [sys.executable, "-m", "herring._launch", *sizes, sys.executable, __file__, "--work", str(args.seconds)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HERRING_")}
    limit = args.seconds + 60
    done = subprocess.run(command, env={**env, **settings}, capture_output=True, text=True, timeout=limit, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0 or len(lines) != 1:
        raise SystemExit(f"heartbeat_cost: the job ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return [float(value) for value in json.loads(lines[0].removeprefix(MARK))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of jobs (default 10)")
    parser.add_argument("--workers", type=int, default=2, help="workers of each job (default 2)")
    parser.add_argument("--servers", type=int, default=1, help="server processes of each job (default 1)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each job (default 5)")
    parser.add_argument("--heartbeat", type=float, default=1.0, help="HERRING_HEARTBEAT_S to measure (default 1)")
    parser.add_argument("--work", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args.work)
        return 0
    found = importlib.util.find_spec("herring")
    if found is None or found.origin is None:
        print("heartbeat_cost: herring is not installed for this Python: pip install .", file=sys.stderr)
        return 1
    os.environ["PYTHONPATH"] = str(Path(found.origin).resolve().parents[1])
    watched = {"HERRING_HEARTBEAT_S": str(args.heartbeat), "HERRING_DEAD_AFTER_S": str(max(5.0, args.heartbeat * 5))}
    ratios, shares = [], []
    for pair in range(args.pairs):
        order = (watched, BARELY) if pair % 2 == 0 else (BARELY, watched)
        results = {id(settings): measure(args, settings) for settings in order}
        with_beat, without = results[id(watched)], results[id(BARELY)]
        ratios.append(with_beat[1] / without[1])
        shares.append(with_beat[2])
        print(f"pair {pair}: {with_beat[1]:8.1f} us watched, {without[1]:8.1f} us barely: {ratios[-1]:.4f}", flush=True)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    print(f"median ratio {statistics.median(ratios):.4f}; quartiles {quartiles[0]:.4f} to {quartiles[2]:.4f}")
    print(f"watching threads of worker 0: {statistics.median(shares):.4%} of a core, at most {max(shares):.4%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
