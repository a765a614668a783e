"""One worker of a soak: steps of many sizes and kinds, each checked, until the time is up (see soak.py)."""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

import herring

SIZES = (1, 777, 4096, 16_384, 65_536, 262_144)
MARK = "@@soak "


def step(number: int, arrays: dict[int, np.ndarray]) -> int:
    """One step; returns the bytes that were summed. Raises where a result is wrong."""
    workers, rank = herring.size(), herring.rank()
    total = 0
    pending = []
    for offset in range(3):
        size = SIZES[(number + offset * 2) % len(SIZES)]
        array = arrays[size]
        array[:] = (rank + 1) * (number % 1000 + 1)
        pending.append((herring.allreduce(array, "sum", async_op=True), number % 1000 + 1))
        total += array.nbytes
    for handle, factor in pending:
        got = handle.wait()
        wanted = factor * workers * (workers + 1) // 2
        if got[0] != wanted or got[-1] != wanted or not (got == wanted).all():
            raise AssertionError(f"step {number}: {got[:3]} instead of {wanted}")
    if number % 50 == 0:
        gathered = herring.allgather(np.array([rank, number]))
        told = herring.broadcast(np.array([number if rank == 0 else -1]))
        if gathered.reshape(workers, 2)[:, 0].tolist() != list(range(workers)) or told[0] != number:
            raise AssertionError(f"step {number}: allgather {gathered}, broadcast {told}")
    return total


def main() -> None:
    seconds = float(sys.argv[1])
    herring.init()
    arrays = {size: np.zeros(size, "float32") for size in SIZES}
    begun, number, total, is_over = time.monotonic(), 0, 0, False
    while not is_over:
        for _ in range(100):
            total += step(number, arrays)
            number += 1
        # All stop after the same step: worker 0's clock counts.
        over = np.array([float(herring.rank() == 0 and time.monotonic() - begun >= seconds)])
        is_over = bool(herring.allreduce(over, "sum")[0])
    spent = time.monotonic() - begun
    line = json.dumps({"rank": herring.rank(), "steps": number, "bytes": total, "seconds": spent})
    herring.shutdown()
    os.write(1, f"{MARK}{line}\n".encode())


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    main()
