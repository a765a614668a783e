"""Training steps of two ranks on one GPU: DDP on herring and on gloo, Horovod's optimizer on herring.

Medians; a line of JSON each. The ranks share the GPU, so only the ratios count. `--model resnet50` needs torchvision.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import ranks
import torch
import torch.distributed as dist

WARM_UP = 4
STEPS = 12


def make_model(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == "resnet50":
        import torchvision

        return torchvision.models.resnet50().cuda(), torch.randn(16, 3, 224, 224, device="cuda")
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers).cuda(), torch.randn(64, 1024, device="cuda")


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def ddp(rank: int) -> None:
    name = os.environ["GPU_TEST_MODEL"]
    model, batch = make_model(name)
    bare = torch.optim.SGD(model.parameters(), lr=1e-4)
    alone = ranks.median_ms(lambda: train(model, bare, batch), dist.barrier, STEPS, WARM_UP)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
    together = ranks.median_ms(lambda: train(wrapped, optimizer, batch), dist.barrier, STEPS, WARM_UP)
    backend = os.environ["GPU_TEST_BACKEND"]
    where = f", sums on the {os.environ.get('HERRING_ON_HOST', 'host')}" if backend == "herring" else ""
    report(rank, f"DDP on {backend}{where}", name, alone, together)


def horovod(rank: int) -> None:
    import herring.horovod.torch as hvd

    hvd.init()
    name = os.environ["GPU_TEST_MODEL"]
    model, batch = make_model(name)
    bare = torch.optim.SGD(model.parameters(), lr=1e-4)
    alone = ranks.median_ms(lambda: train(model, bare, batch), hvd.barrier, STEPS, WARM_UP)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-4), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    together = ranks.median_ms(lambda: train(model, optimizer, batch), hvd.barrier, STEPS, WARM_UP)
    report(rank, "Horovod's optimizer on herring", name, alone, together)


def report(rank: int, what: str, model: str, alone: float, together: float) -> None:
    if rank == 0:
        row = {"what": what, "model": model, "without_averaging_ms": round(alone, 2), "step_ms": round(together, 2)}
        print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("linear", "resnet50"), default="linear")
    arguments = parser.parse_args()
    worst = 0
    # By turns: what the machine does meanwhile meets both.
    turn = (("herring", "host"), ("herring", "device"), ("gloo", "host"))
    for backend, on_host in (*turn, ("horovod", "host"), *turn):
        env = {**os.environ, "GPU_TEST_BACKEND": backend, "GPU_TEST_MODEL": arguments.model, "HERRING_ON_HOST": on_host}
        worst = max(worst, subprocess.run([sys.executable, __file__], env=env, check=False).returncode)
    return worst


if __name__ == "__main__":
    chosen = os.environ.get("GPU_TEST_BACKEND")
    if chosen is None:
        sys.exit(main())
    elif chosen == "horovod":
        ranks.run(horovod, backend=None)
    else:
        ranks.run(ddp)
