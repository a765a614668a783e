"""Two ranks on one GPU: every collective has the bits of the CPU path; streams; DistributedDataParallel."""

from __future__ import annotations

import copy

import ranks
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def same(mine: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert mine.view(-1).view(torch.uint8).equal(theirs.cpu().view(-1).view(torch.uint8)), f"{what}: other bits"


def collectives(rank: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
        for size in (1, 1000, 3_000_001):
            x = (torch.rand(size, generator=torch.Generator().manual_seed(rank)) * 8).to(dtype)
            there = x.cuda()
            dist.all_reduce(x)
            dist.all_reduce(there)
            same(x, there, f"all_reduce {dtype} {size}")
            dist.broadcast(there, 1)
            gathered, wanted = torch.empty(2 * size, dtype=dtype, device="cuda"), torch.empty(2 * size, dtype=dtype)
            dist.all_gather_into_tensor(gathered, there)
            dist.all_gather_into_tensor(wanted, x)
            same(wanted, gathered, f"all_gather {dtype} {size}")
            part, mine = torch.empty(size, dtype=dtype, device="cuda"), torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(part, gathered)
            dist.reduce_scatter_tensor(mine, wanted)
            same(mine, part, f"reduce_scatter {dtype} {size}")
    print("collectives: ok")


def slow_streams(rank: int) -> None:
    """A kernel that sleeps ahead of the producer: who forgets an event sums what was there before."""
    side = torch.cuda.Stream()
    for step in range(30):
        with torch.cuda.stream(side):
            gradient = torch.zeros(1_000_000, device="cuda")
            torch.cuda._sleep(5_000_000)
            gradient.fill_(rank + step)
            work = dist.all_reduce(gradient, async_op=True)
            work.wait()
            result = gradient * 2
        side.synchronize()
        assert result.unique().tolist() == [2.0 * (1 + 2 * step)], f"step {step}: {result.unique().tolist()[:5]}"
    futures = []
    for step in range(10):
        gradient = torch.full((500_000,), float(rank + step), device="cuda")
        futures.append(dist.all_reduce(gradient, async_op=True).get_future().then(lambda done: done.value()[0] * 3))
        del gradient
    for step, future in enumerate(futures):
        assert future.wait().unique().tolist() == [3.0 * (1 + 2 * step)]
    print("streams: ok")


def ddp(rank: int) -> None:
    """The same model on the CPU and on the GPU learns alike; the ranks' parameters stay the same bits."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    here = DistributedDataParallel(copy.deepcopy(model))
    there = DistributedDataParallel(copy.deepcopy(model).cuda(), device_ids=[0])
    for wrapped, device in ((here, "cpu"), (there, "cuda")):
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            x = torch.randn(32, 64, generator=generator).to(device)
            optimizer.zero_grad()
            (wrapped(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-3, atol=1e-4)
        both = [torch.empty_like(other) for _ in range(2)]
        dist.all_gather(both, other.detach())
        assert both[0].equal(both[1]), "the ranks have drifted apart"
    print("DistributedDataParallel: ok")


def capture(rank: int) -> None:
    x = torch.ones(8, device="cuda")
    said = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(x)
    except RuntimeError as error:
        said = str(error)
    if "captured" not in said:
        raise AssertionError(f"a capture went through, or failed otherwise: {said}")
    print("capture: refused")


def body(rank: int) -> None:
    collectives(rank)
    slow_streams(rank)
    ddp(rank)
    capture(rank)


if __name__ == "__main__":
    ranks.run(body)
