"""All_reduce of two ranks on one GPU: herring and gloo on CUDA tensors, herring on CPU tensors, and the copies alone.

Medians; a line of JSON each. `bound_ms` is herring on the CPU plus the copies out and back: nothing here can beat it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import ranks
import torch
import torch.distributed as dist

SIZES_MB = (1, 25, 256)
WARM_UP = 3


def copies(pinned: torch.Tensor, there: torch.Tensor) -> None:
    pinned.copy_(there, non_blocking=True)
    there.copy_(pinned, non_blocking=True)


def body(rank: int) -> None:
    backend = os.environ["GPU_TEST_BACKEND"]
    for size in SIZES_MB:
        count = 5 if size > 100 else 20
        host, there = torch.ones(size << 18), torch.ones(size << 18, device="cuda")
        row = {"cuda_ms": ranks.median_ms(partial(dist.all_reduce, there), dist.barrier, count, WARM_UP)}
        if backend == "herring":
            row["cpu_ms"] = ranks.median_ms(partial(dist.all_reduce, host), dist.barrier, count, WARM_UP)
            row["copies_ms"] = ranks.median_ms(partial(copies, host.pin_memory(), there), dist.barrier, count, WARM_UP)
            row["bound_ms"] = row["cpu_ms"] + row["copies_ms"]
        if rank == 0:
            rounded = {key: round(value, 3) for key, value in row.items()}
            print(json.dumps({"backend": backend, "MB": size, **rounded}), flush=True)


if __name__ == "__main__":
    if "GPU_TEST_BACKEND" in os.environ:
        ranks.run(body)
    else:
        codes = [
            subprocess.run([sys.executable, __file__], env={**os.environ, "GPU_TEST_BACKEND": backend}, check=False)
            for backend in ("herring", "gloo")
        ]
        sys.exit(max(code.returncode for code in codes))
