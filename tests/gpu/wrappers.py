"""What torch builds on process groups, on a GPU: two ranks on one GPU learn what one process learns from both batches.

Each case is a job of its own. The ranks' parameters must have the same bits, and be close to those of one process.
`GPU_TEST_DEVICE=cpu` runs those cases that a CPU can.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as checkpointed

import herring.torch.parallel

DEVICE = os.environ.get("GPU_TEST_DEVICE", "cuda")
WIDTH, ROWS, STEPS = 256, 32, 5
CASES: dict[str, Callable[[int], None]] = {}
warnings.filterwarnings("ignore", category=FutureWarning)


def case(body: Callable[[int], None]) -> Callable[[int], None]:
    CASES[body.__name__] = body
    return body


def make_model(*, norm: bool = False) -> nn.Sequential:
    """2.6 MB of parameters: the middle layers' gradients are large enough for shared memory, biases are not."""
    torch.manual_seed(7)
    middle = nn.BatchNorm1d(4 * WIDTH) if norm else nn.Tanh()
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), middle, nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    ).to(DEVICE)


def batch(step: int, of: Iterable[int]) -> torch.Tensor:
    parts = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in of]
    return torch.cat(parts).to(DEVICE)


def learn(model: nn.Module, optimizer: Any, of: Iterable[int], steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step, of)).square().mean().backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def learned_alone(**options: bool) -> nn.Sequential:
    model = make_model(**options)
    learn(model, adam(model), (0, 1))
    return model


def full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def same_on_both(model: nn.Module) -> None:
    for parameter in model.parameters():
        mine = full(parameter)
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert both[0].equal(both[1]), "the ranks have drifted apart"


def compare(mine: nn.Module, alone: nn.Module, limit: float = 2e-4) -> None:
    for one, other in zip(mine.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(one).to(other.device), other.detach(), rtol=limit, atol=limit)
    same_on_both(mine)


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, device_ids=[0] if DEVICE == "cuda" else None, **options)


def herrings(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Herring's own class."""
    device_ids = [0] if DEVICE == "cuda" else None
    return herring.torch.parallel.DistributedDataParallel(model, device_ids=device_ids, **options)


@case
def ddp_arguments(rank: int) -> None:
    alone = learned_alone()
    for options in (
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ):
        model = wrap(make_model(), **options)
        learn(model, adam(model), (rank,))
        compare(model.module, alone)


@case
def herrings_ddp(rank: int) -> None:
    """Its own class, also with half the bytes on the wire."""
    alone = learned_alone()
    for options, limit in (({}, 2e-4), ({"wire_dtype": torch.bfloat16}, 5e-3)):
        model = herrings(make_model(), **options)
        learn(model, adam(model), (rank,))
        compare(model.module, alone, limit)


@case
def ddp_hooks(rank: int) -> None:
    alone = learned_alone()
    power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=32, start_powerSGD_iter=2)
    for hook, state, limit in (
        (default_hooks.allreduce_hook, None, 2e-4),
        (default_hooks.fp16_compress_hook, None, 5e-3),
        (default_hooks.bf16_compress_hook, None, 5e-3),  # torch refuses it on CPUs.
        (powerSGD_hook.powerSGD_hook, power, 2e-2),
    ):
        if DEVICE == "cpu" and hook is default_hooks.bf16_compress_hook:
            continue
        model = herrings(make_model(), bucket_cap_mb=1) if state is power else wrap(make_model())
        model.register_comm_hook(state, hook)
        learn(model, adam(model), (rank,))
        compare(model.module, alone, limit)


@case
def ddp_accumulates(rank: int) -> None:
    """no_sync(), a checkpointed layer, gradients clipped after backward."""

    def steps(model: nn.Module, of: Iterable[int], quiet: Callable[[], Any]) -> None:
        optimizer = adam(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            with quiet():
                model(batch(2 * step, of)).square().mean().backward()
            model(batch(2 * step + 1, of)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[3:](checkpointed(self.layers[:3], x, use_reentrant=False))

    alone = Checkpointed()
    steps(alone, (0, 1), contextlib.nullcontext)
    model = wrap(Checkpointed())
    steps(model, (rank,), model.no_sync)
    compare(model.module, alone)


@case
def ddp_uneven_inputs(rank: int) -> None:
    """Join: a rank has fewer batches than the other."""
    model = wrap(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Join([model]):
        for step in range(3 + 4 * rank):
            optimizer.zero_grad()
            model(batch(step, (rank,))).square().mean().backward()
            optimizer.step()
    same_on_both(model.module)


@case
def ddp_compiled(rank: int) -> None:
    backend = "inductor" if DEVICE == "cuda" and shutil.which("gcc") else "aot_eager"
    model = torch.compile(wrap(make_model()), backend=backend)
    learn(model, adam(model), (rank,))
    compare(model._orig_mod.module, learned_alone())
    print(f"compiled by {backend}")


@case
def scaled_half_precision(rank: int) -> None:
    """autocast and GradScaler: an overflow on one rank makes both skip the step."""
    kind = torch.float16 if DEVICE == "cuda" else torch.bfloat16
    model = wrap(make_model())
    optimizer = adam(model)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.autocast(DEVICE, dtype=kind):
            loss = model(batch(step, (rank,))).square().mean()
        if step == 2 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(one.equal(other) for one, other in zip(before, model.parameters(), strict=True))
        assert same == (step == 2), f"step {step}: parameters {'stayed' if same else 'changed'}"
    assert scaler.get_scale() == 128.0, scaler.get_scale()
    same_on_both(model.module)


@case
def synchronized_batch_norm(rank: int) -> None:
    """torch's, and Horovod's names for it: statistics over both ranks' rows."""
    if DEVICE == "cpu":
        return  # torch's takes tensors on accelerators only.
    alone = learned_alone(norm=True)
    model = wrap(nn.SyncBatchNorm.convert_sync_batchnorm(make_model(norm=True)))
    learn(model, adam(model), (rank,))
    compare(model.module, alone, 1e-3)
    for mine, other in zip(model.module.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


@case
def fully_sharded(rank: int) -> None:
    """FSDP 2: float32, bfloat16, parameters kept on the host."""
    alone = learned_alone()
    mesh = init_device_mesh(DEVICE, (2,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options, limit in (({}, 2e-4), ({"mp_policy": mixed}, 2e-2), ({"offload_policy": CPUOffloadPolicy()}, 2e-4)):
        if DEVICE == "cpu" and "offload_policy" in options:
            continue
        model = make_model()
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        learn(model, adam(model), (rank,))
        if "offload_policy" not in options:
            compare(model, alone, limit)
            continue
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            here = mine.to_local().to(DEVICE)
            theirs = distribute_tensor(other.detach(), mesh, [Shard(0)]).to_local()
            torch.testing.assert_close(here, theirs, rtol=limit, atol=limit)


@case
def fully_sharded_1(rank: int) -> None:
    """FSDP 1, as many scripts still have it."""
    if DEVICE == "cpu":
        return
    alone = learned_alone()
    model = FullyShardedDataParallel(make_model(), device_id=0, use_orig_params=True)
    learn(model, adam(model), (rank,))
    with FullyShardedDataParallel.summon_full_params(model):
        compare(model.module, alone)


@case
def zero_optimizer(rank: int) -> None:
    model = wrap(make_model())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    learn(model, zero, (rank,))
    compare(model.module, learned_alone())
    zero.consolidate_state_dict(to=0)


@case
def tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh(DEVICE, (2,))
    big = torch.randn(64, 48, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for placement in ([Shard(0)], [Shard(1)], [Replicate()]):
        sharded = distribute_tensor(big, mesh, placement)
        torch.testing.assert_close(sharded.redistribute(placements=[Replicate()]).to_local(), big)
        torch.testing.assert_close((sharded @ sharded.t()).full_tensor(), big @ big.t())
    alone = make_model()
    split = parallelize_module(copy.deepcopy(alone), mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    # What is between them acts on each element alone, so that split columns may pass it.
    x = batch(0, (0,))
    torch.testing.assert_close(split(x), alone(x), rtol=1e-4, atol=1e-4)
    split(x).sum().backward()
    alone(x).sum().backward()
    torch.testing.assert_close(split[0].weight.grad.full_tensor(), alone[0].weight.grad, rtol=1e-3, atol=1e-3)


@case
def checkpoints(rank: int) -> None:
    """Saved by two ranks, loaded by two ranks into another model."""
    mesh = init_device_mesh(DEVICE, (2,))
    model, other = make_model(), make_model()
    fully_shard(model, mesh=mesh)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    try:
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        fully_shard(other, mesh=mesh)
        state = {"model": other.state_dict()}
        checkpoint.load(state, checkpoint_id=folder[0])
        other.load_state_dict(state["model"])
        compare(other, make_model(), 0.0)
    finally:
        dist.barrier()
        if rank == 0 and folder[0]:
            shutil.rmtree(folder[0])


@case
def pipelines(rank: int) -> None:
    x, y, loss = batch(1, (0,)), batch(2, (0,)), nn.functional.mse_loss
    for schedule_type in (ScheduleGPipe, Schedule1F1B):
        whole = make_model()
        pieces = nn.Sequential(whole[:3], whole[3:])
        sum(loss(pieces(a), b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)).div(4).backward()
        again = make_model()
        mine = (again[:3], again[3:])[rank]
        stage = PipelineStage(mine, rank, 2, torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))
        schedule = schedule_type(stage, n_microbatches=4, loss_fn=loss)
        if rank == 0:
            schedule.step(x)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=y, losses=losses)
            torch.testing.assert_close(torch.stack(losses).mean(), loss(whole(x), y))
        for ours, theirs in zip(mine.parameters(), pieces[rank].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@case
def objects_and_experts(rank: int) -> None:
    """Object collectives, the rows of a mixture of experts (uneven all_to_all), collectives that return tensors."""
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"rank": rank, "tensor": torch.full((3,), rank, device=DEVICE)})
    assert [each["rank"] for each in gathered] == [0, 1]
    assert gathered[1]["tensor"].tolist() == [1, 1, 1]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, ["zero", "one"] if rank == 0 else [None, None], 0)
    assert scattered == [("zero", "one")[rank]]
    rows = torch.arange(5.0, device=DEVICE).unsqueeze(1).repeat(1, 4096) + 10 * rank
    to = ([2, 3], [4, 1])
    coming = [to[0][rank], to[1][rank]]
    experts = torch.empty(sum(coming), 4096, device=DEVICE)
    dist.all_to_all_single(experts, rows, coming, to[rank])
    want = {0: [0, 1, 10, 11, 12, 13], 1: [2, 3, 4, 14]}[rank]
    assert experts[:, 0].tolist() == [float(each) for each in want], experts[:, 0].tolist()
    x = torch.arange(4.0, device=DEVICE) + rank
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    parts = functional.all_gather_tensor(x + total, 0, dist.group.WORLD)
    got = functional.reduce_scatter_tensor(parts, "avg", 0, dist.group.WORLD)
    torch.testing.assert_close(got.to("cpu"), torch.arange(4.0) + rank + 2 * torch.arange(4.0) + 1)
    with dist._coalescing_manager(device=torch.device(DEVICE)):
        many = [torch.full((1000,), float(k + rank), device=DEVICE) for k in range(50)]
        for tensor in many:
            dist.all_reduce(tensor)
    assert [tensor[0].item() for tensor in many] == [2.0 * k + 1 for k in range(50)]


@case
def horovods_names(rank: int) -> None:
    """The optimizer with a scaler, and SyncBatchNorm."""
    import herring.horovod.torch as hvd

    hvd.init()
    alone = learned_alone(norm=True)
    model = make_model(norm=True)
    model[1] = hvd.SyncBatchNorm(4 * WIDTH).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(adam(model), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, (rank,))).square().mean()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-3, atol=1e-3)
        both = hvd.allgather(mine.detach().reshape(1, -1))
        assert both[0].equal(both[1]), "the ranks have drifted apart"
    hvd.shutdown()


def run_case(name: str, on_host: str) -> tuple[str, int, str, float]:
    env = {**os.environ, "GPU_TEST_CASE": name, "HERRING_ON_HOST": on_host}
    begun = time.monotonic()
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    return f"{name}, sums on the {on_host}", done.returncode, done.stdout + done.stderr, time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument(
        "--on-host", default="host,device", metavar="LIST", help="HERRING_ON_HOST (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="cases at the same time")
    arguments = parser.parse_args()
    wanted = [(name, where) for where in arguments.on_host.split(",") for name in arguments.cases or CASES]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for what, code, said, seconds in pool.map(lambda pair: run_case(*pair), wanted):
            print(f"{what}: {'ok' if code == 0 else f'FAILED (exit {code})'} in {seconds:.0f} s", flush=True)
            if code != 0:
                failed += 1
                print("\n".join(said.splitlines()[-40:]), flush=True)
    print(f"{len(wanted) - failed} of {len(wanted)} cases passed")
    return min(failed, 1)


if __name__ == "__main__":
    chosen = os.environ.get("GPU_TEST_CASE")
    if chosen is None:
        sys.exit(main())
    ranks.run(CASES[chosen], backend=None if chosen == "horovods_names" else "herring", timeout=90)
