"""What each rank does in test_torch_surface.py: what torch builds on process groups, on backend herring."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from common import expect_error, same_everywhere, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from herring.torch.distributed import monitored_barrier

WIDTH = 8


def sparse_and_monitored() -> None:
    with world() as (rank, size):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            mine = torch.sparse_coo_tensor([[rank, rank + 1]], torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (9, 2)).to(dtype)
            want = torch.zeros(9, 2, dtype=dtype)
            for r in range(size):
                want[r] += torch.tensor([1.0, 2.0], dtype=dtype)
                want[r + 1] += torch.tensor([3.0, 4.0], dtype=dtype)
            work = dist.all_reduce(mine, async_op=True)
            dense = torch.ones(3)
            dist.all_reduce(dense)  # Another collective between the steps of the sparse one.
            work.wait()
            assert torch.equal(mine.to_dense(), want), (rank, mine)
        empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.long), torch.empty(0), (4,))
        dist.all_reduce(empty)
        assert empty.to_dense().sum() == 0
        average = torch.sparse_coo_tensor([[0]], torch.tensor([float(rank)]), (2,))
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        assert average.to_dense().tolist() == [(size - 1) / 2, 0.0]
        with expect_error(ValueError, "summed or averaged"):
            dist.all_reduce(empty, op=dist.ReduceOp.MAX)
        with expect_error((ValueError, RuntimeError), "mismatch"):
            dist.all_reduce(torch.sparse_coo_tensor([[0]], torch.ones(1), (4 + (rank == 0),)))
        _sparse_embedding(rank, size)
        _monitored(rank, size)


def _sparse_embedding(rank: int, size: int) -> None:
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([rank, 5])).sum().backward()
    want = torch.zeros(10, 4)
    for r in range(size):
        want[r] += 1 / size
        want[5] += 1 / size
    torch.testing.assert_close(model.module.weight.grad.to_dense(), want)


def _monitored(rank: int, size: int) -> None:
    monitored_barrier(timeout=timedelta(seconds=20))
    monitored_barrier(wait_all_ranks=True)
    begun = time.monotonic()
    if rank == 0:
        missing = ", ".join(map(str, range(2, size)))
        with expect_error(RuntimeError, f"Ranks {missing} failed to pass monitoredBarrier in 500 ms"):
            monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    elif rank == 1:
        with expect_error(RuntimeError, "Rank 1 successfully reached monitoredBarrier"):
            monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
    assert time.monotonic() - begun < 15, "the error came late"
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == size, "other collectives go on after a failed monitored barrier"


def meshes_and_shards(folder: str) -> None:
    """Functional collectives, DeviceMesh, DTensor, tensor parallel, FSDP2, ZeRO and checkpoints, 4 ranks as 2 x 2."""
    with world() as (rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        assert mesh["model"].get_local_rank() == rank % 2
        _functional(rank, size)
        torch.manual_seed(5)
        big = torch.randn(8, 12)
        for placement in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]):
            sharded = distribute_tensor(big, mesh, placement)
            torch.testing.assert_close(sharded.redistribute(placements=[Replicate()] * 2).to_local(), big)
            torch.testing.assert_close((sharded @ sharded.t()).full_tensor(), big @ big.t())
        _tensor_parallel(mesh["model"])
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)):
            for shape in (mesh, init_device_mesh("cpu", (size,))):
                _fully_shard(rank, size, shape, policy)
        _zero_optimizer(rank)
        _checkpoint(folder, mesh)


def _functional(rank: int, size: int) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x, "sum", dist.group.WORLD)
        parts = functional.all_gather_tensor(x + total, 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(parts, "avg", 0, dist.group.WORLD) * 2

    x = torch.arange(4.0) + rank
    want = both(x)
    torch.testing.assert_close(want, 2 * (torch.arange(4.0) + rank + sum(torch.arange(4.0) + r for r in range(size))))
    torch.testing.assert_close(torch.compile(both, backend="aot_eager", fullgraph=True)(x), want)
    swapped = functional.all_to_all_single(torch.full((size,), float(rank)), None, None, dist.group.WORLD)
    assert swapped.tolist() == list(range(size))


def _mlp() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


def _tensor_parallel(mesh: Any) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))
    plain, split = _mlp(), _mlp()
    split = parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(split(x), plain(x))
    split(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(split[0].weight.grad.full_tensor(), plain[0].weight.grad)


def _steps(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
    for step in range(3):
        optimizer.zero_grad()
        generators = [torch.Generator().manual_seed(10 * step + r) for r in ranks]
        x = torch.cat([torch.randn(4, WIDTH, generator=each) for each in generators])
        model(x).square().mean().backward()
        optimizer.step()


def _fully_shard(rank: int, size: int, mesh: Any, policy: MixedPrecisionPolicy) -> None:
    model = _mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    _steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), [rank])
    single = _mlp()
    _steps(single, torch.optim.AdamW(single.parameters(), lr=0.01), list(range(size)))
    limit = 1e-4 if policy.reduce_dtype is None else 2e-2
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=limit, atol=limit)


def _zero_optimizer(rank: int) -> None:
    model = nn.parallel.DistributedDataParallel(_mlp())
    plain = nn.parallel.DistributedDataParallel(_mlp())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    _steps(model, zero, [rank])
    _steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), [rank])
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    zero.consolidate_state_dict(to=0)


def _checkpoint(folder: str, mesh: Any) -> None:
    """Saved under one sharding, loaded under another."""
    model, other = _mlp(), _mlp()
    fully_shard(model, mesh=mesh)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fully_shard(other, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    for mine, theirs in zip(other.parameters(), _mlp().parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)


def pipelines() -> None:
    """GPipe, 1F1B and interleaved 1F1B: gradients of every stage equal those of the whole model in one process."""
    with world() as (rank, size):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))
        y = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(4))
        loss = nn.functional.mse_loss
        for schedule_type, per_rank in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
            count = size * per_rank
            whole = _stages(count)
            sum(loss(whole(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)).div(4).backward()
            layers = _stages(count)
            mine = [k for k in range(count) if k % size == rank]
            stages = [PipelineStage(layers[k], k, count, torch.device("cpu")) for k in mine]
            many = per_rank > 1
            schedule = schedule_type(stages if many else stages[0], n_microbatches=4, loss_fn=loss)
            losses: list[torch.Tensor] = []
            inputs = (x,) if 0 in mine else ()
            schedule.step(*inputs, **({"target": y, "losses": losses} if count - 1 in mine else {}))
            for k in mine:
                for ours, theirs in zip(layers[k].parameters(), whole[k].parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
            if losses:
                torch.testing.assert_close(torch.stack(losses).mean(), loss(whole(x), y))
        same_everywhere(torch.ones(1), "the end")


def _stages(count: int) -> nn.Sequential:
    torch.manual_seed(21)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))
