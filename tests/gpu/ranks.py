"""Starts this script again as two ranks, on one GPU or on one each, for the scripts beside it."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import herring.torch  # noqa: F401  # Known to torch also where Herring is not installed, only on the path.


def run(
    body: Callable[[int], None],
    backend: str | None = "herring",
    timeout: float = 110,
    expect: tuple[int, int] = (0, 0),
) -> None:
    """In the parent: starts both ranks and ends with 0 where they ended as expected. In a rank: runs `body`, in a
    process group where there is a backend."""
    if "RANK" in os.environ:
        if os.environ.get("GPU_TEST_DEVICE", "cuda") == "cuda":
            torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
        if backend is None:
            body(int(os.environ["RANK"]))
            return
        dist.init_process_group(os.environ.get("GPU_TEST_BACKEND", backend))
        body(dist.get_rank())
        dist.destroy_process_group()
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    deadline = time.monotonic() + timeout
    # Who waits for a rank that has failed is not waited for long.
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if any(rank.poll() not in (None, 0, *expect) for rank in ranks):
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.05)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    codes = tuple(rank.wait() for rank in ranks)
    print("exit codes", codes)
    sys.exit(0 if codes == expect else 1)


def median_ms(call: Callable[[], object], barrier: Callable[[], object], count: int, warm_up: int) -> float:
    """Of `count` calls after `warm_up` that are not timed: milliseconds from the barrier until the GPU has nothing to
    do."""
    taken = []
    for _ in range(warm_up + count):
        torch.cuda.synchronize()
        barrier()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(taken[warm_up:])
