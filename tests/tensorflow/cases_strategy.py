"""What each rank does in test_strategy.py: `cases_strategy.py NAME ...`, as cases.py."""

from __future__ import annotations

import importlib.util
import os
import signal
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
from cases import close, expect, main

import herring
import herring.tensorflow as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from surroundings import server_pids

GENERATOR = np.random.default_rng(7)
IMAGES = GENERATOR.normal(size=(48, 6)).astype(np.float32)
LABELS = (IMAGES.sum(1) > 0).astype(np.int64)


def classifier(*layers: Any) -> Any:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input((6,)), *layers, keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]
    )


def compiled(model: Any, optimizer: Any, **options: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False, **options)
    return model


def weights_of(model: Any) -> list[np.ndarray]:
    return [np.asarray(weight) for weight in model.get_weights()]


def same_as_alone(optimizer: Callable[[], Any], batch_size: int = 12, tolerance: float = 1e-6, **options: Any) -> Any:
    """fit() on all ranks with the strategy, and in each process alone: weights, losses, metrics."""
    alone = compiled(classifier(), optimizer(), **options)
    expected = alone.fit(IMAGES, LABELS, batch_size=batch_size, epochs=3, shuffle=False, verbose=0).history
    strategy = hvd.HerringStrategy()
    with strategy.scope():
        model = compiled(classifier(), optimizer(), **options)
    history = model.fit(IMAGES, LABELS, batch_size=batch_size, epochs=3, shuffle=False, verbose=0).history
    for mine, theirs in zip(weights_of(model), weights_of(alone), strict=True):
        close(mine, theirs, tolerance)
    for name, values in expected.items():
        close(history[name], values, 1e-5)
    own = model.evaluate(IMAGES, LABELS, batch_size=batch_size, verbose=0)
    close(own, alone.evaluate(IMAGES, LABELS, batch_size=batch_size, verbose=0), 1e-5)
    return model


def fit_equals_one_process() -> None:
    same_as_alone(lambda: keras.optimizers.SGD(0.1, momentum=0.9))


def fit_with_adam() -> None:
    same_as_alone(lambda: keras.optimizers.Adam(0.01), tolerance=2e-6)


def fit_with_ema_and_weight_decay() -> None:
    same_as_alone(
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, use_ema=True, ema_overwrite_frequency=2), tolerance=2e-6
    )


def fit_with_gradient_accumulation() -> None:
    same_as_alone(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


def fit_several_steps_at_once() -> None:
    same_as_alone(lambda: keras.optimizers.SGD(0.1), steps_per_execution=2)


def fit_eagerly() -> None:
    same_as_alone(lambda: keras.optimizers.SGD(0.1), run_eagerly=True)


def uneven_last_batch() -> None:
    """48 rows in batches of 20: the last has 8. Metrics are exact, and nobody waits for a batch that does not come."""
    strategy = hvd.HerringStrategy()
    with strategy.scope():
        model = compiled(classifier(), keras.optimizers.SGD(0.0))
    history = model.fit(IMAGES, LABELS, batch_size=20, epochs=2, shuffle=False, verbose=0).history
    alone = compiled(classifier(), keras.optimizers.SGD(0.0))
    alone.set_weights(weights_of(model))
    loss, accuracy = alone.evaluate(IMAGES, LABELS, batch_size=48, verbose=0)
    close(history["accuracy"], [accuracy] * 2)
    close(history["loss"], [loss] * 2, 1e-5)
    close(
        model.evaluate(IMAGES[:1], LABELS[:1], verbose=0)[0], alone.evaluate(IMAGES[:1], LABELS[:1], verbose=0)[0], 1e-5
    )


def predict_is_the_local_part() -> None:
    strategy = hvd.HerringStrategy()
    with strategy.scope():
        model = compiled(classifier(), "sgd")
    rank, size = hvd.rank(), hvd.size()
    mine = model.predict(IMAGES[:12], batch_size=12, verbose=0)
    whole = model(IMAGES[:12]).numpy()
    close(mine, whole[12 * rank // size : 12 * (rank + 1) // size], 1e-5)
    close(hvd.allgather(mine), whole, 1e-5)


def equal_start_from_different_seeds() -> None:
    strategy = hvd.HerringStrategy()
    keras.utils.set_random_seed(hvd.rank())
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        plain = tf.Variable(tf.random.normal([4]))
        text = tf.Variable("not sent")
    for weight in [*weights_of(model), plain.numpy()]:
        close(hvd.oob_allreduce(weight, op="max"), weight, 0)
        close(hvd.oob_allreduce(weight, op="min"), weight, 0)
    assert text.numpy() == b"not sent"


def custom_loop() -> None:
    """As TensorFlow's guides write it."""
    rank, size = hvd.rank(), hvd.size()
    strategy = hvd.HerringStrategy()
    assert strategy.num_replicas_in_sync == size
    assert strategy.extended.should_checkpoint == (rank == 0)
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(12)
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert strategy.experimental_distribute_dataset(distributed) is distributed
    with strategy.scope():
        weight = tf.Variable(tf.ones([6, 2]) * (rank + 1))
        seen = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        def replica(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, images @ weight)
                loss = tf.nn.compute_average_loss(each, global_batch_size=12)
            gradient = tape.gradient(loss, weight)
            context = tf.distribute.get_replica_context()
            assert context.num_replicas_in_sync == size
            weight.assign_sub(context.all_reduce("SUM", gradient))
            seen.assign_add(tf.cast(tf.shape(images)[0], tf.float32))
            return loss

        return strategy.reduce("SUM", strategy.run(replica, args=(images, labels)), axis=None)

    alone = tf.Variable(tf.ones([6, 2]))
    for (images, labels), (every, all_labels) in zip(distributed, dataset, strict=True):
        loss = step(images, labels)
        with tf.GradientTape() as tape:
            expected = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(all_labels, every @ alone))
        alone.assign_sub(tape.gradient(expected, alone))
        close(loss, expected, 1e-5)
    close(weight, alone, 1e-5)
    close(tf.convert_to_tensor(seen), len(IMAGES))
    close(seen + 1.0, len(IMAGES) + 1)
    close(seen.numpy(), len(IMAGES) / size)  # Its own part.


def reductions_and_gathers() -> None:
    rank, size = hvd.rank(), hvd.size()
    strategy = hvd.HerringStrategy()
    value = strategy.run(lambda: tf.fill([rank + 1, 2], float(rank)))
    total = sum(range(1, size + 1))
    close(strategy.reduce("SUM", value, axis=0), [sum(each * (each + 1) for each in range(size))] * 2)
    close(strategy.reduce("MEAN", value, axis=0), [sum(each * (each + 1) for each in range(size)) / total] * 2)
    rows = np.concatenate([np.full([each + 1, 2], float(each)) for each in range(size)])
    close(strategy.gather(value, axis=0), rows)
    close(strategy.gather(tf.transpose(value), axis=1), rows.T)
    assert strategy.experimental_local_results(value)[0] is value
    own = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    assert own == rank
    for dtype in (tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.bool):
        gathered = hvd.allgather(tf.cast(tf.fill([2], rank), dtype))
        assert gathered.dtype == dtype
        close(tf.cast(gathered, tf.float64), np.repeat(np.minimum(range(size), 1 if dtype == tf.bool else size), 2))
    bits = np.array([-0.0, np.nan, np.inf], np.float32)
    assert hvd.allgather(bits).numpy().tobytes() == bits.tobytes() * size
    expect(herring.InvalidArgumentError, lambda: hvd.allgather(tf.constant(1.0)), "scalar")
    values = tf.Variable(tf.fill([rank + 1], 1.0))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.allgather(values) * (rank + 1.0))
    close(tape.gradient(loss, values), np.full(rank + 1, total))


def datasets() -> None:
    rank, size = hvd.rank(), hvd.size()
    strategy = hvd.HerringStrategy()

    def rows_of(dataset: Any) -> list[list[int]]:
        return [batch.numpy().tolist() for batch in strategy.experimental_distribute_dataset(dataset)]

    def with_policy(dataset: Any, name: str) -> Any:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, name)
        return dataset.with_options(options)

    numbers = tf.data.Dataset.range(10).batch(6)
    mine = [
        list(range(6 * rank // size, 6 * (rank + 1) // size)),
        list(range(6 + 4 * rank // size, 6 + 4 * (rank + 1) // size)),
    ]
    assert rows_of(numbers) == mine
    assert rows_of(with_policy(numbers, "DATA")) == mine
    assert [row for batch in rows_of(with_policy(numbers, "OFF")) for row in batch] == list(range(10))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 * size):
            Path(folder, f"{number}.txt").write_text(f"{number}\n{number}\n")
        files = sorted(str(path) for path in Path(folder).glob("*.txt"))
        lines = with_policy(tf.data.TextLineDataset(files).map(tf.strings.to_number).batch(2 * size), "FILE")
        read = {row for batch in rows_of(lines) for row in batch}
        everybody = hvd.allgather(sorted(read)).numpy().tolist()
        assert len(read) == 2
        assert sorted(everybody) == list(range(2 * size))
    static = strategy.experimental_distribute_dataset(tf.data.Dataset.range(24).batch(12, drop_remainder=True))
    assert static.element_spec.shape == [12 // size]
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3], [4], [5, 6, 7]])).batch(4)
    assert (
        sum(row.nrows().numpy() for row in strategy.experimental_distribute_dataset(ragged))
        == 4 * (rank + 1) // size - 4 * rank // size
    )
    made = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.range(context.num_input_pipelines).shard(size, context.input_pipeline_id)
    )
    assert [each.numpy() for each in made] == [rank]
    expect(herring.InvalidArgumentError, lambda: rows_of(tf.data.Dataset.range(4)), "batch")


def synchronized_batch_normalization() -> None:
    def build() -> Any:
        return classifier(keras.layers.BatchNormalization(synchronized=True))

    alone = compiled(build(), keras.optimizers.SGD(0.1))
    alone.fit(IMAGES, LABELS, batch_size=12, epochs=2, shuffle=False, verbose=0)
    strategy = hvd.HerringStrategy()
    with strategy.scope():
        model = compiled(build(), keras.optimizers.SGD(0.1))
    model.fit(IMAGES, LABELS, batch_size=12, epochs=2, shuffle=False, verbose=0)
    for mine, theirs in zip(weights_of(model), weights_of(alone), strict=True):
        close(mine, theirs, 1e-5)


def one_rank_overflows() -> None:
    """With loss scaling one rank's gradients are not finite: all skip the step, and go on together."""
    rank = hvd.rank()
    strategy = hvd.HerringStrategy()
    with strategy.scope():
        model = compiled(
            classifier(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)
        )
    before = weights_of(model)
    images = np.full_like(IMAGES[:12], np.inf) if rank == 0 else IMAGES[:12]
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    bad = tf.data.Dataset.from_tensor_slices((images, LABELS[:12])).batch(12).with_options(options)
    model.fit(bad, epochs=1, verbose=0)
    for mine, theirs in zip(weights_of(model), before, strict=True):
        close(mine, theirs, 0)
    scale = float(model.optimizer.dynamic_scale.numpy())
    assert scale < 4.0
    close(hvd.oob_allreduce(tf.constant(scale), op="max"), scale, 0)
    model.fit(IMAGES, LABELS, batch_size=12, epochs=1, verbose=0)
    assert any((mine != theirs).any() for mine, theirs in zip(weights_of(model), before, strict=True))


def embeddings() -> None:
    """Sparse gradients."""
    words = np.arange(48).reshape(24, 2) % 10

    def build() -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(2)])
        return compiled(model, keras.optimizers.SGD(0.5))

    alone = build()
    alone.fit(words, LABELS[:24], batch_size=12, epochs=2, shuffle=False, verbose=0)
    with hvd.HerringStrategy().scope():
        model = build()
    model.fit(words, LABELS[:24], batch_size=12, epochs=2, shuffle=False, verbose=0)
    for mine, theirs in zip(weights_of(model), weights_of(alone), strict=True):
        close(mine, theirs, 1e-6)


def saved_models_and_callbacks() -> None:
    rank = hvd.rank()
    strategy = hvd.HerringStrategy()
    with strategy.scope():
        model = compiled(classifier(), keras.optimizers.Adam(0.01))
    with tempfile.TemporaryDirectory() as folder:
        calls = [
            keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=1e9),
            keras.callbacks.BackupAndRestore(str(Path(folder, "backup"))),
            keras.callbacks.ModelCheckpoint(str(Path(folder, "best.weights.h5")), save_weights_only=True),
        ]
        if rank == 0 and importlib.util.find_spec("tensorboard"):
            calls.append(keras.callbacks.TensorBoard(str(Path(folder, "logs"))))
        data = (IMAGES, LABELS)
        fitted = model.fit(*data, validation_data=data, batch_size=12, epochs=5, callbacks=calls, verbose=0)
        assert len(fitted.epoch) == 2, "all ranks stop in the same epoch"
        path = str(Path(folder, "model.keras"))
        model.save(path)
        loaded = keras.models.load_model(path)
        assert type(loaded.optimizer) is keras.optimizers.Adam
        for mine, theirs in zip(weights_of(loaded), weights_of(model), strict=True):
            close(mine, theirs, 0)
        model.export(str(Path(folder, "exported")), verbose=False)
        exported = tf.saved_model.load(str(Path(folder, "exported")))
        close(exported.serve(IMAGES[:4]), model(IMAGES[:4]), 1e-5)
        graph = exported.signatures["serving_default"].graph
        assert not [operation.type for operation in graph.get_operations() if "Herring" in operation.type]
        with strategy.scope():
            again = keras.models.load_model(path)
        again.fit(*data, batch_size=12, epochs=1, verbose=0)
        checkpoint = tf.train.Checkpoint(model=model)
        kept = weights_of(model)
        written = checkpoint.write(str(Path(folder, "checkpoint")))
        model.fit(*data, batch_size=12, epochs=1, verbose=0)
        checkpoint.read(written).expect_partial()
        for mine, theirs in zip(weights_of(model), kept, strict=True):
            close(mine, theirs, 0)


class _StopIn(keras.callbacks.Callback):
    """A job that ends in the middle of an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._epoch:
            raise InterruptedError


def backup_and_restore() -> None:
    """fit() that was cut off in epoch 2 goes on there, with the optimizer's state, and ends where it would have."""
    strategy = hvd.HerringStrategy()
    options = {"batch_size": 12, "epochs": 4, "shuffle": False, "verbose": 0}

    def build(seed: int) -> Any:
        with strategy.scope():
            keras.utils.set_random_seed(seed)
            layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)]
            return compiled(keras.Sequential([keras.Input((6,)), *layers]), keras.optimizers.Adam(0.01))

    whole = build(1)
    whole.fit(IMAGES, LABELS, **options)
    with tempfile.TemporaryDirectory() as folder:
        expect(
            InterruptedError,
            lambda: build(1).fit(
                IMAGES, LABELS, callbacks=[keras.callbacks.BackupAndRestore(folder), _StopIn(2)], **options
            ),
        )
        again = build(2)
        history = again.fit(IMAGES, LABELS, callbacks=[keras.callbacks.BackupAndRestore(folder)], **options)
    assert history.epoch == [2, 3]
    for mine, theirs in zip(weights_of(again), weights_of(whole), strict=True):
        close(mine, theirs, 1e-6)


def keras_2() -> None:
    """tf_keras: the same as in one process."""
    tf_keras = importlib.import_module("tf_keras")

    def build() -> Any:
        tf_keras.utils.set_random_seed(3)
        layers = [tf_keras.layers.Dense(8, "tanh", input_shape=(6,)), tf_keras.layers.Dense(2)]
        model = tf_keras.Sequential(layers)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
        return model

    options = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    alone = build()
    expected = alone.fit(IMAGES, LABELS, **options).history
    with hvd.HerringStrategy().scope():
        model = build()
    history = model.fit(IMAGES, LABELS, **options).history
    for mine, theirs in zip(weights_of(model), weights_of(alone), strict=True):
        close(mine, theirs, 1e-6)
    close(history["accuracy"], expected["accuracy"])
    close(history["loss"], expected["loss"], 1e-5)


def wrong_calls() -> None:
    expect(herring.InvalidArgumentError, lambda: hvd.HerringStrategy(timeout=3), "timeout", "init()")
    strategy = hvd.HerringStrategy()
    other = tf.distribute.OneDeviceStrategy("/cpu:0")
    with other.scope():
        expect(herring.InvalidArgumentError, strategy.scope, "OneDeviceStrategy", "leave that scope")
        expect(herring.InvalidArgumentError, hvd.HerringStrategy, "OneDeviceStrategy")
    with strategy.scope():
        expect(herring.InvalidArgumentError, hvd.HerringStrategy, "scope of HerringStrategy")
        expect(RuntimeError, lambda: other.scope().__enter__(), "Strategy")
    rank, size = hvd.rank(), hvd.size()
    if size > 1:
        with strategy.scope():
            expect(
                tf.errors.FailedPreconditionError, lambda: tf.Variable(tf.zeros([2 + rank]), name="w"), "initial.", "w"
            )
            expect(tf.errors.FailedPreconditionError, lambda: strategy.reduce("SUM", tf.zeros([2 + rank]), axis=None))
    expect(ValueError, lambda: strategy.reduce("MAX", tf.zeros([2]), axis=None), "MAX")


def compiled_by_xla() -> None:
    """XLA has no such operation: said so on all ranks, no hang, and what comes after works."""
    strategy = hvd.HerringStrategy()
    with strategy.scope():
        model = classifier()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="sgd", loss=loss, jit_compile=True)
    expect(
        tf.errors.InvalidArgumentError, lambda: model.fit(IMAGES, LABELS, batch_size=12, verbose=0), "Herring", "XLA"
    )
    same_as_alone(lambda: keras.optimizers.SGD(0.1))


def ranks_without_rows() -> None:
    """A last batch with fewer rows than ranks: some have none of it, and training goes on."""
    strategy = hvd.HerringStrategy()
    with strategy.scope():
        model = compiled(classifier(), keras.optimizers.SGD(0.1))
    history = model.fit(IMAGES[:13], LABELS[:13], batch_size=12, epochs=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    for weight in weights_of(model):
        assert np.isfinite(weight).all()
        close(hvd.oob_allreduce(weight, op="max"), weight, 0)
    history = model.fit(IMAGES, LABELS, batch_size=12, epochs=1, validation_data=(IMAGES[:1], LABELS[:1]), verbose=0)
    assert np.isfinite(history.history["val_loss"]).all()


def each_process_of_a_host_has_a_gpu() -> None:
    from herring.tensorflow._strategy import gpu_of_process

    gpus = ["GPU:0", "GPU:1", "GPU:2"]
    assert [gpu_of_process(gpus, gpus, rank) for rank in range(4)] == ["GPU:0", "GPU:1", "GPU:2", "GPU:0"]
    assert gpu_of_process(gpus, gpus[1:2], 0) is None, "the script has chosen"
    assert gpu_of_process(gpus[:1], gpus[:1], 1) is None
    assert gpu_of_process([], [], 0) is None


def one_thread() -> None:
    """With one inter-op thread."""
    same_as_alone(lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    custom_loop()


class _KillServer(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2 and hvd.rank() == 0 and len(server_pids()) == 2:
            os.kill(server_pids()[1], signal.SIGKILL)


def _lost_server_in_fit() -> None:
    """One of two servers is killed in the middle of fit(): the weights are those of a job that has lost none."""
    options = {"batch_size": 12, "epochs": 5, "shuffle": False, "verbose": 0}
    alone = compiled(classifier(), keras.optimizers.SGD(0.1))
    alone.fit(IMAGES, LABELS, **options)
    with hvd.HerringStrategy().scope():
        model = compiled(classifier(), keras.optimizers.SGD(0.1))
    model.fit(IMAGES, LABELS, callbacks=[_KillServer()], **options)
    for mine, theirs in zip(weights_of(model), weights_of(alone), strict=True):
        close(mine, theirs, 1e-6)


class _DieIn(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 3:
            os._exit(9)


def _dead_rank_in_fit() -> None:
    """The last rank dies in the middle of fit(); the others are told who, at once."""
    last = hvd.size() - 1
    with hvd.HerringStrategy().scope():
        model = compiled(classifier(), "sgd")
    model.fit(IMAGES, LABELS, batch_size=12, verbose=0)
    calls = [_DieIn()] if hvd.rank() == last else []
    begun = time.monotonic()
    expect(
        tf.errors.AbortedError,
        lambda: model.fit(IMAGES, LABELS, batch_size=12, epochs=100_000, callbacks=calls, verbose=0),
        f"worker {last}",
    )
    assert time.monotonic() - begun < 5


if __name__ == "__main__":
    main(sys.argv[1:], globals())
