"""What each rank does in test_horovod.py, as cases.py: training under Horovod's names, against one process."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from cases import close, expect, main, many_gradients
from cases import tape as sagemakers_tape

import herring.horovod.keras as hvd_keras
import herring.horovod.tensorflow as hvd
import herring.horovod.tensorflow.keras as hvd_tf_keras
from herring.horovod.common.exceptions import HorovodInternalError
from herring.tensorflow._ops import library

tf.get_logger().setLevel("ERROR")  # Each case traces functions of its own.
GENERATOR = np.random.default_rng(7)
IMAGES = GENERATOR.normal(size=(48, 6)).astype(np.float32)
LABELS = (IMAGES.sum(1) > 0).astype(np.int64)


def part() -> tuple[np.ndarray, np.ndarray]:
    """This rank's rows of each batch of 12."""
    rank, size = hvd.rank(), hvd.size()
    mine = np.concatenate([np.arange(12)[12 * rank // size : 12 * (rank + 1) // size] + 12 * step for step in range(4)])
    return IMAGES[mine], LABELS[mine]


def model_of(seed: int, library_: Any = keras) -> Any:
    library_.utils.set_random_seed(seed)
    layers = [library_.layers.Dense(8, activation="tanh"), library_.layers.Dense(2)]
    model = library_.Sequential(layers)
    model.build((None, 6))
    return model


def compiled(model: Any, optimizer: Any, library_: Any = keras) -> Any:
    loss = library_.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
    return model


def same_weights(one: Any, other: Any, tolerance: float = 1e-6) -> None:
    for mine, theirs in zip(one.get_weights(), other.get_weights(), strict=True):
        close(mine, theirs, tolerance)


FIT: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}


def fit_as_alone(
    make: Callable[[Any], Any], wrap: Callable[[Any], Any], callbacks: Callable[[], list[Any]], library_: Any = keras
) -> Any:
    """fit() on all ranks, that start with different weights, and in each process alone with the whole batches."""
    alone = compiled(model_of(hvd.size() - 1, library_), make(library_), library_)
    alone.fit(IMAGES[:12], LABELS[:12], batch_size=12, shuffle=False, verbose=0)
    shared = compiled(model_of(hvd.rank(), library_), wrap(make(library_)), library_)
    images, labels = part()
    batch = 12 // hvd.size()
    hvd.broadcast_variables(shared.variables, root_rank=hvd.size() - 1)
    shared.fit(images[:batch], labels[:batch], batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks())
    alone.fit(IMAGES, LABELS, batch_size=12, **FIT)
    shared.fit(images, labels, batch_size=batch, **FIT, callbacks=callbacks())
    same_weights(shared, alone)
    assert type(shared.optimizer).__name__ == type(alone.optimizer).__name__
    return shared


def fit_with_keras_3() -> None:
    for module in (hvd_keras, hvd_tf_keras):
        fit_as_alone(
            lambda k: k.optimizers.SGD(0.1, momentum=0.9),
            module.DistributedOptimizer,
            lambda module=module: [
                module.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1),
                module.callbacks.MetricAverageCallback(),
            ],
        )


def fit_with_keras_2() -> None:
    tf_keras = importlib.import_module("tf_keras")
    for kind in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        fit_as_alone(
            lambda k, kind=kind: kind(0.1, momentum=0.9), hvd.DistributedOptimizer, lambda: [], library_=tf_keras
        )


def fit_with_a_predivide_factor_and_groups() -> None:
    for groups in (None, 2):
        fit_as_alone(
            lambda k: k.optimizers.Adam(0.01),
            lambda optimizer, groups=groups: hvd.DistributedOptimizer(
                optimizer, gradient_predivide_factor=2.0, groups=groups
            ),
            lambda: [],
        )


def passes_per_step() -> None:
    """Two batches make a step; sums, or averages of the two."""
    tf_keras = importlib.import_module("tf_keras")
    for library_ in (keras, tf_keras):
        for averages in (False, True):
            alone, shared = model_of(1, library_), model_of(1, library_)
            alone.build((None, 6))
            rate = 0.1
            optimizer = hvd.DistributedOptimizer(
                library_.optimizers.SGD(rate), backward_passes_per_step=2, average_aggregated_gradients=averages
            )
            compiled(shared, optimizer, library_)
            images, labels = part()
            shared.fit(images, labels, batch_size=12 // hvd.size(), epochs=1, shuffle=False, verbose=0)
            compiled(alone, library_.optimizers.SGD(rate * (1 if averages else 2)), library_)
            alone.fit(IMAGES, LABELS, batch_size=24, epochs=1, shuffle=False, verbose=0)
            same_weights(shared, alone)
            assert int(np.asarray(shared.optimizer.iterations)) == 4
    expect(ValueError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0), "> 0")


def loss_that_makes(variables: list[tf.Variable]) -> tf.Tensor:
    """Of a model that is built when it is first called."""
    if not variables:
        variables.append(tf.Variable([1.0]))
    return tf.reduce_sum(variables[0] * (hvd.rank() + 1.0))


def gradients_between_computing_and_applying() -> None:
    """compute_gradients() returns those of all ranks, as scripts that clip them expect; they are reduced once."""
    tf_keras = importlib.import_module("tf_keras")
    rank, size = hvd.rank(), hvd.size()
    kinds = (keras.optimizers.SGD, tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD)
    for kind in kinds:
        for eager in (True, False):
            weight = tf.Variable([2.0, 3.0])
            optimizer = hvd.DistributedOptimizer(kind(1.0), op=hvd.Sum)
            optimizer.apply_gradients([(tf.zeros([2]), weight)])  # Makes what tf.function may not make.

            def step(weight: tf.Variable = weight, optimizer: Any = optimizer) -> tf.Tensor:
                pairs = optimizer._compute_gradients(lambda: tf.reduce_sum(weight * (rank + 1.0)), [weight])
                optimizer.apply_gradients([(tf.clip_by_value(each, -100.0, 1.5), variable) for each, variable in pairs])
                return pairs[0][0]

            run = step if eager else tf.function(step)
            for _ in range(3):
                close(run(), [size * (size + 1) / 2] * 2)
            close(weight, [2.0 - 3 * 1.5, 3.0 - 3 * 1.5])
            # What does not come from there is reduced when it is applied.
            optimizer.apply_gradients([(tf.constant([1.0, rank + 1.0]), weight)])
            close(weight, [2.0 - 3 * 1.5 - size, 3.0 - 3 * 1.5 - size * (size + 1) / 2])
    for kind in kinds:
        made: list[tf.Variable] = []
        optimizer = hvd.DistributedOptimizer(kind(1.0), op=hvd.Sum)
        pairs = optimizer.compute_gradients(lambda made=made: loss_that_makes(made), lambda made=made: made)
        close(pairs[0][0], [size * (size + 1) / 2])
    of_keras = keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    pairs = optimizer.compute_gradients(lambda: tf.reduce_sum(of_keras * (rank + 1.0)), [of_keras])
    # Computed in a function, applied outside: the function is traced once, and none of its steps is reduced again.
    split = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    there = tf.Variable([0.0])
    gradients_of = tf.function(
        lambda: split.compute_gradients(lambda: tf.reduce_sum(there * (rank + 1.0)), [there])[0][0]
    )
    for step in range(1, 4):
        split.apply_gradients([(gradients_of(), there)])
        close(there, [-step * size * (size + 1) / 2])
    close(pairs[0][0], [size * (size + 1) / 2])
    weight = tf.Variable([1.0])
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(weight * (rank + 1.0))
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
    close(optimizer.compute_gradients(loss, [weight], tape=recorded)[0][0], [(size + 1) / 2])
    expect(
        ValueError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD())._compute_gradients(loss, [weight]), "tape"
    )


def tape() -> None:
    """Dense, sparse and absent gradients, in eager mode and in a tf.function; every option."""
    rank, size = hvd.rank(), hvd.size()
    weight, table, unused = tf.Variable([2.0, 3.0]), tf.Variable(tf.ones([4, 2])), tf.Variable(1.0)

    def gradients(**options: Any) -> list[Any]:
        with tf.GradientTape() as recorded:
            loss = tf.reduce_sum(weight * weight) * (rank + 1.0) + tf.reduce_sum(tf.gather(table, [rank, rank]))
        recorded = hvd.DistributedGradientTape(recorded, **options)
        return recorded.gradient(loss, [weight, table, unused])

    rows = np.zeros((4, 2))
    rows[:size] = 2.0
    mean = (size + 1) / 2
    options: list[dict[str, Any]] = [
        {},
        {"sparse_as_dense": True},
        {"gradient_predivide_factor": 4.0, "sparse_as_dense": True},
        {"groups": 1, "sparse_as_dense": True},
        {"groups": [[weight, unused]]},
        {"compression": hvd.Compression.fp16},
    ]
    for each in options:
        for call in (gradients, tf.function(gradients)):
            first, second, none = call(**each)
            close(first, np.array([4.0, 6.0]) * mean, 1e-3)
            assert isinstance(second, tf.IndexedSlices) != ("sparse_as_dense" in each)
            close(tf.convert_to_tensor(second), rows / size)
            assert none is None
    close(gradients(op=hvd.Sum, sparse_as_dense=True)[1], rows)
    close(gradients(op=hvd.Max, sparse_as_dense=True)[0], np.array([4.0, 6.0]) * size)
    if size & (size - 1) == 0:
        close(gradients(op=hvd.Adasum, sparse_as_dense=True)[1][:size], np.full((size, 2), 2.0))
    expect(NotImplementedError, lambda: gradients(op=hvd.Max), "sparse_as_dense")
    expect(ValueError, lambda: gradients(op=hvd.Sum, gradient_predivide_factor=2.0), "op != Average")
    expect(ValueError, lambda: gradients(groups=-1), "groups")
    expect(ValueError, lambda: hvd.DistributedGradientTape(weight), "tf.GradientTape")


def partial_tape_and_optimizer() -> None:
    """Gradients of local layers stay those of their rank, over the number of ranks."""
    rank, size = hvd.rank(), hvd.size()
    model = model_of(2)
    local = model.layers[0]
    images = np.full((4, 6), rank + 1.0, np.float32)

    def gradients(make: Callable[[Any], Any]) -> Any:
        with tf.GradientTape() as recorded:
            loss = tf.reduce_sum(model(images))
        return make(recorded).gradient(loss, model.trainable_variables)

    own = gradients(lambda tape: tape)
    for scales in (True, False):
        mixed = gradients(
            lambda tape, scales=scales: hvd.PartialDistributedGradientTape(
                tape, local_layers=local, scale_local_gradients=scales
            )
        )
        for index in (0, 1):
            close(mixed[index], own[index] / (size if scales else 1))
        close(mixed[2], hvd.allreduce(own[2]))
    expect(ValueError, lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3]), "Layer")
    optimizer = hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[local])
    before = model.get_weights()
    optimizer.apply_gradients(zip(own, model.trainable_variables, strict=True))
    close(model.get_weights()[0], before[0] - own[0] / size, 1e-5)
    close(model.get_weights()[2], before[2] - hvd.allreduce(own[2]), 1e-5)


def learning_rates_and_metrics() -> None:
    rank, size = hvd.rank(), hvd.size()
    seen: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(float(np.asarray(self.model.optimizer.learning_rate)))

    model = compiled(model_of(1), hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.4)))
    images, labels = part()
    calls = [
        hvd_keras.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2),
        hvd_keras.callbacks.LearningRateScheduleCallback(0.4, multiplier=0.1, start_epoch=2),
        hvd_keras.callbacks.MetricAverageCallback(),
        Watch(),
    ]
    history = model.fit(
        images, labels, batch_size=12 // size, epochs=4, shuffle=False, verbose=0, callbacks=calls
    ).history
    warm = [0.4 / size * ((step + 1) / 4 * (size - 1) / 2 + 1) for step in range(8)]
    close(seen[:8], warm, 1e-5)
    close(seen[8:], [0.4] * 4 + [0.04] * 4, 1e-5)
    close(history["lr"], [warm[3], warm[7], 0.4, 0.04], 1e-5)
    assert rank >= 0
    for name in ("loss", "accuracy"):
        close(hvd.allreduce(tf.constant(history[name]), op=hvd.Max), history[name], 1e-6)
    late = hvd_keras.callbacks.LearningRateWarmupCallback(0.1)
    late.params = {}
    expect(ValueError, late.on_train_begin, "steps_per_epoch")


def batch_normalization() -> None:
    """Statistics and gradients are those of the whole batch; ranks' parts may differ."""
    rank, size = hvd.rank(), hvd.size()
    whole = np.random.default_rng(1).normal(size=(4 * size + 2, 5)).astype(np.float32) * 3 + 7
    start, stop = 4 * rank, 4 * (rank + 1) + (2 if rank == size - 1 else 0)
    alone, shared = keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    weights = np.arange(5.0, dtype=np.float32)

    def run(layer: Any, values: np.ndarray) -> tuple[Any, list[Any]]:
        x = tf.convert_to_tensor(values)
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, training=True)
            loss = tf.reduce_sum(output * output * weights)
        return output, tape.gradient(loss, [x, layer.gamma, layer.beta])

    for call in (run, tf.function(run)):
        expected, (of_x, of_gamma, of_beta) = call(alone, whole)
        output, (own_x, own_gamma, own_beta) = call(shared, whole[start:stop])
        close(output, expected[start:stop], 1e-4)
        close(own_x, of_x[start:stop], 1e-3)
        close(hvd.allreduce(own_gamma, op=hvd.Sum), of_gamma, 1e-3)
        close(hvd.allreduce(own_beta, op=hvd.Sum), of_beta, 1e-3)
        close(shared.moving_mean, alone.moving_mean, 1e-4)
        close(shared.moving_variance, alone.moving_variance, 1e-4)
    expect(ValueError, lambda: hvd.SyncBatchNormalization(fused=True), "fused")


def saved_models() -> None:
    images, labels = part()
    model = compiled(model_of(1), hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    model.fit(images, labels, batch_size=12 // hvd.size(), **FIT)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.keras"))
        model.save(path)
        plain = keras.models.load_model(path)
        assert type(plain.optimizer) is keras.optimizers.Adam
        for module in (hvd_keras, hvd_tf_keras):
            again = module.load_model(path)
            assert isinstance(again.optimizer, keras.optimizers.Adam)
            assert int(again.optimizer.iterations) == 8
            again.fit(images, labels, batch_size=12 // hvd.size(), **FIT)
            for weight in again.get_weights():
                close(hvd.allreduce(weight, op=hvd.Max), weight, 0)
    best = hvd_keras.callbacks.BestModelCheckpoint(save_weights_only=True)
    assert best.save_best_only


def values_of_keras_modules() -> None:
    rank, size = hvd.rank(), hvd.size()
    close(hvd_keras.allreduce([1.0 * rank], op=hvd_keras.Sum), [size * (size - 1) / 2])
    close(hvd_keras.allgather([rank]), range(size))
    close(hvd_tf_keras.broadcast([rank + 1.0], 0), [1.0])
    close(hvd_tf_keras.reducescatter([1.0] * size, op=hvd_keras.Sum), [size])
    expect(RuntimeError, lambda: hvd_keras.broadcast_global_variables(0), "eager")


def states() -> None:
    """TensorFlowState and TensorFlowKerasState: what sync(), save() and restore() do."""
    rank = hvd.rank()
    variable = tf.Variable(float(rank + 5))
    state = hvd.elastic.TensorFlowState([variable], batch=rank)
    state.sync()
    assert (float(variable), state.batch) == (5.0, 0)
    variable.assign(8.0)
    state.batch = 3
    state.save()
    variable.assign(9.0)
    state.batch = 4
    state.restore()
    assert (float(variable), state.batch) == (8.0, 3)
    model = compiled(model_of(rank), hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    kept = hvd_keras.elastic.KerasState(model, epoch=rank)
    kept.sync()
    same_weights(model, model_of(0))
    before = model.get_weights()
    images, labels = part()
    calls = [
        hvd_keras.elastic.UpdateBatchStateCallback(state),
        hvd_keras.elastic.UpdateEpochStateCallback(kept),
        hvd_keras.elastic.CommitStateCallback(kept, batches_per_commit=100),
    ]
    model.fit(images, labels, batch_size=12 // hvd.size(), **FIT, callbacks=calls)
    assert (state.batch, kept.epoch) == (0, 2)
    after = model.get_weights()
    model.set_weights(before)
    kept.restore()
    close(model.get_weights()[0], after[0], 0)
    expect(ValueError, lambda: hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(2)])), "built")

    @hvd.elastic.run
    def train(held: Any) -> int:
        return int(held.epoch)

    assert train(kept) == 2


def tensorflow_1() -> None:
    """A session with an optimizer of TensorFlow 1."""
    rank, size = hvd.rank(), hvd.size()
    with tf.Graph().as_default():
        weight = tf.compat.v1.get_variable("weight", initializer=float(rank))
        loss = weight * (rank + 1.0)
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        step = optimizer.minimize(loss)
        with tf.compat.v1.train.MonitoredSession(hooks=[hvd.BroadcastGlobalVariablesHook(size - 1)]) as session:
            session.run(step)
            assert abs(session.run(weight) - (size - 1 - (size + 1) / 2)) < 1e-6
    expect(
        NotImplementedError,
        lambda: hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2),
        "TensorFlow 1",
    )


def many_steps_leave_nothing_of_horovod() -> None:
    weight = tf.Variable(tf.ones([10_000]))

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        gradient = hvd.DistributedGradientTape(tape).gradient(loss, [weight])[0]
        weight.assign_sub(0.0 * gradient + 0.0 * tf.reduce_sum(hvd.allgather(gradient)))

    import resource

    for _ in range(300):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1000):
        step()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000
    assert library().pending() == 0


def _keras_2_without_eager_execution() -> None:
    """Keras as TensorFlow 1 had it, in a graph: equal weights from different seeds, and metrics of all ranks."""
    tf.compat.v1.disable_eager_execution()
    rank, size = hvd.rank(), hvd.size()
    tf_keras = importlib.import_module("tf_keras")
    tf_keras.utils.set_random_seed(rank)
    model = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(6,))])
    optimizer = hvd_tf_keras.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9))
    model.compile(optimizer, "mse")
    callbacks = [
        hvd_tf_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_tf_keras.callbacks.MetricAverageCallback(),
        hvd_tf_keras.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, steps_per_epoch=3),
    ]
    images, labels = IMAGES[rank::size], LABELS[rank::size].astype(np.float32)[:, None]
    history = model.fit(images, labels, batch_size=8, epochs=3, verbose=0, callbacks=callbacks).history
    assert hvd.allgather_object(history["loss"]) == [history["loss"]] * size
    for weights in hvd.allgather_object(model.get_weights()):
        for one, other in zip(weights, model.get_weights(), strict=True):
            close(one, other, 0)


def _a_rank_that_skips_a_variable() -> None:
    """Not the same gradients on all ranks, and one of them leaves: the other is told of which, and who."""
    rank = hvd.rank()
    variables = [tf.Variable(tf.ones([20_000]), name="first"), tf.Variable(tf.ones([20_000]), name="second")]
    with tf.GradientTape(persistent=True) as recorded:
        loss = tf.add_n([tf.reduce_sum(each) for each in variables])
    sources = variables if rank == 0 else variables[:1]
    tape = hvd.DistributedGradientTape(recorded)
    if rank == 0:
        expect(tf.errors.AbortedError, lambda: tape.gradient(loss, sources), "gradient.1.second", "worker 1")
    else:
        tape.gradient(loss, sources)


def _dead_rank() -> None:
    """A lost rank is HorovodInternalError's reason; a job that is not elastic ends with it."""
    last = hvd.size() - 1
    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)], number=0)
    step = tf.function(lambda: hvd.allreduce(tf.ones([10]), name="loss"))

    @hvd.elastic.run
    def train(held: Any) -> None:
        for number in range(1_000_000):
            if number == 5:
                begun.append(time.monotonic())
                if hvd.rank() == last:
                    os._exit(9)
            step()

    begun: list[float] = []
    with_error: list[BaseException] = []
    try:
        train(state)
    except Exception as error:
        with_error.append(error)
    assert isinstance(with_error[0].__cause__, HorovodInternalError), with_error
    assert f"worker {last}" in str(with_error[0])
    assert time.monotonic() - begun[0] < 5


if __name__ == "__main__":
    hvd.init()
    main(sys.argv[1:], globals() | {"sagemakers_tape": sagemakers_tape, "many_gradients": many_gradients})
