"""What each rank does in test_torch_sagemaker.py: a script written for smdistributed.dataparallel."""

from __future__ import annotations

import inspect

import torch
from common import expect_error
from torch import nn

import herring.torch.distributed as dist
from herring.torch.parallel import distributed as parallel_distributed
from herring.torch.parallel.distributed import DistributedDataParallel as DDP  # noqa: N817 (as such scripts have it)


def script() -> None:
    assert dist.is_available()
    assert not dist.is_initialized()
    dist.init_process_group()
    assert dist.is_initialized()
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_local_rank() == rank
    _collectives(rank, size)
    _training(rank, size)
    torch.distributed.destroy_process_group()
    assert not dist.is_initialized()


def _collectives(rank: int, size: int) -> None:
    expected = {
        dist.ReduceOp.SUM: sum(range(1, size + 1)),
        dist.ReduceOp.AVERAGE: (size + 1) / 2,
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.MAX: size,
    }
    for op, value in expected.items():
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor, op=op)
        assert tensor.tolist() == [value] * 3, op
    work = dist.all_reduce(torch.ones(2), dist.ReduceOp.SUM, torch.distributed.group.WORLD, True)
    work.wait()
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, src=size - 1, async_op=False)
    assert tensor.item() == size - 1
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [each[0].item() for each in parts] == list(range(size))
    rows = torch.empty(size)
    dist.all_to_all_single(rows, torch.arange(size) + 10.0 * rank)
    assert rows.tolist() == [10.0 * source + rank for source in range(size)]
    dist.barrier()


def _training(rank: int, size: int) -> None:
    assert parallel_distributed.DistributedDataParallel is DDP
    torch.manual_seed(rank)
    # By position, SageMaker's order: device_ids, output_device, broadcast_buffers, process_group, bucket_cap_mb.
    model = DDP(nn.Linear(4, 2), None, None, False, torch.distributed.group.WORLD, 1)
    assert model.broadcast_buffers is False
    assert model.bucket_bytes_cap == 1 << 20
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((2, 4), (size + 1) / 2))
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    by_name = DDP(nn.Linear(4, 2), device_ids=None, broadcast_buffers=True, process_group=None, bucket_cap_mb=25)
    assert by_name.broadcast_buffers is True
    # torch's order stays torch's: the fourth is dim.
    assert DDP(nn.Linear(4, 2), None, None, 0, False).broadcast_buffers is False
    with expect_error(TypeError, "positional"):
        DDP(nn.Linear(4, 2), None, None, True, None, 25, "more")
    assert "bucket_cap_mb" in inspect.signature(DDP).parameters
