#!/usr/bin/env python3
"""Measures the memory of server processes over many buckets, and compares it with the bound that they state.

  herringrun -np 4 --servers 2 python benchmarks/server_memory.py --buckets 10000

Keeps eight buckets in flight. Prints the resident memory of each server process (RssAnon of /proc) before the first
bucket and while they pass. Exit status 1 if a server grew beyond its bound, or by more than 1 MB over the second half.
Works on one host only.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import deque
from pathlib import Path

import herring

IN_FLIGHT = 8
ROWS = 10
FLAT_BYTES = 1_000_000


def resident(pid: int) -> int:
    """Bytes of a process's own memory that are in RAM."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def run(buckets: int, size: int, report: bool) -> list[list[int]]:
    """Reduces the buckets; what each server had resident at the start and after each tenth of them."""
    servers = herring.server_counters()
    pids = [int(re.search(r"pid (\d+)", server["place"])[1]) for server in servers]  # type: ignore[index]
    arrays = [herring.empty(size // 4, "float32") for _ in range(IN_FLIGHT)]
    for array in arrays:
        array[:] = 1
    rows = [[resident(pid) for pid in pids]]
    pending: deque[herring.Handle] = deque()
    began = time.monotonic()
    for number in range(1, buckets + 1):
        if len(pending) == IN_FLIGHT:
            pending.popleft().wait()
        pending.append(herring.allreduce_(arrays[number % IN_FLIGHT], "average", async_op=True))
        if number % max(buckets // ROWS, 1) == 0:
            rows.append([resident(pid) for pid in pids])
            if report:
                grown = "  ".join(f"{(now - start) / 1e6:8.2f}" for now, start in zip(rows[-1], rows[0], strict=True))
                print(f"{number:9} buckets {time.monotonic() - began:7.1f} s   MB grown by: {grown}", flush=True)
    while pending:
        pending.popleft().wait()
    return rows


def main() -> int:
    """Runs as one rank of the job; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=10_000, help="number of buckets (default 10000)")
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of each bucket (default 1048576)")
    args = parser.parse_args()
    if args.buckets < ROWS:
        parser.error(f"--buckets must be at least {ROWS}")
    herring.init()
    servers = herring.server_counters()
    if not servers or any("embedded" in server["place"] for server in servers):
        print("server_memory: run it with server processes: herringrun -np 4 --servers 2 ...", file=sys.stderr)
        return 2
    rows = run(args.buckets, args.size, herring.rank() == 0)
    good = True
    for index, server in enumerate(servers):
        bound = server["memory_bound_bytes"]
        grown = max(row[index] for row in rows) - rows[0][index]
        late = rows[-1][index] - rows[len(rows) // 2][index]
        good = good and grown <= bound and late <= FLAT_BYTES
        if herring.rank() == 0:
            print(
                f"{server['place']}: grew by {grown / 1e6:.2f} MB, bound {bound / 1e6:.2f} MB; over the second half "
                f"{late / 1e6:.2f} MB"
            )
    if herring.rank() == 0:
        print("server_memory: OK: within the bound, and flat" if good else "server_memory: FAILED")
    herring.shutdown()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
