"""Starts this script again as two ranks on one GPU, for the scripts beside it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist


def run(
    body: Callable[[int], None], backend: str = "herring", timeout: float = 110, expect: tuple[int, int] = (0, 0)
) -> None:
    """In the parent: starts both ranks and ends with their worst exit code. In a rank: runs `body` in a group."""
    if "RANK" in os.environ:
        torch.cuda.set_device(0)
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
    codes = [each.wait(timeout) for each in ranks]
    print("exit codes", codes)
    sys.exit(0 if tuple(codes) == expect else 1)
