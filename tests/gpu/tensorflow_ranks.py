"""Two ranks of TensorFlow on one GPU: bits of the CPU path, late kernels, training, times.

Run by herringrun, with HERRING_TENSORFLOW_STREAM=off and on:
python -m herring._launch -np 2 python tests/gpu/tensorflow_ranks.py
GPU_TEST_DEVICE=/CPU:0 runs it without a GPU, to try the script.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import numpy as np
import tensorflow as tf

import herring
import herring.tensorflow as hvd
from herring.tensorflow._ops import library

DEVICE = os.environ.get("GPU_TEST_DEVICE", "/GPU:0")


def on_device(values: np.ndarray) -> tf.Tensor:
    with tf.device(DEVICE):
        return tf.identity(tf.constant(values))


def check_place(tensor: tf.Tensor) -> None:
    assert DEVICE.strip("/") in tensor.device, tensor.device


def bits(rank: int) -> None:
    random = np.random.default_rng(rank)
    for dtype in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"):
        for count in (0, 1, 1000, 300_000, 3_000_000):
            values = tf.cast(random.integers(0, 2 if dtype == "bool" else 9, count), dtype).numpy()
            op = "max" if dtype == "bool" else "sum"
            with tf.device("/CPU:0"):
                wanted = hvd.oob_allreduce(tf.constant(values), op=op).numpy()
                root = hvd.broadcast(tf.constant(values), 1).numpy()
            with tf.device(DEVICE):
                assert hvd.oob_allreduce(on_device(values), op=op).numpy().tobytes() == wanted.tobytes(), (dtype, count)
                assert hvd.broadcast(on_device(values), 1).numpy().tobytes() == root.tobytes(), (dtype, count)
    rows = on_device(np.full((rank + 1, 2), float(rank)))
    with tf.device(DEVICE):
        assert hvd.allgather(rows).numpy().tolist() == [[0, 0], [1, 1], [1, 1]]
    if rank == 0:
        with tf.device("/CPU:0"):
            mixed = hvd.oob_allreduce(tf.ones(100_000), op="sum", name="mixed")  # This rank has no GPU, for once.
    else:
        with tf.device(DEVICE):
            mixed = hvd.oob_allreduce(on_device(np.ones(100_000, np.float32)), op="sum", name="mixed")
    assert (mixed.numpy() == 2).all()
    print("bits: ok", flush=True)


def late_kernels() -> None:
    """Who does not wait for the kernels before sums what was there before; who is not waited for is read too early."""
    side = 512 if DEVICE == "/CPU:0" else 4096
    noise = on_device(np.full((side, side), 1e-3, np.float32))

    @tf.function
    def step(number: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(DEVICE):
            busy = noise
            for _ in range(10):
                busy = tf.matmul(busy, noise)
            values = [tf.fill([size], number) + 0.0 * busy[0, 0] for size in (10, 50_000, 2_000_000)]
            sums = [hvd.oob_allreduce(each, op="sum", name=f"late{i}") for i, each in enumerate(values)]
            return [2 * each for each in sums]

    for number in range(1, 21):
        for result in step(on_device(np.float32(number))):
            assert (result.numpy() == 4 * number).all(), number
    assert library().pending() == 0
    print("late kernels: ok", flush=True)


def training(rank: int) -> None:
    """The ranks' weights stay the same bits, and the loss falls."""
    tf.keras.utils.set_random_seed(rank)
    with tf.device(DEVICE):
        model = tf.keras.Sequential(
            [tf.keras.Input((64,)), tf.keras.layers.Dense(512, "relu"), tf.keras.layers.Dense(1)]
        )
        hvd.broadcast_variables(model.variables, 0)
        inputs = np.random.default_rng(rank).normal(size=(1024, 64)).astype("float32")
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(1e-3))
        model.compile(optimizer, "mse", jit_compile=False)
        history = model.fit(inputs, inputs.sum(1), batch_size=64, epochs=4, verbose=0).history["loss"]
    assert history[-1] < history[0], history
    for variable in model.trainable_variables:
        mine = tf.identity(variable).numpy()
        with tf.device("/CPU:0"):
            assert hvd.broadcast(tf.constant(mine), 0).numpy().tobytes() == mine.tobytes()
    print("training: ok", flush=True)


def times(rank: int) -> None:
    for megabytes in (0.064, 1, 25, 256):
        value = on_device(np.ones(int(megabytes * 1e6 / 4), np.float32))

        @tf.function
        def step(each: tf.Tensor) -> tf.Tensor:
            with tf.device(DEVICE):
                return hvd.oob_allreduce(each, op="average", name="timed")

        taken = []
        for _ in range(15 if megabytes > 100 else 40):
            begun = time.perf_counter()
            value = step(value)
            value[:1].numpy()  # The GPU has it.
            taken.append(time.perf_counter() - begun)
        if rank == 0:
            print(f"allreduce {megabytes:g} MB: {1e3 * statistics.median(taken[5:]):.2f} ms", flush=True)


def main() -> int:
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    if DEVICE != "/CPU:0" and not tf.config.list_physical_devices("GPU"):
        print("tensorflow_ranks.py: TensorFlow sees no GPU here; nothing was run")
        return 2
    hvd.init()
    rank = hvd.rank()
    check_place(on_device(np.float32(1)))
    if rank == 0:
        setting = os.environ.get("HERRING_TENSORFLOW_STREAM", "off")
        print(f"TensorFlow {tf.__version__}, HERRING_TENSORFLOW_STREAM={setting}: {herring.__version__}", flush=True)
    bits(rank)
    late_kernels()
    training(rank)
    times(rank)
    return 0


if __name__ == "__main__":
    sys.exit(main())
