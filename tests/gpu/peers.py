"""All_reduce of two ranks through the host and on the GPU (HERRING_ON_HOST), by turns, and gloo's and NCCL's.

Medians until the GPU has the result; a line of JSON each. `bits`: the result has those of the CPU's all_reduce. On one
GPU both ranks' copies and sums share its memory, so this says what the way costs, not what several GPUs would reach.
NCCL wants a GPU for each rank: it is left out where there is one.
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

SIZES_KB = (0.008, 64, 1024, 25 * 1024, 256 * 1024)
WARM_UP = 3
#: Name, and the settings that it is for.
VARIANTS = {
    "host": {"HERRING_ON_HOST": "host"},
    "device": {"HERRING_ON_HOST": "device"},
    "device, 32 blocks": {"HERRING_ON_HOST": "device", "HERRING_DEVICE_BLOCKS": "32"},
    "device, 132 blocks": {"HERRING_ON_HOST": "device", "HERRING_DEVICE_BLOCKS": "132"},
    "gloo": {"GPU_TEST_BACKEND": "gloo"},
}
WITH_NCCL = {
    "nccl": {"HERRING_ON_HOST": "nccl"},
    "nccl, 32 blocks": {"HERRING_ON_HOST": "nccl", "HERRING_DEVICE_BLOCKS": "32"},
    "torch's nccl": {"GPU_TEST_BACKEND": "nccl"},
}


def has_the_bits_of_the_cpu(elements: int, rank: int) -> bool:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
    there = values.to("cuda")
    dist.all_reduce(values)
    dist.all_reduce(there)
    return there.cpu().view(torch.int32).equal(values.view(torch.int32))


def body(rank: int) -> None:
    variant = os.environ["GPU_TEST_VARIANT"]
    for size in SIZES_KB:
        elements = int(size * 256)
        count = 7 if size > 100_000 else 40
        there = torch.ones(elements, device="cuda")
        row: dict[str, object] = {
            "ms": round(ranks.median_ms(partial(dist.all_reduce, there), dist.barrier, count, WARM_UP), 3)
        }
        if "GPU_TEST_BACKEND" not in os.environ:
            row["bits"] = has_the_bits_of_the_cpu(elements, rank)
        if rank == 0:
            print(json.dumps({"variant": variant, "KB": size, **row}), flush=True)


if __name__ == "__main__":
    if "GPU_TEST_VARIANT" in os.environ:
        ranks.run(body, timeout=60)
    else:
        codes = []
        variants = VARIANTS if torch.cuda.device_count() < 2 else {**VARIANTS, **WITH_NCCL}
        for _ in range(2):
            for name, settings in variants.items():
                env = {**os.environ, **settings, "GPU_TEST_VARIANT": name}
                codes.append(subprocess.run([sys.executable, __file__], env=env, check=False).returncode)
        sys.exit(max(codes))
