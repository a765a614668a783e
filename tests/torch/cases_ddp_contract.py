"""What each rank does in test_torch_ddp_contract.py: DDP's arguments, hooks and behaviour, each against one process."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
from cases_ddp import STEPS, _batch, _compare, _model, _single, _train
from common import expect_error, same_everywhere, world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer, as_functional_optim
from torch.nn.parallel.distributed import _MixedPrecision

from herring.torch.parallel import DistributedDataParallel, WireDtype, wire_dtype_hook

warnings.filterwarnings("ignore", category=FutureWarning)


def arguments() -> None:
    """Every constructor argument, trained and compared with one process on the joined batch."""
    with world() as (rank, size):
        group = dist.new_group()
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
        variants: dict[str, dict[str, Any]] = {
            "init_sync": {"init_sync": False},
            "process_group": {"process_group": group},
            "device_mesh": {"device_mesh": mesh},
            "check_reduction": {"check_reduction": True},
            "skip_all_reduce_unused_params": {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
            "bucket_cap_mb_list": {"bucket_cap_mb_list": [1, 2]},
            "batched_grad_copy": {"batched_grad_copy": True},
            "forward_sync_buffers": {"forward_sync_buffers": True},
            "static graph, views": {"static_graph": True, "gradient_as_bucket_view": True},
        }
        for what, chosen in variants.items():
            model = DistributedDataParallel(_model(), **chosen)
            _train(model, rank)
            _compare(model, _single(size), what)
        plain = _model()
        with expect_error((ValueError, AssertionError)):
            DistributedDataParallel(plain, device_ids=[0, 1])
        with expect_error(RuntimeError, "not needed when a module"):
            DistributedDataParallel(nn.ReLU())
        model = DistributedDataParallel(_model())
        model._set_static_graph()
        _train(model, rank)
        _compare(model, _single(size), "_set_static_graph")
        assert model._get_ddp_logging_data()["world_size"] == size
        _bucket_sizes()
        _delayed(rank, size)
        _ignored(rank)
        _buffers(rank)


def _bucket_sizes() -> None:
    """Ours where nothing is said, by name or by position; else what is said."""
    by_position = (None, None, 0, True, True, None, 7)
    for arguments, options, size in (
        ((), {}, 5), ((), {"bucket_cap_mb": None}, 5), ((), {"bucket_cap_mb": 25}, 25), ((), {"bucket_cap_mb": 1}, 1),
        (by_position, {}, 7), ((*by_position[:-1], None), {}, 5), ((), {"bucket_cap_mb_list": [1, 2]}, 2),
    ):  # fmt: skip
        model = DistributedDataParallel(_model(), *arguments, **options)
        assert model.bucket_bytes_cap == size << 20, (arguments, options, model.bucket_bytes_cap)


def _delayed(rank: int, size: int) -> None:
    """Parameters whose reduction waits for the end of backward."""
    plain = _model()
    names = ("last.weight", "last.bias")
    late = [(name, parameter) for name, parameter in plain.named_parameters() if name in names]
    hooked = plain.first.weight
    model = DistributedDataParallel(plain, delay_all_reduce_named_params=late, param_to_hook_all_reduce=hooked)
    _train(model, rank)
    for parameter, other in ((p, dict(_single(size).named_parameters())[n]) for n, p in late):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-5)


def _ignored(rank: int) -> None:
    plain = _model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["branch.weight", "branch.bias"])
    model = DistributedDataParallel(plain)
    _train(model, rank, steps=2)
    same_everywhere(model.module.last.weight, "a reduced parameter beside ignored ones")
    gathered = [torch.empty_like(plain.branch.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, plain.branch.weight.detach())
    assert not torch.equal(gathered[0], gathered[1]), "an ignored parameter was reduced"


def _buffers(rank: int) -> None:
    for sync in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = DistributedDataParallel(_model(), broadcast_buffers=sync)
        model.module.seen.fill_(float(rank))
        model(_batch(0, rank)[0])
        assert model.module.seen.item() == (0.0 if sync else rank), f"broadcast_buffers={sync}"


def hooks() -> None:
    """The stock hooks that cases_ddp.hooks does not use."""
    with world() as (rank, size):
        wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
        bf16 = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
        for what, hook, state, tolerance in (
            ("fp16 wrapper", wrapped, None, 5e-3),
            ("bf16 wrapper", bf16, None, 5e-2),
            ("no-op", debugging_hooks.noop_hook, None, None),
        ):
            model = DistributedDataParallel(_model())
            model.register_comm_hook(state, hook)
            _train(model, rank)
            if tolerance is not None:
                _compare(model, _single(size), what, tolerance)
        _local_sgd(rank)
        _optimizer_hooks(rank, size)


def _local_sgd(rank: int) -> None:
    everyone, me = dist.group.WORLD, dist.new_subgroups(group_size=1)[0]
    state = post_localSGD_hook.PostLocalSGDState(everyone, me, start_localSGD_iter=2)
    model = DistributedDataParallel(_model())
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    _train(model, rank, steps=2)
    same_everywhere(model.module.last.weight, "before post_localSGD goes local")
    _train(model, rank, steps=2)


def _optimizer_hooks(rank: int, size: int) -> None:
    """The optimizer runs inside backward, whole and sharded (ZeRO)."""
    single = _single(size)
    model = DistributedDataParallel(_model())
    functional_sgd = as_functional_optim(torch.optim.SGD, lr=0.05, momentum=0.9)
    state = optimizer_overlap_hooks._OptimizerHookState(functional_sgd, None)
    model.register_comm_hook(None, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))
    for step in range(STEPS):
        x, y = _batch(step, rank)
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
    _compare(model, single, "optimizer in the hook", 1e-4)
    model = DistributedDataParallel(_model(), static_graph=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    zero = ZeroRedundancyOptimizer(trained, torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    hook = ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, zero)
    model.register_comm_hook(None, hook)
    for step in range(STEPS + 2):  # The first two only warm up: buckets are rebuilt.
        x, y = _batch(step, rank)
        nn.functional.mse_loss(model(x), y).backward()
        zero.step()
    for name, parameter in model.named_parameters():
        same_everywhere(parameter, f"ZeRO hook, {name}")


def behaviour() -> None:
    """Mixed precision, SyncBatchNorm, join of several things, accumulation, errors, torch.compile, pickling."""
    with world() as (rank, size):
        _mixed_precision(rank, size)
        _sync_batch_norm(rank, size)
        _joins(rank)
        with expect_error(RuntimeError, "finished reduction in the prior iteration"):
            model = DistributedDataParallel(_model())
            for _ in range(2):
                model(_batch(0, rank)[0], use_branch=False).sum().backward()
        compiled = torch.compile(DistributedDataParallel(_model()), backend="aot_eager")
        _train(compiled, rank)
        _compare(compiled.module, _single(size), "torch.compile")
        with expect_error(RuntimeError, "register_comm_hook"):
            model = DistributedDataParallel(_model())
            for _ in range(2):
                model.register_comm_hook(None, default_hooks.allreduce_hook)


def _mixed_precision(rank: int, size: int) -> None:
    """The argument reaches torch, whose implementation needs a device with events; autocast needs none."""
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with expect_error(RuntimeError, "events"):
        _train(DistributedDataParallel(_model(), mixed_precision=half), rank)
    with torch.autocast("cpu", torch.bfloat16):
        model = DistributedDataParallel(_model())
        _train(model, rank)
    _compare(model, _single(size), "autocast", 0.1)
    narrow = DistributedDataParallel(_model().to(torch.bfloat16))
    x, y = (each.to(torch.bfloat16) for each in _batch(0, rank))
    nn.functional.mse_loss(narrow(x), y).backward()
    same_everywhere(narrow.module.last.weight.grad, "bfloat16 parameters")


def _sync_batch_norm(rank: int, size: int) -> None:
    """torch's SyncBatchNorm takes accelerators only: on CPU tensors it says so on gloo, and here."""
    torch.manual_seed(3)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8)))
    with expect_error((ValueError, RuntimeError), "SyncBatchNorm"):
        DistributedDataParallel(model)(_batch(0, rank)[0])


def _joins(rank: int) -> None:
    """Two models and a ZeRO optimizer under one Join; and an error on all ranks where that was asked for."""
    models = [DistributedDataParallel(_model()), DistributedDataParallel(copy.deepcopy(_model()))]
    zero = ZeroRedundancyOptimizer(models[0].parameters(), torch.optim.SGD, lr=0.05)
    with Join([*models, zero]):
        for step in range(2 + rank):
            x, y = _batch(step, rank)
            for model in models:  # In the order of Join's list, as a rank that is out of inputs answers in that.
                nn.functional.mse_loss(model(x), y).backward()
            zero.step()
    same_everywhere(models[0].module.last.weight, "two models and ZeRO under Join")
    model = DistributedDataParallel(_model())
    with expect_error(RuntimeError, "exhausted"), model.join(throw_on_early_termination=True):
        for step in range(2 + rank):
            model(_batch(step, rank)[0]).sum().backward()


def compression() -> None:
    """wire_dtype: close to float32, the same bits everywhere, and nearer than a ring that rounds at every hop."""
    with world() as (rank, size):
        for dtype in (torch.bfloat16, torch.float16):
            gradients = [torch.randn(20_000, generator=torch.Generator().manual_seed(r)) for r in range(size)]
            model = DistributedDataParallel(_Weights(), wire_dtype=dtype)
            for _ in range(3):  # Buckets are rebuilt after the first step.
                model.zero_grad()
                (model(gradients[rank])).backward()
            same_everywhere(model.module.weight.grad, f"wire_dtype={dtype}")
            exact = torch.stack(gradients).double().mean(0)
            ours = (model.module.weight.grad.double() - exact).square().mean().sqrt()
            theirs = (_ring(gradients, dtype).double() - exact).square().mean().sqrt()
            rounded = (exact.to(dtype).double() - exact).square().mean().sqrt()
            if rank == 0:
                print(f"{dtype}: rms error {ours:.2e} here, {theirs:.2e} in a ring, {rounded:.2e} of rounding alone")
            assert ours < 0.9 * theirs, (dtype, ours, theirs)
        for arguments in ({"wire_dtype": torch.bfloat16}, {"wire_dtype": torch.float16, "bucket_cap_mb": 0.01}):
            model = DistributedDataParallel(_model(), **arguments)
            _train(model, rank)
            _compare(model, _single(size), str(arguments), 5e-2)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        with expect_error(RuntimeError, "register_comm_hook"):  # The pickle brought its hook.
            again.register_comm_hook(WireDtype(torch.float16), wire_dtype_hook)
        with expect_error(ValueError, "torch.int8"):
            DistributedDataParallel(_model(), wire_dtype=torch.int8)
        with expect_error(ValueError, "gloo"):
            WireDtype(torch.bfloat16, dist.new_group(backend="gloo"))


class _Weights(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def _ring(gradients: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The average that a ring computes which adds and rounds in `dtype` at each hop; chunk k starts at rank k."""
    size = len(gradients)
    parts = []
    for k, chunk in enumerate(torch.arange(gradients[0].numel()).tensor_split(size)):
        total = gradients[k][chunk].to(dtype)
        for hop in range(1, size):
            total = total + gradients[(k + hop) % size][chunk].to(dtype)
        parts.append(total / size)
    return torch.cat(parts)
