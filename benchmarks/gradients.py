"""Measures the gradients of a model reduced by name (Horovod's API) against DistributedDataParallel on the same ones.

    herringrun -np 2 python benchmarks/gradients.py
    sudo env PATH="$PATH" benchmarks/emulate_cluster.py --workers 2 --servers 2 --rate 500mbit -- \\
        python benchmarks/gradients.py

The model has the parameters of ResNet-50 (or another one), and computes nothing: backward writes one number into each
gradient, the last layer's first. So a step is the communication and what stands between it and autograd. Prints the
median milliseconds of a step of the slowest rank. The ways take turns, and every step is checked.

* backward: without communication
* ddp: Herring's DistributedDataParallel; gloo: torch's on gloo
* ddp zero: the same as ddp, but each step begins with zero_grad(set_to_none=False): backward adds, as with memory
* optimizer: hvd.DistributedOptimizer, whose hooks start each gradient's reduction
* by name: after backward, hvd.allreduce_async_ of each gradient in the order in which they came; any order: in another
  order on each rank
* memory: by name after backward; the gradients live in memory of hvd.empty_like(), and each step begins with
  zero_grad(set_to_none=False)
* hooks: each gradient is copied into such memory, as DDP copies it into a bucket, and its reduction by name started, as
  soon as backward has it; after: copied in the same way, and reduced by name after backward

Where much memory is freed and allocated in each step, glibc gives it back to the system and gets it again: then compare
with MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ set to more than that, and see the column of page faults.
"""

from __future__ import annotations

import argparse
import functools
import random
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from herring.bench._models import MODELS

WAYS = ("backward", "ddp", "ddp zero", "gloo", "optimizer", "by name", "any order", "memory", "hooks", "after")
# Backward adds to what is there; and each gradient is copied to where it stays.
ADDS = ("ddp zero", "memory")
COPIES = ("hooks", "after")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=list(MODELS), help="whose gradients (default resnet50)")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated, in this order (default: all)")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="timed steps of each way (default 11)")
    parser.add_argument(
        "--bucket-mb", type=float, metavar="MB", help="both DDPs' bucket_cap_mb (default: each one's own)"
    )
    parser.add_argument("--sgd", action="store_true", help="a step of SGD belongs to each step")
    options = parser.parse_args()
    if unknown := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))}: some of {', '.join(WAYS)}")
    return options


if __name__ == "__main__":
    options = parse()  # Here, so that --help works without torch.

import torch
import torch.distributed as dist
from torch import nn

import herring.horovod.torch as hvd
from herring.torch.parallel import DistributedDataParallel as HerringDDP


class Layer(torch.autograd.Function):
    """Passes its input on; backward gives each parameter a gradient of one number."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, first: int, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.first, ctx.shapes = first, [each.shape for each in parameters]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        numbers = range(ctx.first, ctx.first + len(ctx.shapes))
        made = [torch.full(shape, number_of(each)) for each, shape in zip(numbers, ctx.shapes, strict=True)]
        return (gradient, None, *made)


def number_of(index: int) -> float:
    return float(dist.get_rank() + index % 7)


class Gradients(nn.Module):
    def __init__(self, values: list[list[torch.Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList(nn.Parameter(each) for each in layer) for layer in values)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        index = 0
        for layer in self.layers:
            value = Layer.apply(value, index, *layer)
            index += len(layer)
        return value


class Side:
    """A model of its own, with the values of all others, and its step."""

    def __init__(self, way: str, values: list[list[torch.Tensor]], options: argparse.Namespace) -> None:
        self.way, self.times, self.faults = way, list[float](), list[int]()
        self.plain = Gradients(values)
        self.parameters = list(self.plain.parameters())
        self.model: nn.Module = self.plain
        self.input = torch.zeros(1, requires_grad=True)
        cap = options.bucket_mb
        if way in ("ddp", "ddp zero"):
            self.model = HerringDDP(self.plain, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        elif way == "gloo":
            self.model = nn.parallel.DistributedDataParallel(
                self.plain,
                process_group=dist.new_group(backend="gloo"),
                bucket_cap_mb=cap,
                gradient_as_bucket_view=True,
            )
        self.sgd: Any = torch.optim.SGD(self.plain.parameters(), lr=0.0)
        if way == "optimizer":
            self.sgd = hvd.DistributedOptimizer(self.sgd, self.plain.named_parameters())
        self.handles: list[int] = []
        self.memory: list[torch.Tensor] = []
        if way == "memory" or way in COPIES:
            named = ((f"{way}.{i}", each) for i, each in enumerate(self.parameters))
            self.memory = list(hvd.empty_like(named).values())
            for index, parameter in enumerate(self.parameters):
                if way == "memory":
                    parameter.grad = self.memory[index]
                else:
                    parameter.register_post_accumulate_grad_hook(functools.partial(self._copy, index))
        self.order = list(reversed(range(len(self.parameters))))
        if way == "any order":
            random.Random(dist.get_rank()).shuffle(self.order)

    def step(self, *, steps: bool) -> None:
        if self.way in ADDS:
            self.sgd.zero_grad(set_to_none=False)
        self.model(self.input).sum().backward()
        if self.way == "optimizer" and not steps:
            self.sgd.synchronize()
        elif self.way in ("by name", "any order", "memory", "after"):
            for index in self.order:
                self._start(index)
        for handle in self.handles:
            hvd.synchronize(handle)
        self.handles.clear()
        if steps:
            self.sgd.step()

    def _copy(self, index: int, parameter: torch.Tensor) -> None:
        parameter.grad = self.memory[index].copy_(parameter.grad)
        if self.way == "hooks":
            self._start(index)

    def _start(self, index: int) -> None:
        self.handles.append(hvd.allreduce_async_(self.parameters[index].grad, name=f"{self.way}.{index}"))

    def check(self) -> None:
        """And the gradients go, where they are not a bucket's."""
        others = 0.0 if self.way == "backward" else (dist.get_world_size() - 1) / 2 - dist.get_rank()
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            assert gradient is not None
            ends = gradient.view(-1)[:: max(1, gradient.numel() - 1)]
            if not bool((ends == number_of(index) + others).all()):
                raise SystemExit(f"{self.way}, rank {dist.get_rank()}: gradient {index} is wrong: {ends.tolist()}")
        if self.way not in ADDS:
            self.sgd.zero_grad()


def timed(step: Callable[[], None]) -> tuple[float, int]:
    """Seconds of the slowest rank, and page faults of this one."""
    dist.barrier()
    faults, begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    step()
    seconds = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), faults


def main(options: argparse.Namespace) -> None:
    ways = options.ways.split(",")
    torch.set_num_threads(1)
    dist.init_process_group("herring")
    hvd.init()
    layers = [layer for layer in MODELS[options.model]().layers if layer.shapes and not layer.is_frozen]
    values = [[torch.zeros(shape) for shape in layer.shapes] for layer in layers]
    sides = [Side(way, values, options) for way in ways]
    for number in range(options.rounds + 2):
        for side in sides:
            took, faults = timed(lambda side=side: side.step(steps=options.sgd))
            if number > 1:  # The first ones build buckets and learn names.
                side.times.append(took * 1e3)
                side.faults.append(faults)
            side.check()
    if dist.get_rank() == 0:
        count = sum(map(len, values))
        size = sum(each.numel() for layer in values for each in layer) * 4 / 1e6
        print(f"{options.model}: {count} gradients, {size:.0f} MB, {dist.get_world_size()} ranks, milliseconds")
        for side in sides:
            least, most = min(side.times), max(side.times)
            middle, faults = statistics.median(side.times), statistics.median(side.faults)
            print(f"  {side.way:<10}{middle:>9.2f}  ({least:.2f} to {most:.2f})  page faults {faults:.0f}")
    hvd.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(options)
