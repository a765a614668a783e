"""Two ranks on one GPU: herring's functions on arrays take torch's CUDA tensors; bits of the CPU path, streams, times.

Run by torchrun: python -m torch.distributed.run --nproc-per-node 2 tests/gpu/arrays.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import herring


def same(mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert theirs.is_cuda, f"{what}: not on the GPU"
    assert mine.view(-1).view(torch.uint8).equal(theirs.cpu().view(-1).view(torch.uint8)), f"{what}: other bits"


def functions(rank: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        for rows in (2, 1000, 300_000):
            x = (torch.rand(rows, 10, generator=torch.Generator().manual_seed(rank)) * 8).to(dtype)
            there, what = x.cuda(), f"{dtype} {rows}"
            same(herring.allreduce(x, "sum"), herring.allreduce(there, "sum"), f"allreduce {what}")
            same(herring.allgather(x), herring.allgather(there), f"allgather {what}")
            same(herring.alltoall(x), herring.alltoall(there), f"alltoall {what}")
            same(herring.reduce_scatter(x, "sum"), herring.reduce_scatter(there, "sum"), f"reduce_scatter {what}")
            [wanted], [got] = herring.grouped_allreduce([x], "sum"), herring.grouped_allreduce([there], "sum")
            same(wanted, got, f"grouped_allreduce {what}")
            same(herring.broadcast(x, 1), herring.broadcast(there, 1), f"broadcast {what}")
            handle = herring.allreduce_(there, "sum", name="a", async_op=True)
            herring.allreduce_(x, "sum", name="b")
            same(x, handle.wait(), f"allreduce_ {what}")
    if rank == 1:
        herring.allreduce_(torch.ones(1000), "sum")  # This rank has no GPU, for once.
    else:
        same(torch.full((1000,), 2.0), herring.allreduce_(torch.ones(1000, device="cuda"), "sum"), "mixed")
    print("functions: ok", flush=True)


def late_kernels() -> None:
    """A kernel that sleeps ahead of the one that writes: who does not wait for it sums what was there before."""
    side = torch.cuda.Stream()
    for step in range(20):
        with torch.cuda.stream(side):
            x = torch.zeros(500_000, device="cuda")
            torch.cuda._sleep(5_000_000)
            x += step + 1
            result = herring.allreduce(x, "sum")
            doubled = 2 * result
        side.synchronize()
        assert doubled.eq(4 * (step + 1)).all(), step
    x = torch.ones(1000, device="cuda")
    torch.cuda._sleep(4_000_000_000)
    said = "nothing"
    try:
        herring.allreduce(x, timeout=0.2)
    except herring.HerringTimeoutError as error:
        said = str(error)
    assert "a kernel" in said, said
    torch.cuda.synchronize()
    print("late kernels: ok", flush=True)


def times(rank: int) -> None:
    def median_ms(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(12):
            herring.barrier()
            start = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - start))
        return statistics.median(taken[2:])

    for megabytes in (0.0625, 1, 25, 100):
        host = torch.ones(int(megabytes * 2**18))
        there = host.cuda()
        torch.cuda.synchronize()
        on_gpu = median_ms(lambda there=there: herring.allreduce_(there))
        on_cpu = median_ms(lambda host=host: herring.allreduce_(host))
        if rank == 0:
            print(f"{megabytes:g} MB in place: {on_gpu:.3f} ms on the GPU, {on_cpu:.3f} ms on the CPU", flush=True)


def main() -> None:
    """All of it."""
    herring.init()
    torch.cuda.set_device(0)
    functions(herring.rank())
    late_kernels()
    times(herring.rank())
    herring.shutdown()


if __name__ == "__main__":
    main()
