"""A training step in TensorFlow: Keras's fit under HerringStrategy, and many steps that must leave nothing behind.

    python benchmarks/tensorflow_training.py                           # one process, to compare with
    herringrun -np 2 python benchmarks/tensorflow_training.py          # the same batch in each of two
    herringrun -np 2 python benchmarks/tensorflow_training.py --apart  # two separate trainings at the same time
    herringrun -np 2 python benchmarks/tensorflow_training.py --leak 20000

The first three print the median time of a step of fit(), of a small convolutional network on one core per process. The
time of --apart divided by the time together is the efficiency: both use both cores, so what the machine itself loses
then is in both. --leak prints the memory of rank 0 after 1,000 steps of a tf.function with DistributedGradientTape, an
allgather and an alltoall, after half of the steps and after the last one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64, help="batch size of each process (default 64)")
    parser.add_argument("--steps", type=int, default=100, help="steps of fit (default 100)")
    parser.add_argument("--apart", action="store_true", help="each process trains alone")
    parser.add_argument("--leak", type=int, metavar="STEPS", help="measure memory over this number of steps instead")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()  # Here, so that --help works without TensorFlow.

import numpy as np
import tensorflow as tf

import herring.horovod.tensorflow as hvd
import herring.tensorflow as herring_tf
from herring.tensorflow._ops import library


class StepTimes(tf.keras.callbacks.Callback):
    """Of each batch, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.seconds.append(time.perf_counter() - self._begun)


def network() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((32, 32, 3)),
            *[layers.Conv2D(width, 3, 2, "same", activation="relu") for width in (64, 128, 256)],
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(10),
        ]
    )


def fit(batch_size: int, steps: int, apart: bool) -> None:
    strategy = tf.distribute.get_strategy() if apart else herring_tf.HerringStrategy()
    size = strategy.num_replicas_in_sync
    random = np.random.default_rng(0)
    images = random.normal(size=(batch_size * size * 10, 32, 32, 3)).astype(np.float32)
    labels = random.integers(0, 10, batch_size * size * 10)
    with strategy.scope():
        model = network()
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
    times = StepTimes()
    model.fit(images, labels, batch_size * size, epochs=max(steps // 10, 2), verbose=0, callbacks=[times])
    if hvd.rank() == 0:
        parameters = model.count_params()
        together = f"1 of {hvd.size()} processes apart" if apart else f"{size} processes"
        median = 1e3 * statistics.median(times.seconds[10:])
        print(f"{together}, batch {batch_size} each, {parameters:,} parameters: {median:.2f} ms a step", flush=True)


def resident_kb() -> int:
    """Memory of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def leak(steps: int) -> None:
    weights = [tf.Variable(tf.ones([size])) for size in (40_000, 1_000, 100, 10)]

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each * each) for each in weights])
        for weight, gradient in zip(weights, hvd.DistributedGradientTape(tape).gradient(loss, weights), strict=True):
            weight.assign_sub(0.0 * gradient)
        weights[3].assign_add(0.0 * hvd.alltoall(hvd.allgather(weights[3])[:10]))

    for number in range(1, steps + 1):
        step()
        if number in (1000, steps // 2, steps) and hvd.rank() == 0:
            print(f"step {number}: {resident_kb() / 1024:.1f} MB, {library().pending()} operations pending", flush=True)


def main(arguments: argparse.Namespace) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    if arguments.leak:
        leak(arguments.leak)
    else:
        fit(arguments.batch_size, arguments.steps, arguments.apart)
    hvd.shutdown()


if __name__ == "__main__":
    main(arguments)
