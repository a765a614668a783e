"""Measures many tensors reduced by name (Horovod's API) against the same bytes fused by hand. gradients.py has DDP.

    herringrun -np 2 python benchmarks/fusion.py                  # one host
    herringrun -np 2 --servers 2 python benchmarks/fusion.py
    sudo env PATH="$PATH" benchmarks/emulate_cluster.py --workers 2 --servers 2 --rate 500mbit -- \\
        python benchmarks/fusion.py

Prints the median milliseconds of a step, and what each server takes in (bytes). The ways take turns, every step is
checked. Fused by hand means: torch.cat, one allreduce, copies back; memory: by name, in memory of hvd.empty_like().
`calls`: Python's share of hvd.allreduce_async_ on 1 KB, in thousands of calls per second.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", default="1000x4KB,resnet50,4x25MB", help="what to reduce, comma-separated (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each way (default: %(default)s)")
    parser.add_argument("--json", help="rank 0 also writes its figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()  # Here, so that --help works without torch.

import torch

import herring
import herring.horovod.torch as hvd
from herring.bench._models import MODELS

Step = Callable[[], None]


def shapes_of(case: str) -> list[int]:
    """Numbers of elements of float32 tensors: "1000x4KB", or the parameters of a model, last first."""
    count, _, size = case.partition("x")
    if count.isdigit():
        unit = {"KB": 1 << 10, "MB": 1 << 20}[size[-2:]]
        return [int(float(size[:-2]) * unit) // 4] * int(count)
    layers = [layer for layer in MODELS[case]().layers if not layer.is_frozen]
    return [math.prod(shape) for layer in reversed(layers) for shape in reversed(layer.shapes)]


class Case:
    """Gradients of one model, the steps over them, and what a step must give."""

    def __init__(self, sizes: list[int]) -> None:
        self.tensors = [torch.empty(size) for size in sizes]
        self.names = [f"grad.{index}" for index in range(len(sizes))]
        self.placed = hvd.empty_like((f"placed.{index}", each) for index, each in enumerate(self.tensors))
        self.order = list(range(len(sizes)))
        self.shuffled = list(self.order)
        random.Random(hvd.rank()).shuffle(self.shuffled)

    def fill(self) -> None:
        for tensors in (self.tensors, self.placed.values()):
            for index, tensor in enumerate(tensors):
                tensor.fill_(float(hvd.rank() + index % 7))

    def check(self, way: str) -> None:
        mean = (hvd.size() - 1) / 2
        for index, tensor in enumerate(self.placed.values() if way == "memory" else self.tensors):
            if not bool((tensor == mean + index % 7).all()):
                raise SystemExit(f"rank {hvd.rank()}: tensor {index} is wrong: {tensor[:4].tolist()}")

    def by_name(self) -> None:
        self._start(self.order)

    def any_order(self) -> None:
        self._start(self.shuffled)

    def _start(self, order: list[int]) -> None:
        handles = [hvd.allreduce_async_(self.tensors[index], name=self.names[index]) for index in order]
        for handle in handles:
            hvd.synchronize(handle)

    def memory(self) -> None:
        handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor in self.placed.items()]
        for handle in handles:
            hvd.synchronize(handle)

    def by_hand(self) -> None:
        whole = torch.cat([tensor.view(-1) for tensor in self.tensors])
        hvd.allreduce_(whole, name="whole")
        torch._foreach_copy_(self.tensors, list(whole.split([tensor.numel() for tensor in self.tensors])))

    def grouped(self) -> None:
        hvd.grouped_allreduce_(self.tensors, name="group")


def measure(case: Case, contenders: dict[str, Step], steps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(steps + 2):
        for name, step in contenders.items():
            case.fill()
            hvd.barrier()
            begun = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append((time.perf_counter() - begun) * 1e3)
            case.check(name)
    return times


def server_bytes(case: Case, steps: int = 5) -> list[float]:
    """What each server takes in for one step by name."""
    before = herring.server_counters()
    for _ in range(steps):
        case.by_name()
    after = herring.server_counters()
    return [(b["bytes_received"] - a["bytes_received"]) / steps for a, b in zip(before, after, strict=True)]


def calls_per_second() -> float:
    tensors = [torch.ones(256) for _ in range(1000)]
    rates = []
    for _ in range(7):
        hvd.barrier()
        begun = time.perf_counter()
        handles = [hvd.allreduce_async_(tensor, name=f"call.{index}") for index, tensor in enumerate(tensors)]
        rates.append(len(tensors) / (time.perf_counter() - begun))
        for handle in handles:
            hvd.synchronize(handle)
    return statistics.median(rates)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    hvd.init()
    rows = []
    for name in options.cases.split(","):
        case = Case(shapes_of(name))
        contenders = {
            "by hand": case.by_hand, "by name": case.by_name, "any order": case.any_order, "grouped": case.grouped,
            "memory": case.memory,
        }  # fmt: skip
        times = measure(case, contenders, options.steps)
        medians = {contender: statistics.median(each) for contender, each in times.items()}
        rows.append({"case": name, "ranks": hvd.size(), "ms": medians})
        if hvd.rank() == 0:
            by_hand = medians["by hand"]
            text = "  ".join(f"{each} {value:.2f} ({value / by_hand:.2f}x)" for each, value in medians.items())
            print(f"{name}, {hvd.size()} ranks: {text}", flush=True)
        loads = server_bytes(case)
        if loads and hvd.rank() == 0:
            spread = (max(loads) / min(loads) - 1) * 100
            print(
                f"  bytes to each server by name: {[round(each) for each in loads]}, apart by {spread:.4f} %",
                flush=True,
            )
    rate = calls_per_second()
    if hvd.rank() == 0:
        print(f"calls: {rate / 1e3:.1f} thousand a second", flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"rows": rows, "calls_per_second": rate}, file, indent=1)
    hvd.shutdown()


if __name__ == "__main__":
    main(options)
