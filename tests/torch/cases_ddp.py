"""What each rank does in test_torch_ddp.py."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from common import expect_error, same_everywhere, world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join

import herring
from herring.torch.parallel import DistributedDataParallel, in_order

STEPS = 4
BATCH = 6


class Net(nn.Module):
    """A little of everything: a buffer, a frozen parameter, and a branch that may be left out."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(10, width)
        self.middle = nn.Linear(width, width)
        self.branch = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros(1))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor, use_branch: bool = True) -> torch.Tensor:
        x = torch.relu(self.middle(torch.tanh(self.first(x))))
        if use_branch:
            x = x + self.branch(x)
        return self.last(x) * self.frozen


def _model(width: int = 64) -> Net:
    torch.manual_seed(7)
    return Net(width)


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 10, generator=generator), torch.randn(BATCH, 3, generator=generator)


def _single(size: int, steps: int = STEPS, use_branch: bool = True, width: int = 64) -> Net:
    """The same training in one process, on all ranks' batches joined."""
    model = _model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        batches = [_batch(step, rank) for rank in range(size)]
        x, y = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x, use_branch), y).backward()
        optimizer.step()
    return model


def _train(model: nn.Module, rank: int, steps: int = STEPS, **forward: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = _batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x, **forward), y).backward()
        optimizer.step()


def _compare(model: nn.Module, single: nn.Module, what: str, tolerance: float = 1e-5) -> None:
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    for (name, mine), theirs in zip(plain.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{what}, {n}: {t}"
        )
        same_everywhere(mine, f"{what}, {name}")


def equals_single_process() -> None:
    with world() as (rank, size):
        variants: dict[str, dict[str, Any]] = {
            "plain": {},
            "bucket views": {"gradient_as_bucket_view": True},
            "many buckets": {"bucket_cap_mb": 0.01},
            "static graph": {"static_graph": True},
            "no buffers": {"broadcast_buffers": False},
            "unused arguments": {"find_unused_parameters": True},
        }
        for what, arguments in variants.items():
            model = DistributedDataParallel(_model(), **arguments)
            _train(model, rank)
            _compare(model, _single(size), what)
        model = DistributedDataParallel(_model(), find_unused_parameters=True, gradient_as_bucket_view=True)
        _train(model, rank, use_branch=False)
        _compare(model, _single(size, use_branch=False), "an unused branch")
        assert model.module.branch.weight.grad is None or model.module.branch.weight.grad.abs().sum() == 0


def buckets_are_ours() -> None:
    """With bucket views gradients live in the runtime's memory: every bucket is reduced with no copy on this side."""
    with world() as (rank, _size):
        model = DistributedDataParallel(_model(512), gradient_as_bucket_view=True, broadcast_buffers=False)
        _train(model, rank, steps=3)
        before = herring.stats()
        _train(model, rank, steps=5)
        after = herring.stats()
        in_place, staged = (after[name] - before[name] for name in ("zero_copy_ops", "staged_ops"))
        print(f"in place {in_place}, staged {staged}")
        assert in_place >= 5, "no bucket lies in the runtime's memory"
        assert staged == 0, "a bucket was copied"


def accumulation() -> None:
    """no_sync: gradients of several batches, one reduction."""
    with world() as (rank, size):
        model = DistributedDataParallel(_model())
        single = _model()
        for step in range(3):
            with model.no_sync():
                x, y = _batch(step, rank)
                nn.functional.mse_loss(model(x), y).backward()
        x, y = _batch(3, rank)
        nn.functional.mse_loss(model(x), y).backward()
        for step in range(4):
            for other in range(size):
                x, y = _batch(step, other)
                (nn.functional.mse_loss(single(x), y) / size).backward()
        for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
            if mine.requires_grad:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def hooks() -> None:
    with world() as (rank, size):
        for hook, tolerance in (
            (default_hooks.allreduce_hook, 1e-5),
            (default_hooks.fp16_compress_hook, 5e-3),
            (default_hooks.bf16_compress_hook, 5e-2),
        ):
            model = DistributedDataParallel(_model())
            model.register_comm_hook(None, hook)
            _train(model, rank)
            _compare(model, _single(size), hook.__name__, tolerance)
        # Its callbacks wait for collectives.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model = DistributedDataParallel(_model())
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        _train(model, rank, steps=8)
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all(), f"PowerSGD: {name}"
            same_everywhere(parameter, f"PowerSGD, {name}")
        assert state.compression_stats()[0] > 1, "PowerSGD compressed nothing"


def hooks_with_callbacks() -> None:
    """PowerSGD with several buckets: its callbacks call collectives, and come when they come. torch's own class wants
    to be told (in_order); without that ranks disagree."""
    with world() as (rank, _size):
        calls: list[int] = []

        def watched(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            calls.append(bucket.index())
            return powerSGD_hook.powerSGD_hook(state, bucket)

        for wrapper, hook in (
            (DistributedDataParallel, powerSGD_hook.powerSGD_hook),
            (DistributedDataParallel, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
            (nn.parallel.DistributedDataParallel, in_order(watched)),
        ):
            torch.manual_seed(3)
            layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
            model = wrapper(layers, bucket_cap_mb=0.5)
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            model.register_comm_hook(state, hook)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(25):
                optimizer.zero_grad()
                model(torch.randn(8, 256, generator=generator)).square().mean().backward()
                optimizer.step()
            for name, parameter in layers.named_parameters():
                assert parameter.isfinite().all(), name
                same_everywhere(parameter, f"PowerSGD in several buckets, {name}")
        assert len(set(calls)) > 2, "one bucket proves nothing"
        assert calls[-3:] == sorted(calls[-3:]), calls


def a_hook_that_fails() -> None:
    """In order or not, its error comes out of backward, and the next step works."""
    with world() as (rank, _size):
        fails = True

        def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            def last(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
                if fails and bucket.index() == 1:
                    raise ValueError("the hook's own error")
                return done.value()[0]

            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(last)

        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), bucket_cap_mb=0.25)
        model.register_comm_hook(None, in_order(hook))
        with expect_error((RuntimeError, ValueError), "the hook's own error"):
            for _ in range(2):  # The first makes the buckets.
                model(torch.ones(2, 256)).sum().backward()
        fails = False
        value = torch.ones(1) * rank
        dist.all_reduce(value)
        assert value.item() == 1.0


def uneven_inputs() -> None:
    with world() as (rank, _size):
        model = DistributedDataParallel(_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Join([model]):
            for step in range(3 + 2 * rank):
                x, y = _batch(step, rank)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        for name, parameter in model.named_parameters():
            same_everywhere(parameter, f"after join, {name}")


def state_moves() -> None:
    """state_dict of ours loads into plain DDP and back; pickling works; construction synchronises parameters."""
    with world() as (rank, _size):
        start = _model()
        if rank != 0:
            with torch.no_grad():
                for parameter in start.parameters():
                    parameter.add_(rank)
        ours = DistributedDataParallel(start)
        for name, parameter in ours.named_parameters():
            same_everywhere(parameter, f"after construction, {name}")
        theirs = nn.parallel.DistributedDataParallel(_model())
        theirs.load_state_dict(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())
        assert isinstance(ours, nn.parallel.DistributedDataParallel)
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        _train(again, rank, steps=1)
        two = [DistributedDataParallel(_model()), DistributedDataParallel(copy.deepcopy(_model()))]
        x, y = _batch(0, rank)
        (nn.functional.mse_loss(two[0](x), y) + nn.functional.mse_loss(two[1](x), y)).backward()
        for model in two:
            same_everywhere(model.module.last.weight.grad, "two models in one backward pass")


def without_a_group() -> None:
    """DistributedDataParallel creates the process group; SageMaker's names see it."""
    import herring.torch.distributed as hdist

    assert hdist.is_available()
    assert not hdist.is_initialized()
    model = DistributedDataParallel(_model())
    assert dist.get_backend() == "herring"
    assert hdist.is_initialized()
    rank, size = hdist.get_rank(), hdist.get_world_size()
    assert hdist.get_local_rank() == rank
    _train(model, rank)
    _compare(model, _single(size), "no group before")
    value = torch.full((4,), float(rank))
    hdist.all_reduce(value, op=hdist.ReduceOp.AVERAGE)
    assert value.tolist() == [(size - 1) / 2] * 4
    hdist.barrier()
    dist.destroy_process_group()
    with expect_error(TypeError, "no_such_argument"):
        DistributedDataParallel(_model(), no_such_argument=3)
    dist.destroy_process_group()


def _names_what_is_not_finite(rank: int, size: int) -> None:
    """HERRING_CHECK_FINITE=on: the parameter by its name in the module, on every rank; else training is the same."""
    model = _model()
    ours = DistributedDataParallel(model, bucket_cap_mb=0.001)  # Several buckets.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, y = _batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(ours(x), y).backward()
        optimizer.step()
    for name, value in _single(size).state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-5), name

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        if rank == 1:
            spoiled[2, 5] = float("inf")
        return spoiled

    model.branch.weight.register_hook(spoil)
    x, y = _batch(STEPS, rank)
    text = ""
    try:
        nn.functional.mse_loss(ours(x), y).backward()
    except RuntimeError as error:
        text = str(error)
    assert "the gradient of branch.weight[2, 5] on rank 1" in text, text


def _keeps_the_users_hook(rank: int) -> None:
    """Who registers a hook has it, with HERRING_CHECK_FINITE=on as well."""
    calls = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # Strings, as annotations are here, torch refuses.
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    model = DistributedDataParallel(_model())
    model.register_comm_hook(None, hook)
    x, y = _batch(0, rank)
    nn.functional.mse_loss(model(x), y).backward()
    assert calls


def names_what_is_not_finite() -> None:
    with world() as (rank, size):
        _names_what_is_not_finite(rank, size)


def keeps_the_users_hook() -> None:
    with world() as (rank, _):
        _keeps_the_users_hook(rank)
