#!/usr/bin/env python3
"""Runs steps at full speed for minutes. Memory and descriptors of every process must not grow.

  benchmarks/soak.py --minutes 10 --workers 2 --servers 2

Runs a job under herringrun whose workers sum arrays of 1 to a quarter million elements as fast as they can. Each step
is checked. Once a second it samples each process: resident memory (anonymous and shared) and open descriptors.
The first fifth is warm-up. Of the rest the medians of the first and the last quarter are compared: memory may
grow by 1 % or 2 MB, the number of descriptors not at all. At the end nothing may be left in /dev/shm, and no process.
Exit status 0 if all this holds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chaos_round import ROUND_MARK, marked_processes

WORKER = Path(__file__).with_name("soak_worker.py")
MARK = "@@soak "
WARM_UP_SHARE = 0.2
ALLOWED_SHARE, ALLOWED_BYTES = 0.01, 2 << 20


def sample(pid: int) -> tuple[int, int]:
    """Resident bytes that are the process's own or shared (not mapped files), and open descriptors."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc", str(pid), "status").read_text().splitlines() if ":" in line
    )
    resident = sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    return resident, len(os.listdir(f"/proc/{pid}/fd"))


def name_of(pid: int) -> str:
    words = Path("/proc", str(pid), "cmdline").read_bytes().decode(errors="replace").split("\0")
    if "server" in words:
        return f"server {words[words.index('--rank') + 1]}"
    if any("soak_worker" in word for word in words) and "herring._launch" not in words:
        environment = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
        rank = next((entry[5:].decode() for entry in environment if entry.startswith(b"RANK=")), "?")
        return f"worker {rank}"
    return "herringrun"


def watch(popen: subprocess.Popen[str], token: str, deadline: float) -> dict[str, list[tuple[float, int, int]]]:
    """Samples every second until the job ends: name of process -> (time, resident bytes, descriptors)."""
    seen: dict[str, list[tuple[float, int, int]]] = {}
    while popen.poll() is None and time.monotonic() < deadline:
        for pid in marked_processes(token):
            with contextlib.suppress(OSError, KeyError, IndexError):
                seen.setdefault(name_of(pid), []).append((time.monotonic(), *sample(pid)))
        time.sleep(1.0)
    return seen


def judge(name: str, samples: list[tuple[float, int, int]]) -> tuple[dict[str, Any], list[str]]:
    settled = samples[int(len(samples) * WARM_UP_SHARE) : -1]  # The last may be of a process that is leaving.
    quarter = max(len(settled) // 4, 1)
    if len(settled) < 4:
        return {}, [f"{name}: only {len(samples)} samples; run longer"]
    first, last = settled[:quarter], settled[-quarter:]
    memory = [statistics.median(row[1] for row in rows) for rows in (first, last)]
    descriptors = [statistics.median(row[2] for row in rows) for rows in (first, last)]
    row = {
        "resident_mb": [round(value / 1e6, 2) for value in memory],
        "descriptors": descriptors,
        "samples": len(samples),
    }
    problems = []
    if memory[1] - memory[0] > max(ALLOWED_SHARE * memory[0], ALLOWED_BYTES):
        problems.append(f"{name}: resident memory grew from {memory[0] / 1e6:.1f} to {memory[1] / 1e6:.1f} MB")
    if descriptors[1] > descriptors[0]:
        problems.append(f"{name}: open descriptors grew from {descriptors[0]:.0f} to {descriptors[1]:.0f}")
    return row, problems


def run(args: argparse.Namespace, token: str) -> tuple[dict[str, Any], list[str]]:
    seconds = args.minutes * 60
    sizes = ["-np", str(args.workers), "--servers", str(args.servers)]
    command = [sys.executable, "-m", "herring._launch", *sizes, sys.executable, str(WORKER), str(seconds)]
    env = dict(os.environ, HERRING_INTRA_NODE=args.intra_node, HERRING_INTERFACE="lo", **{ROUND_MARK: token})
    before = set(os.listdir("/dev/shm"))
    # A file, not a pipe: nobody reads while it runs.
    with tempfile.TemporaryFile("w+") as output:
        popen = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            seen = watch(popen, token, time.monotonic() + seconds + 120)
        finally:
            if popen.poll() is None:
                popen.terminate()
            code = popen.wait(30)
        output.seek(0)
        text = output.read()
    reports = [json.loads(line.removeprefix(MARK)) for line in text.splitlines() if line.startswith(MARK)]
    problems = [] if code == 0 and len(reports) == args.workers else [f"the job ended with {code}:\n{text[-3000:]}"]
    rows: dict[str, Any] = {}
    for name in sorted(seen):
        rows[name], found = judge(name, seen[name])
        problems += found
    left = {name for name in set(os.listdir("/dev/shm")) - before if "herring" in name}
    problems += [f"left in /dev/shm: {', '.join(sorted(left))}"] if left else []
    problems += [f"process {pid} was left behind" for pid in marked_processes(token)]
    return {"reports": reports, "processes": rows}, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--workers", type=int, default=2, help="number of workers (default 2)")
    parser.add_argument(
        "--servers", type=int, default=2, help="number of server processes; 0: only shared memory (default 2)"
    )
    parser.add_argument(
        "--intra-node", choices=("auto", "on", "off"), default="auto", help="HERRING_INTRA_NODE (default auto)"
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    args = parser.parse_args()
    found = importlib.util.find_spec("herring")
    if found is None or found.origin is None:
        print("soak: herring is not installed for this Python: pip install . in its source folder", file=sys.stderr)
        return 1
    os.environ["PYTHONPATH"] = str(Path(found.origin).resolve().parents[1])
    report, problems = run(args, secrets.token_hex(8))
    for done in report["reports"][:1]:
        rate = f"{done['steps'] / done['seconds']:.0f}/s"
        print(f"soak: {done['steps']} steps in {done['seconds']:.0f} s ({rate}), {done['bytes'] / 1e9:.1f} GB summed")
    print(f"{'process':<12} {'MB, first quarter':>18} {'last quarter':>13} {'descriptors':>12} {'last':>6}")
    for name, row in report["processes"].items():
        if row:
            (m0, m1), (d0, d1) = row["resident_mb"], row["descriptors"]
            print(f"{name:<12} {m0:>18.2f} {m1:>13.2f} {d0:>12.0f} {d1:>6.0f}")
    print("soak: " + ("; ".join(problems) if problems else "OK: all flat, nothing left"))
    if args.json:
        args.json.write_text(json.dumps({**report, "problems": problems}, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
