"""A rank that dies in the middle of GPU collectives: the other gets an error that names it, within seconds."""

from __future__ import annotations

import os
import signal
import time

import ranks
import torch
import torch.distributed as dist


def body(rank: int) -> None:
    gradient = torch.ones(20_000_000, device="cuda")
    dist.all_reduce(gradient)
    if rank == 1:
        dist.all_reduce(gradient, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        while time.monotonic() < start + 60:
            dist.all_reduce(gradient)
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"after {time.monotonic() - start:.1f} s: {error}")
        os._exit(0)
    os._exit(3)


if __name__ == "__main__":
    ranks.run(body, timeout=55, expect=(0, -signal.SIGKILL))
