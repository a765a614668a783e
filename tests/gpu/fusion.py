"""Many tensors of two ranks on one GPU: by name, in one group, and fused by hand; Horovod's module.

Medians; a line of JSON each. By hand: torch.cat, one all-reduce, and copies back.
"""

from __future__ import annotations

import functools
import json

import ranks
import torch

import herring.horovod.torch as hvd

COUNT, WARM_UP = 15, 4
RESNET50 = (
    [9408, 64, 64]
    + [4096, 36864, 16384, 16384, 64, 64, 64, 64, 256, 256, 256, 256] * 3
    + [32768, 147456, 65536, 131072, 128, 128, 128, 128, 512, 512, 512, 512] * 4
    + [131072, 589824, 262144, 524288, 256, 256, 256, 256, 1024, 1024, 1024, 1024] * 6
    + [524288, 2359296, 1048576, 2097152, 512, 512, 512, 512, 2048, 2048, 2048, 2048] * 3
    + [2048000, 1000]
)
SETS = {"1000 x 4 KB": [1024] * 1000, "200 x 64 KB": [16384] * 200, "as ResNet-50": RESNET50}


def by_name(tensors: list[torch.Tensor]) -> None:
    handles = [hvd.allreduce_async_(each, name=f"t.{i}", op=hvd.Sum) for i, each in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def in_a_group(tensors: list[torch.Tensor]) -> None:
    hvd.grouped_allreduce_(tensors, name="group", op=hvd.Sum)


def by_hand(tensors: list[torch.Tensor]) -> None:
    flat = torch.cat([each.view(-1) for each in tensors])
    hvd.allreduce_(flat, name="flat", op=hvd.Sum)
    torch._foreach_copy_(tensors, flat.split([each.numel() for each in tensors]))


def body(rank: int) -> None:
    hvd.init()
    for name, sizes in SETS.items():
        for way in (by_name, in_a_group, by_hand):
            tensors = [torch.zeros(size, device="cuda") for size in sizes]
            row = {
                "tensors": name,
                "MB": round(sum(sizes) / 2**18, 2),
                "way": way.__name__,
                "ms": round(ranks.median_ms(functools.partial(way, tensors), hvd.barrier, COUNT, WARM_UP), 3),
            }
            if rank == 0:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    ranks.run(body, backend=None)
