"""Measures allreduce from a tf.function: Herring, TensorFlow's own ring and others, in turns in one run.

    herringrun -np 2 python benchmarks/tensorflow_allreduce.py --sizes 1KB 1MB 25MB 100MB --others gloo arrays
    herringrun -np 2 python benchmarks/tensorflow_allreduce.py --per-op 100
    herringrun -np 2 python benchmarks/tensorflow_allreduce.py --small 100 --sizes 2KB

Each row is the median over all iterations of rank 0, in milliseconds; each column's ratio is to Herring's. "gloo" is
torch's all_reduce (where torch is installed), "arrays" Herring's own of a numpy array: without TensorFlow, and in
memory that is not shared, as TensorFlow's. The last rows reduce the 161 gradients of ResNet-50 (102 MB) at once, then
beside a script that joins them, reduces that and cuts it again, and as one tensor of that size. --per-op prints what
one more 1 KB reduction in a graph costs, and the same through tf.py_function. --small reduces many gradients of each
size, in a tf.function and outside of one; and beside it a script that joins and cuts them with TensorFlow's own
operations. Needs tensorflow (pip install
tensorflow-cpu); each rank is a process on this host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
    parser.add_argument("--turns", type=int, default=5, help="turns of each library (default 5)")
    parser.add_argument("--seconds", type=float, default=0.5, help="approximate length of one turn (default 0.5)")
    parser.add_argument(
        "--port", type=int, default=43210, help="TensorFlow uses this port and the next (default 43210)"
    )
    parser.add_argument(
        "--others", nargs="*", default=[], choices=["gloo", "arrays"], help="also measure these, by size"
    )
    parser.add_argument("--per-op", type=int, metavar="COUNT", help="measure COUNT reductions of 1 KB in one graph")
    parser.add_argument("--small", type=int, metavar="COUNT", help="measure COUNT gradients of each of the sizes")
    parser.add_argument("--only-sizes", action="store_true", help="leave out the gradients of ResNet-50")
    return parser.parse_args()


def gloo_call(values: list[Any], rank: int, size: int, port: int) -> Callable[[], Any]:
    """torch's all_reduce of a tensor of that size."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    tensors = [torch.ones(int(each.shape[0])) for each in values]
    return lambda: [dist.all_reduce(each) for each in tensors]


def arrays_call(values: list[Any]) -> Callable[[], Any]:
    """Herring without TensorFlow, in memory that other processes do not see."""
    import numpy as np

    import herring

    arrays = [np.ones(int(each.shape[0]), np.float32) for each in values]
    return lambda: [herring.allreduce(each, op="sum") for each in arrays]


def per_op(count: int, rank: int, seconds: float) -> None:
    """A graph with `count` reductions of 1 KB, against one with a single one: what one more costs."""
    import numpy as np
    import tensorflow as tf

    import herring
    import herring.tensorflow as herring_tf
    from herring.tensorflow._ops import reduce_all

    herring_tf.init()

    def by_operations(values: list[Any]) -> list[Any]:
        return reduce_all(values, [f"op.{index}" for index in range(len(values))], "sum")

    def by_py_function(values: list[Any]) -> list[Any]:
        def reduce(value: Any) -> Any:
            return herring.allreduce(np.asarray(value), op="sum")

        return [tf.ensure_shape(tf.py_function(reduce, [value], tf.float32), value.shape) for value in values]

    for label, reduce in (("operations", by_operations), ("tf.py_function", by_py_function)):
        medians = []
        for many in (1, count):
            values = [tf.ones([256]) for _ in range(many)]
            function = tf.function(reduce)
            function(values)
            times = []
            begun = time.perf_counter()
            function(values)
            once = float(herring_tf.oob_allreduce(tf.constant(time.perf_counter() - begun), op="max"))
            for _ in range(max(5, min(500, int(seconds / once)))):
                begun = time.perf_counter()
                function(values)
                times.append(time.perf_counter() - begun)
            medians.append(statistics.median(times))
        if rank == 0:
            cost = 1e6 * (medians[1] - medians[0]) / (count - 1)
            row = f"one {1e6 * medians[0]:.0f} us, {count} {1e6 * medians[1]:.0f} us, each more {cost:.1f} us"
            print(f"{label:>16}: {row}", flush=True)
    herring_tf.shutdown()


def small(count: int, sizes: Sequence[int], rank: int, turns: int) -> None:
    """Gradients that are packed: by Herring, and by hand."""
    import tensorflow as tf

    import herring.tensorflow as herring_tf
    from herring.tensorflow._gradients import reduce_gradients

    herring_tf.init()

    def by_herring(values: list[Any]) -> list[Any]:
        return reduce_gradients(values, values, herring_tf.Compression.none, "sum")

    def by_hand(values: list[Any]) -> list[Any]:
        joined = tf.concat([tf.reshape(each, [-1]) for each in values], 0)
        pieces = tf.split(herring_tf.oob_allreduce(joined, op="sum"), [each.shape.num_elements() for each in values])
        return [tf.reshape(piece, each.shape) for piece, each in zip(pieces, values, strict=True)]

    for length in sizes:
        values = [tf.ones([max(length // 4, 1)]) for _ in range(count)]
        for where, calls in (
            ("in a function", [tf.function(by_herring), tf.function(by_hand)]),
            ("outside", [by_herring, by_hand]),
        ):
            times: list[list[float]] = [[], []]
            for _, (taken, call) in itertools.product(range(turns), list(zip(times, calls, strict=True))):
                call(values)
                for _ in range(20):
                    begun = time.perf_counter()
                    call(values)
                    taken.append(time.perf_counter() - begun)
            own, other = (1e3 * statistics.median(each) for each in times)
            if rank == 0:
                row = f"Herring {own:8.3f} ms  by hand {other:8.3f} ms ({other / own:5.2f}x)"
                print(f"{count} of {length:,} B, {where:>13}  {row}", flush=True)
    herring_tf.shutdown()


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


def measure_alone(arguments: argparse.Namespace, rank: int) -> None:
    """What needs none of TensorFlow's collective operations."""
    if arguments.per_op:
        per_op(arguments.per_op, rank, arguments.seconds)
    if arguments.small:
        small(arguments.small, arguments.sizes, rank, arguments.turns)


def main() -> None:
    arguments = parse()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    workers = [f"127.0.0.1:{arguments.port + each}" for each in range(size)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    import tensorflow as tf

    import herring.tensorflow as herring_tf
    from herring.tensorflow._gradients import reduce_gradients

    if arguments.per_op or arguments.small:
        measure_alone(arguments, rank)
        return
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

    def measure(label: str, values: list[Any], by_hand: bool = False, others: Sequence[str] = ()) -> None:
        calls = {"Herring": herring_call(values), "TF ring": ring_call(values, size, keys)}
        if by_hand:
            calls = {"Herring": herring_call(values), "by hand": fused_call(values)}
        if "gloo" in others:
            calls["gloo"] = gloo_call(values, rank, size, arguments.port + size)
        if "arrays" in others:
            calls["arrays"] = arrays_call(values)
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
            row = "  ".join(
                f"{name} {value:9.3f} ms" + ("" if name == "Herring" else f" ({value / medians['Herring']:5.2f}x)")
                for name, value in medians.items()
            )
            print(f"{label:>24}  {row}", flush=True)

    for length in arguments.sizes:
        measure(f"{length:,} B", [tf.ones([max(length // 4, 1)])], others=arguments.others)
    gradients = [] if arguments.only_sizes else resnet_gradients()
    if gradients:
        measure_gradients(measure, gradients)
    herring_tf.shutdown()


def measure_gradients(measure: Callable[..., None], gradients: list[int]) -> None:
    """Of a model, at once and in other ways."""
    import tensorflow as tf

    measure(f"{len(gradients)} gradients", [tf.ones([each]) for each in gradients])
    measure("joined, reduced, cut", [tf.ones([each]) for each in gradients], by_hand=True)
    measure("the same as one", [tf.ones([sum(gradients)])])


if __name__ == "__main__":
    main()
