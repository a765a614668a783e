"""What each rank does in test_deadlocks.py, as cases.py. A job in which ranks wait for each other is over: each case
begins another one."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from cases import close, expect, main

import herring.horovod.tensorflow as horovod
import herring.tensorflow as hvd

LATE_S = 3.0  # Several times HERRING_DEADLOCK_AFTER_S.


def found(call: Callable[[], object], *words: str) -> None:
    """The call ends with an error that says who waits for what; the job is over then."""
    expect(
        tf.errors.FailedPreconditionError, call, "ranks wait for each other", "is waited for on rank",
        "was never called on rank", *words,
    )  # fmt: skip
    horovod.shutdown()
    hvd.shutdown()
    hvd.init()


def _gradients(sources: list[tf.Variable], every: list[tf.Variable]) -> Callable[[], object]:
    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as recorded:
            loss = tf.add_n([tf.reduce_sum(each * each) for each in every])
        return hvd.DistributedGradientTape(recorded).gradient(loss, sources)

    return step


def _variables() -> list[tf.Variable]:
    return [tf.Variable(tf.ones([20_000]), name=name) for name in ("first", "second")]


def a_variable_is_skipped() -> None:
    both = _variables()
    found(_gradients(both if hvd.rank() == 0 else both[1:], both), "gradient.0.first", "gradient.0.second")


def a_variable_is_skipped_in_a_function() -> None:
    both = _variables()
    found(tf.function(_gradients(both if hvd.rank() == 0 else both[1:], both)), "gradient.0.first")


def another_order() -> None:
    both = _variables()
    found(tf.function(_gradients(both if hvd.rank() == 0 else both[::-1], both)), "gradient.0.second")


def a_variable_comes_late_on_one_rank() -> None:
    """It takes part in the first step on one rank alone."""
    both = _variables()
    step = [tf.function(_gradients(both[:count], both)) for count in (1, 2)]
    step[0]()
    found(lambda: [step[hvd.rank() == 0]() for _ in range(2)], "gradient.1.second")


def another_layer_of_keras() -> None:
    with hvd.HerringStrategy().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, name="common")])
    model.layers[0].trainable = True
    side = keras.layers.Dense(2, name="mine" if hvd.rank() == 0 else "other")
    side.build((None, 6))
    images = tf.ones([4, 6])

    @tf.function
    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as recorded:
            loss = tf.reduce_sum(side(images))
        return hvd.DistributedGradientTape(recorded).gradient(loss, side.trainable_variables)

    found(step, "mine", "other")


def horovods_names() -> None:
    horovod.init()
    rank = horovod.rank()
    step = tf.function(lambda: horovod.allreduce(tf.ones([3]), name=f"w{3 + rank % 2}"))
    found(step, "w3", "w4")


def another_operation_of_horovod() -> None:
    horovod.init()
    if horovod.rank() == 0:
        found(lambda: horovod.broadcast(tf.ones([3]), 0, name="state"), "broadcast.state", "allreduce.loss")
    else:
        found(lambda: horovod.allreduce(tf.ones([3]), name="loss"), "broadcast.state", "allreduce.loss")


def another_name_in_a_session() -> None:
    """Where no thread waits for it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        total = hvd.oob_allreduce(tf.ones([3]), op="sum", name=f"w{hvd.rank() % 2}")
        found(lambda: session.run(total), "w0", "w1")


def a_rank_that_computes_is_waited_for() -> None:
    def slow(value: np.ndarray) -> np.ndarray:
        time.sleep(LATE_S)
        return value

    rank = hvd.rank()

    @tf.function
    def step(late: int) -> tf.Tensor:
        value = tf.ones([3])
        if rank == late:
            value = tf.ensure_shape(tf.numpy_function(slow, [value], tf.float32), [3])
        return hvd.oob_allreduce(value, op="sum", name=f"late.{late}")

    for late in range(2):
        close(step(late), np.full(3, hvd.size()))


def gradients_that_take_long_are_waited_for() -> None:
    """Each rank waits for one that the other computes still: a call that has begun may submit more."""
    rank = hvd.rank()

    def slow(value: np.ndarray) -> np.ndarray:
        time.sleep(LATE_S)
        return value

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        value = tf.ones([3])
        late = tf.ensure_shape(tf.numpy_function(slow, [value], tf.float32), [3])
        sums = [
            hvd.oob_allreduce(late if index == rank % 2 else value, op="sum", name=f"sum.{index}") for index in range(2)
        ]
        for result in session.run(sums):
            close(result, np.full(3, hvd.size()))


def another_thread_that_computes_is_waited_for() -> None:
    """Two threads with functions of their own, each of which waits for the other rank's other thread. That there are
    two shows where both have waited at once before."""
    rank = hvd.rank()
    sums = [tf.function(lambda value, name=name: hvd.oob_allreduce(value, op="sum", name=name)) for name in "ab"]

    def twice(which: int) -> None:
        for late in range(hvd.size()):
            both.wait()
            if rank == late:
                time.sleep(LATE_S / 3)
            close(sums[which](tf.ones([3])), np.full(3, hvd.size()))
        if which == rank % 2:
            time.sleep(LATE_S)
        close(sums[which](tf.ones([3])), np.full(3, hvd.size()))
        done.append(which)

    both = threading.Barrier(2)
    done: list[int] = []
    threads = [threading.Thread(target=twice, args=[which]) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1]


def _nothing_is_caught() -> None:
    hvd.oob_allreduce(tf.ones([3]), name=f"w{hvd.rank()}")


if __name__ == "__main__":
    main(sys.argv[1:], globals())
