"""Shows whether gradients are sent while others are computed: a timeline of one training step in TensorFlow.

    herringrun -np 2 python benchmarks/tensorflow_overlap.py --trace overlap.json

TensorFlow's own tracer records steps of a convolutional network, on rank 0. Printed: when the backward pass ended, when
the first and the last gradient were submitted, and for how long HerringWait waited after it, which is all that a step
pays for communication; beside it the same for a script that reduces when all gradients are there. --trace writes a
step as a Chrome trace (chrome://tracing, ui.perfetto.dev). Needs tensorflow; each rank is a process on this host.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8, help="images of each process in a step (default 8)")
    parser.add_argument("--steps", type=int, default=7, help="steps of each way; medians are printed (default 7)")
    parser.add_argument("--trace", type=Path, help="write the last overlapped step to this file")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()  # Here, so that --help works without TensorFlow.

import tensorflow as tf
from tensorflow.python.client import timeline

import herring.tensorflow as herring_tf
from herring.tensorflow._ops import reduce_all

WIDTHS = (3, 64, 128, 256, 512)


def gradients_of(batch: int) -> list[Any]:
    """Those of a small convolutional network, the last layer's first."""
    weights = [
        tf.compat.v1.get_variable(f"conv.{i}", initializer=tf.random.stateless_normal([3, 3, taken, given], [1, i]))
        for i, (taken, given) in enumerate(itertools.pairwise(WIDTHS))
    ]
    weights.append(tf.compat.v1.get_variable("dense", initializer=tf.zeros([8 * 8 * 512, 128])))
    value = tf.random.stateless_normal([batch, 128, 128, 3], [2, 0])
    for weight in weights[:-1]:
        value = tf.nn.relu(tf.nn.conv2d(value, weight, 2, "SAME"))
    loss = tf.reduce_sum(tf.reshape(value, [batch, -1]) @ weights[-1])
    return list(tf.compat.v1.gradients(loss, weights)[::-1])


def main(arguments: argparse.Namespace) -> None:
    herring_tf.init()
    rank = herring_tf.rank()
    with tf.Graph().as_default():
        gradients = gradients_of(arguments.batch_size)
        names = [f"gradient.{index}" for index in range(len(gradients))]
        overlapped = reduce_all(gradients, names, "average")
        with tf.control_dependencies(gradients):
            there = [tf.identity(each) for each in gradients]
        at_the_end = reduce_all(there, [f"{name}.end" for name in names], "average")
        megabytes = sum(each.shape.num_elements() * 4 for each in gradients) / 1e6
        config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for label, results in (("overlapped", overlapped), ("at the end", at_the_end)):
                found = [look(session, results, gradients) for _ in range(arguments.steps + 1)][1:]
                if rank == 0:
                    tell(label, found, megabytes)
                if rank == 0 and label == "overlapped" and arguments.trace:
                    arguments.trace.write_text(found[-1]["trace"])
    herring_tf.shutdown()


def look(session: Any, results: list[Any], gradients: list[Any]) -> dict[str, Any]:
    """One step: its times in ms, from the beginning of the first operation."""
    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    metadata = tf.compat.v1.RunMetadata()
    session.run([each.op for each in results], options=options, run_metadata=metadata)
    stats = metadata.step_stats
    spans: dict[str, tuple[int, int]] = {}
    for device in stats.dev_stats:
        for node in device.node_stats:
            begin = node.all_start_micros + node.op_start_rel_micros
            spans[node.node_name] = (begin, node.all_start_micros + node.op_end_rel_micros)
    first = min(begin for begin, _ in spans.values())
    submits = [begin for name, (begin, _) in spans.items() if name.startswith("HerringSubmit")]
    waits = [span for name, span in spans.items() if name.startswith("HerringWait")]
    ends = [spans[each.op.name][1] for each in gradients if each.op.name in spans]
    trace = timeline.Timeline(stats).generate_chrome_trace_format()
    return {
        "backward ends": (max(ends) - first) / 1e3,
        "first submit": (min(submits) - first) / 1e3,
        "last submit": (max(submits) - first) / 1e3,
        "step ends": (max(end for _, end in waits) - first) / 1e3,
        "waited": (max(end for _, end in waits) - max(ends)) / 1e3,
        "trace": trace,
    }


def tell(label: str, found: list[dict[str, Any]], megabytes: float) -> None:
    """Medians of the steps."""
    medians = {key: statistics.median(each[key] for each in found) for key in found[0] if key != "trace"}
    row = ", ".join(f"{key} {value:.1f} ms" for key, value in medians.items())
    print(f"{label} ({megabytes:.1f} MB of gradients): {row}", flush=True)


if __name__ == "__main__":
    main(arguments)
