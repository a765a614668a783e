"""An elastic training script, as Horovod's users write it: `script_elastic.py MARK`. Rank 1 is killed once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import herring.horovod.tensorflow as hvd

mark, mode = Path(sys.argv[1]), sys.argv[2]
hvd.init()
born = hvd.rank()
truth = tf.reshape(tf.range(1.0, 5.0), [4, 1])
tf.keras.utils.set_random_seed(0)
model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1, use_bias=False)])
optimizer = tf.keras.optimizers.SGD(0.05)
optimizer.build(model.trainable_variables)
sizes: list[int] = []
state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, losses=[])
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
deadline = time.monotonic() + 100


@tf.function
def step(data: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(data, training=True) - data @ truth))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return hvd.allreduce(loss, name="loss")


@hvd.elastic.run
def train(held: Any) -> None:
    whole = 0
    while True:
        data = np.random.default_rng([held.batch, hvd.rank()]).normal(size=(16, 4)).astype(np.float32)
        if born == 1 and held.batch == 6 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "gather":
            assert hvd.allgather(tf.ones([2]), name="blocks").shape == [2 * hvd.size()]
        held.losses = [*held.losses, float(step(tf.constant(data)))]
        held.batch += 1
        assert time.monotonic() < deadline, "the job never became whole again"
        if float(hvd.allreduce(tf.constant(float(whole >= 10)), name="ready", op=hvd.Min)):
            return
        whole += int(mark.exists() and hvd.size() == 3)
        if held.batch % 2 == 0:
            held.commit()


train(state)
assert len(state.losses) == state.batch
assert state.losses[-1] < state.losses[0] / 10, state.losses
same = hvd.allgather_object(model.get_weights()[0].tobytes())
assert same == same[:1] * 3
os.write(1, f"elastic: {state.batch} batches, sizes {sizes}, the same on {hvd.size()}\n".encode())
hvd.shutdown()
