"""DistributedDataParallel with backup workers: a rank that is late holds nobody up, and has the same parameters."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from common import same_everywhere, world

import herring
from herring.torch.parallel import DistributedDataParallel

STEPS = 6
LATE = 1  # The rank that is.


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3))


def late_rank(wire_dtype: str | None = None) -> None:
    """Rank `LATE` sleeps in each backward but the first; what all have is the average of the others' gradients."""
    with world(seconds=60) as (rank, size):
        narrow = None if wire_dtype is None else getattr(torch, wire_dtype)
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01, wire_dtype=narrow)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called, ended = [], []
        for step in range(STEPS):
            if rank == LATE and step > 0:
                time.sleep(0.8)
            called.append(time.monotonic())
            torch.manual_seed(100 * step + rank)
            loss = model(torch.randn(8, 40)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            ended.append(time.monotonic())
            optimizer.step()
        for name, parameter in model.named_parameters():
            same_everywhere(parameter, name)
        dropped = herring.stats()["dropped_contributions"]
        assert set(dropped) == {LATE}, dropped
        # One clock for all processes; one such step is enough, on a machine that is busy in the others.
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, (called, ended))
        late_calls = everybody[LATE][0]
        ends = zip(*(everybody[each][1] for each in range(size) if each != LATE), strict=True)
        assert any(max(own) < call for own, call in zip(ends, late_calls, strict=True)), "all waited for the late one"
        if narrow is None:
            check_average(model, size)


def check_average(model: torch.nn.Module, size: int) -> None:
    """One more step, in which all but the late rank contribute: the gradient is theirs, divided by their number."""
    dist.barrier()
    rank = dist.get_rank()
    if rank == LATE:
        time.sleep(0.8)
    alone = make_model()
    alone.load_state_dict(model.module.state_dict())
    total = [torch.zeros_like(parameter) for parameter in alone.parameters()]
    for other in (each for each in range(size) if each != LATE):
        torch.manual_seed(7 + other)
        alone.zero_grad()
        alone(torch.randn(8, 40)).square().mean().backward()
        for mine, parameter in zip(total, alone.parameters(), strict=True):
            mine += parameter.grad
    torch.manual_seed(7 + rank)
    model.zero_grad()
    model(torch.randn(8, 40)).square().mean().backward()
    for wanted, parameter in zip(total, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted / (size - 1))
        same_everywhere(parameter.grad, "a gradient")


def nobody_is_late() -> None:
    """With a long grace all are in, and training is what it is without backup workers."""
    with world(seconds=60) as (rank, _size):
        model = DistributedDataParallel(make_model(), bucket_cap_mb=0.01)
        torch.manual_seed(rank)
        model(torch.randn(8, 40)).square().mean().backward()
        gathered: list[torch.Tensor | None] = []
        for other in range(dist.get_world_size()):
            torch.manual_seed(other)
            alone = make_model()
            torch.manual_seed(other)
            alone(torch.randn(8, 40)).square().mean().backward()
            gathered.append(next(alone.parameters()).grad)
        wanted = torch.stack([each for each in gathered if each is not None]).mean(0)
        torch.testing.assert_close(next(model.parameters()).grad, wanted)
        assert herring.stats()["dropped_contributions"] == {}


def late_rank_bfloat16() -> None:
    late_rank("bfloat16")
