"""All_reduce of two ranks on one GPU through the host and on the GPU (HERRING_ON_HOST), by turns, and gloo's.

Medians until the GPU has the result; a line of JSON each. `bits`: the result has those of the CPU's all_reduce. On one
GPU both ranks' copies and sums share its memory, so this says what the way costs, not what several GPUs would reach.
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
        if variant != "gloo":
            row["bits"] = has_the_bits_of_the_cpu(elements, rank)
        if rank == 0:
            print(json.dumps({"variant": variant, "KB": size, **row}), flush=True)


if __name__ == "__main__":
    if "GPU_TEST_VARIANT" in os.environ:
        ranks.run(body, timeout=60)
    else:
        codes = []
        for _ in range(2):
            for name, settings in VARIANTS.items():
                env = {**os.environ, **settings, "GPU_TEST_VARIANT": name}
                codes.append(subprocess.run([sys.executable, __file__], env=env, check=False).returncode)
        sys.exit(max(codes))
