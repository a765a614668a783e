"""What the examples share: joining the job, the training loop with its progress line, and the report at the end."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def join(backend: str) -> tuple[int, int]:
    """Rank and number of processes."""
    if backend == "none":
        return 0, 1
    if backend == "herring":
        import herring.torch  # noqa: F401  (line 1 of the difference to stock DDP)
    dist.init_process_group(backend)  # line 2: "herring" instead of "gloo"
    return dist.get_rank(), dist.get_world_size()


def wrap(model: nn.Module, backend: str) -> nn.Module:
    if backend == "none":
        return model
    if backend == "herring":
        from herring.torch.parallel import DistributedDataParallel  # line 3
    else:
        from torch.nn.parallel import DistributedDataParallel
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


class ProgressLine:
    """One line that is rewritten on a terminal, a line every tenth elsewhere."""

    def __init__(self, title: str, total: int, show: bool) -> None:
        self._title, self._total, self._show = title, total, show
        self._tty = sys.stdout.isatty()
        self._start = time.monotonic()

    def update(self, done: int, loss: float) -> None:
        if not self._show or (not self._tty and done % max(1, self._total // 10) != 0 and done != self._total):
            return
        filled = 24 * done // self._total
        left = (time.monotonic() - self._start) / done * (self._total - done)
        bar = "#" * filled + "." * (24 - filled)
        text = f"{self._title:<28} [{bar}] {done}/{self._total}  loss {loss:.4f}  {left:3.0f} s left"
        print(f"\r{text}" if self._tty else text, end="\n" if not self._tty or done == self._total else "", flush=True)


def train(
    title: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of_batch: Callable[[int], torch.Tensor],
    steps: int,
    rank: int,
) -> tuple[list[float], list[float]]:
    """Losses of this rank's batches and seconds per step."""
    model.train()
    line = ProgressLine(title, steps, show=rank == 0)
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of_batch(step)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        line.update(step + 1, losses[-1])
    return losses, seconds


def report(
    args: argparse.Namespace, rank: int, world: int, model: nn.Module, seconds: list[float], **values: float
) -> None:
    """Prints and writes what the run came to; every rank calls it."""
    servers: list[dict[str, Any]] = []
    if args.backend == "herring":
        import herring

        servers = [dict(row) for row in herring.server_counters()]
    if rank == 0:
        steady = seconds[min(3, len(seconds) - 1) :]
        result = {
            "backend": args.backend,
            "processes": world,
            "steps": args.steps,
            "parameters": sum(p.numel() for p in model.parameters()),
            "step_ms": 1e3 * statistics.median(steady),
            "checksum": float(sum(p.detach().double().abs().sum() for p in model.parameters())),
            "servers": servers,
            **values,
        }
        print("  ".join(f"{name} {value:.4f}" for name, value in values.items()) + f"  step {result['step_ms']:.1f} ms")
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    if world > 1:
        dist.destroy_process_group()


def set_threads(world: int) -> None:
    """One process uses the machine's cores; several share them."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
