"""What averaging costs the GPU's own work: matrix products with and without all-reduces beside them.

Rank 0 has the GPU, rank 1 gives CPU tensors: two processes on one GPU would take turns on it, whatever they do.
"""

from __future__ import annotations

import json
import statistics
import time

import ranks
import torch
import torch.distributed as dist

SIZE = 8192
PRODUCTS = 40
BUCKET = 25 << 18
BUCKETS = 8
ROUNDS = 7


def products(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(PRODUCTS):
        torch.mm(a, b, out=into)
    ended.record()
    return begun, ended


def average(buckets: list[torch.Tensor]) -> float:
    """Seconds."""
    begun = time.perf_counter()
    for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
        work.wait()
    if buckets[0].is_cuda:
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - begun


def body(rank: int) -> None:
    buckets = [torch.full((BUCKET,), 1.0, device="cuda" if rank == 0 else "cpu") for _ in range(BUCKETS)]
    average(buckets)
    if rank == 1:
        for _ in range(ROUNDS):
            dist.barrier()
            average(buckets)
        return
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    into = torch.empty_like(a)
    side = torch.cuda.Stream()
    products(a, b, into)
    alone, beside, averaging = [], [], []
    for _ in range(ROUNDS):
        begun, ended = products(a, b, into)
        ended.synchronize()
        alone.append(begun.elapsed_time(ended) / PRODUCTS)
        dist.barrier()
        begun, ended = products(a, b, into)
        with torch.cuda.stream(side):
            averaging.append(average(buckets) * 1e3)
        ended.synchronize()
        beside.append(begun.elapsed_time(ended) / PRODUCTS)
    one, other = statistics.median(alone), statistics.median(beside)
    row = {
        "product_ms": round(one, 4),
        "beside_all_reduces_ms": round(other, 4),
        "slower": round(other / one - 1, 4),
        "products_ms": round(other * PRODUCTS, 1),
        "all_reduces_ms": round(statistics.median(averaging), 1),
        "MB": BUCKETS * 25,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    ranks.run(body)
