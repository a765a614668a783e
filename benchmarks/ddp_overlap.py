#!/usr/bin/env python3
"""Measures how much of DDP's communication is hidden behind backward: a step, and its parts.

    benchmarks/emulate_cluster.py --workers 2 --servers 2 --rate 500mbit -- \\
        python benchmarks/ddp_overlap.py --backends herring,gloo

Starts under torchrun, herringrun or the emulated cluster. Each round measures, for each backend in turn: backward alone
(no_sync), the communication alone (the same buckets, all started at once, nothing computed meanwhile), and backward
with DistributedDataParallel. hidden = 1 - (step - backward) / communication, of the medians: 1 where communication
costs no time, 0 where it only starts when backward has ended. Times are those of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backends", default="herring,gloo", help="backends, in this order in each round (default herring,gloo)"
    )
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="number of linear layers (default 12)")
    parser.add_argument(
        "--width",
        type=int,
        default=1024,
        metavar="N",
        help="features of each layer, which has 4 N^2 bytes (default 1024)",
    )
    parser.add_argument("--batch", type=int, default=1024, metavar="N", help="rows of the batch (default 1024)")
    parser.add_argument("--bucket-mb", type=float, default=4, metavar="MB", help="DDP's bucket_cap_mb (default 4)")
    parser.add_argument(
        "--rounds", type=int, default=7, metavar="N", help="number of rounds; the results are medians (default 7)"
    )
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N", help="processes that rank 0 lets compute beside it (default 0)"
    )
    args = parser.parse_args()
    if unknown := set(args.backends.split(",")) - {"herring", "gloo"}:
        parser.error(f"--backends: {', '.join(sorted(unknown))}: herring, gloo or both")
    if min(args.layers, args.width, args.batch, args.rounds) < 1 or args.bucket_mb <= 0:
        parser.error("--layers, --width, --batch, --rounds and --bucket-mb are above 0")
    if args.busy < 0:
        parser.error("--busy is 0 or more")
    return args


if __name__ == "__main__":
    args = parse()  # Here, so that --help works without torch.

import torch
import torch.distributed as dist
from torch import nn

import herring.torch  # noqa: F401  registers the backend
from herring.torch.parallel import DistributedDataParallel as HerringDDP

MB = 1 << 20


class Side:
    """One backend's model and buckets."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.group = dist.new_group(backend=name)
        torch.manual_seed(0)
        layers = [nn.Linear(args.width, args.width, bias=False) for _ in range(args.layers)]
        wrapper = HerringDDP if name == "herring" else nn.parallel.DistributedDataParallel
        self.model = wrapper(
            nn.Sequential(*layers), process_group=self.group, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True
        )
        self.batch = torch.randn(args.batch, args.width)
        total, cap = args.layers * args.width * args.width, int(args.bucket_mb * MB / 4)
        self.buckets = [torch.ones(min(cap, total - start)) for start in range(0, total, cap)]
        self.times: dict[str, list[float]] = {"backward": [], "communication": [], "step": []}

    def backward(self) -> float:
        with self.model.no_sync():
            return self._timed_backward()

    def step(self) -> float:
        return self._timed_backward()

    def communication(self) -> float:
        def reduce_all() -> None:
            works = [dist.all_reduce(bucket, group=self.group, async_op=True) for bucket in self.buckets]
            for work in works:
                work.wait()

        return self._timed(reduce_all)

    def _timed_backward(self) -> float:
        loss = self.model(self.batch).square().mean()
        return self._timed(loss.backward)

    def _timed(self, call: Callable[[], object]) -> float:
        dist.barrier(group=self.group)
        start = time.perf_counter()
        call()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self.group)
        return seconds.item()


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """They end with this process, however it ends."""
    watch = f"import os\nwhile os.getppid() == {os.getpid()}:\n    sum(range(100_000))\n"
    busy = [subprocess.Popen([sys.executable, "-c", watch]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("herring")
    with busy_processes(args.busy if dist.get_rank() == 0 else 0):
        measure(args)
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> None:
    sides = [Side(name, args) for name in args.backends.split(",")]
    for number in range(args.rounds + 1):
        for side in sides:
            for part, seconds in side.times.items():
                took = getattr(side, part)()
                if number > 0:  # The first builds buckets and connections.
                    seconds.append(took)
    if dist.get_rank() == 0:
        size = args.layers * args.width * args.width * 4 / MB
        print(f"{dist.get_world_size()} workers, {size:.0f} MB of gradients in buckets of {args.bucket_mb:g} MB, "
              f"{args.busy} busy processes, medians of {args.rounds} rounds")  # fmt: skip
        print(f"{'backend':<9}{'backward':>12}{'communication':>15}{'step':>10}{'hidden':>9}")
        for side in sides:
            backward, communication, step = (statistics.median(each) * 1e3 for each in side.times.values())
            hidden = 1 - (step - backward) / communication
            print(f"{side.name:<9}{backward:>9.1f} ms{communication:>12.1f} ms{step:>7.1f} ms{hidden:>8.0%}")
        sys.stdout.flush()


if __name__ == "__main__":
    main(args)
