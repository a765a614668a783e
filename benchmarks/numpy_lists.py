"""Measures ways to reduce many small numpy arrays: one call by name for each, the same in another order on each rank,
the same with arrays in memory of herring.empty_like(), one grouped call, and fused by hand.

    herringrun -np 2 python benchmarks/numpy_lists.py
    sudo env PATH="$PATH" benchmarks/emulate_cluster.py --workers 2 --servers 2 --rate 500mbit -- \\
        python benchmarks/numpy_lists.py

Prints the median milliseconds of a step. The ways take turns, and every step is checked. Fused by hand means:
numpy.concatenate, one allreduce, copies back.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np

import herring


class Case:
    """Arrays, and the steps over them."""

    def __init__(self, count: int, elements: int) -> None:
        self.arrays = [np.empty(elements, np.float32) for _ in range(count)]
        self.names = [f"grad.{index}" for index in range(count)]
        self.placed = herring.empty_like((f"placed.{index}", array) for index, array in enumerate(self.arrays))
        self.order = list(range(count))
        self.shuffled = random.Random(herring.rank()).sample(self.order, count)

    def fill(self) -> None:
        for arrays in (self.arrays, self.placed.values()):
            for index, array in enumerate(arrays):
                array.fill(herring.rank() + index % 7)

    def check(self, way: str) -> None:
        mean = (herring.size() - 1) / 2
        for index, array in enumerate(self.placed.values() if way == "memory" else self.arrays):
            if not (array == mean + index % 7).all():
                raise SystemExit(f"rank {herring.rank()}: array {index} is wrong: {array[:4]}")

    def by_name(self) -> None:
        self._start(self.order)

    def any_order(self) -> None:
        self._start(self.shuffled)

    def _start(self, order: list[int]) -> None:
        handles = [herring.allreduce_(self.arrays[index], name=self.names[index], async_op=True) for index in order]
        for handle in handles:
            handle.wait()

    def memory(self) -> None:
        handles = [herring.allreduce_(array, name=name, async_op=True) for name, array in self.placed.items()]
        for handle in handles:
            handle.wait()

    def grouped(self) -> None:
        herring.grouped_allreduce_(self.arrays, name="group")

    def by_hand(self) -> None:
        whole = np.concatenate(self.arrays)
        herring.allreduce_(whole, name="whole")
        start = 0
        for array in self.arrays:
            array[:] = whole[start : start + array.size]
            start += array.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="number of arrays (default: %(default)s)")
    parser.add_argument("--bytes", type=int, default=4096, help="bytes of each array (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each way (default: %(default)s)")
    options = parser.parse_args()
    herring.init()
    case = Case(options.count, options.bytes // 4)
    contenders = {
        "by hand": case.by_hand, "grouped": case.grouped, "by name": case.by_name, "any order": case.any_order,
        "memory": case.memory,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(options.steps + 2):
        for name, step in contenders.items():
            case.fill()
            herring.barrier()
            begun = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append((time.perf_counter() - begun) * 1e3)
            case.check(name)
    if herring.rank() == 0:
        by_hand = statistics.median(times["by hand"])
        medians = {name: statistics.median(each) for name, each in times.items()}
        print("  ".join(f"{name} {value:.2f} ms ({value / by_hand:.2f}x)" for name, value in medians.items()))


if __name__ == "__main__":
    main()
