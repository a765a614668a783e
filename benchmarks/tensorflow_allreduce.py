"""All-reduce from a tf.function: Herring beside TensorFlow's own ring, in turns of one run.

    herringrun -np 2 python benchmarks/tensorflow_allreduce.py --sizes 1KB 1MB 25MB 100MB

Each row is the median over all iterations of rank 0, in milliseconds. The last rows reduce the 161 gradients of
ResNet-50 (102 MB) at once, then beside a script that joins them, reduces that and cuts it again, and as one tensor of
that size. Needs tensorflow (pip install tensorflow-cpu); each rank is a process on this host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

UNITS = {"KB": 1000, "MB": 1000_000, "B": 1}


def to_bytes(text: str) -> int:
    """ "25MB" in bytes."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    raise argparse.ArgumentTypeError(f"{text!r}: a number and B, KB or MB")


def resnet_gradients() -> list[int]:
    """Elements of each of ResNet-50's 161 gradients."""
    sizes = [64 * 3 * 49, 64, 64]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for taken, given, area in ((inputs, width, 1), (width, width, 9), (width, 4 * width, 1)):
                sizes += [taken * given * area, given, given]
            if block == 0:
                sizes += [inputs * 4 * width, 4 * width, 4 * width]
            inputs = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=to_bytes, default=[1000, 64_000, 1000_000, 25_000_000, 100_000_000])
    parser.add_argument("--turns", type=int, default=5, help="of each contender, one after the other (default 5)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one turn, about (default 0.5)")
    parser.add_argument("--port", type=int, default=43210, help="TensorFlow's: this one and the next (default 43210)")
    return parser.parse_args()


def ring_call(values: list[Any], size: int, keys: Iterator[int]) -> Callable[[], Any]:
    """TensorFlow's own: one collective operation for each tensor, each with a key that nothing else has."""
    import tensorflow as tf

    own = [next(keys) for _ in values]

    def reduce(tensors: list[Any]) -> list[Any]:
        return [
            tf.raw_ops.CollectiveReduceV2(
                input=tensor, group_size=size, group_key=900, instance_key=key, ordering_token=[],
                merge_op="Add", final_op="Id", communication_hint="ring",
            )
            for tensor, key in zip(tensors, own, strict=True)
        ]  # fmt: skip

    function = tf.function(reduce)
    return lambda: function(values)


def main() -> None:
    arguments = parse()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    workers = [f"127.0.0.1:{arguments.port + each}" for each in range(size)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    import tensorflow as tf

    import herring.tensorflow as herring_tf
    from herring.tensorflow._gradients import reduce_gradients

    # Connects the workers: TensorFlow's collective operations work in this process from here on.
    tf.distribute.MultiWorkerMirroredStrategy()
    herring_tf.init()

    def herring_call(values: list[Any]) -> Callable[[], Any]:
        none, op = herring_tf.Compression.none, herring_tf.ReduceOp.SUM
        function = tf.function(lambda tensors: reduce_gradients(tensors, tensors, none, op))
        return lambda: function(values)

    keys = itertools.count(1000)

    def fused_call(values: list[Any]) -> Callable[[], Any]:
        def reduce(tensors: list[Any]) -> list[Any]:
            whole = herring_tf.oob_allreduce(tf.concat(tensors, 0), op="sum", name="fused")
            return list(tf.split(whole, [len(each) for each in values]))

        function = tf.function(reduce)
        return lambda: function(values)

    def measure(label: str, values: list[Any], by_hand: bool = False) -> None:
        calls = {"Herring": herring_call(values), "TF ring": ring_call(values, size, keys)}
        if by_hand:
            calls = {"Herring": herring_call(values), "by hand": fused_call(values)}
        times: dict[str, list[float]] = {name: [] for name in calls}
        counts = {}
        for name, call in calls.items():
            call()
            begun = time.perf_counter()
            call()
            once = herring_tf.oob_allreduce(tf.constant(time.perf_counter() - begun), op="max")
            counts[name] = max(3, min(200, int(arguments.seconds / float(once))))
        for _ in range(arguments.turns):
            for name, call in calls.items():
                call()
                for _ in range(counts[name]):
                    begun = time.perf_counter()
                    call()
                    times[name].append(time.perf_counter() - begun)
        if rank == 0:
            medians = {name: 1e3 * statistics.median(each) for name, each in times.items()}
            ratio = list(medians.values())[1] / medians["Herring"]
            row = "  ".join(f"{name} {value:9.3f} ms" for name, value in medians.items())
            print(f"{label:>24}  {row}  {ratio:5.1f}x", flush=True)

    for length in arguments.sizes:
        measure(f"{length:,} B", [tf.ones([max(length // 4, 1)])])
    gradients = resnet_gradients()
    measure(f"{len(gradients)} gradients", [tf.ones([each]) for each in gradients])
    measure("joined, reduced, cut", [tf.ones([each]) for each in gradients], by_hand=True)
    measure("the same as one", [tf.ones([sum(gradients)])])
    herring_tf.shutdown()


if __name__ == "__main__":
    main()
