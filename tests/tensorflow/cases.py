"""What each rank does in test_tensorflow.py: `cases.py NAME ...` runs them one after the other and says how each went.

herringrun starts it. A rank that fails in a case goes on with the next one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import tensorflow as tf

if "one_thread" in sys.argv:
    tf.config.threading.set_inter_op_parallelism_threads(1)

import herring
import herring.tensorflow as hvd
from herring.tensorflow._ops import library
from herring.tensorflow._pack import pack, unpack

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from surroundings import server_pids

FLOATS = [tf.float32, tf.float64, tf.float16, tf.bfloat16]
INTEGERS = [tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8]


def expect(kind: type[BaseException], call: Callable[[], object], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def close(value: tf.Tensor, wanted: object, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(np.asarray(value, np.float64), np.asarray(wanted, np.float64), tolerance, tolerance)


def every_dtype_and_operation() -> None:
    rank, size = hvd.rank(), hvd.size()
    wanted = {"sum": sum(range(1, size + 1)), "min": 1, "max": size, "average": (size + 1) / 2}
    for dtype in FLOATS + INTEGERS:
        for op, value in wanted.items():
            result = hvd.oob_allreduce(tf.cast(tf.fill([3, 2], rank + 1), dtype), op=op)
            assert (result.dtype, result.shape) == (dtype, (3, 2))
            close(tf.cast(result, tf.float64), np.full((3, 2), value if dtype in FLOATS else int(value)))


def every_shape() -> None:
    rank, size = hvd.rank(), hvd.size()
    for shape in ([], [0], [3, 0, 2], [1], [2] * 10, [1000, 1001]):
        result = hvd.oob_allreduce(tf.fill(shape, rank + 1.0), op="sum")
        assert result.shape == shape
        close(result, np.full(shape, sum(range(1, size + 1))))


def packed_as_tensorflow_does() -> None:
    """Ranks may pack in either way: the same vector, and back. And what does not fit is an error."""
    ops = library().ops
    random = np.random.default_rng(5)
    for dtype in FLOATS + INTEGERS + [tf.bool]:
        for shapes in ([()], [(0,), (3, 0)], [(3,), (), (0, 4), (2, 3, 4), (1,), (10_001,)]):
            values = [tf.cast(random.integers(0, 2, shape), dtype) for shape in shapes]
            wanted = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
            for call in (lambda each: each, tf.function):
                packed = call(pack)(values)
                assert packed.numpy().tobytes() == wanted.numpy().tobytes(), (dtype, shapes)
                for result, value in zip(call(unpack)(packed, values), values, strict=True):
                    assert (result.shape, result.numpy().tobytes()) == (value.shape, value.numpy().tobytes())
    for shapes, said in (([1, 2], "the shapes have 2 elements, and there are 3"), ([1, 4], "have 4 elements")):
        expect(tf.errors.InvalidArgumentError, lambda s=shapes: ops.herring_unpack(tf.ones(3), s, N=1), said)
    said = "not the shapes of 1 tensor"
    for shapes in ([], [1], [2, 3], [-1, 3], [1, -3], [0, 1, 2], [1, 2, 1, 1]):
        expect(tf.errors.InvalidArgumentError, lambda s=shapes: ops.herring_unpack(tf.ones(3), s, N=1), said)


def strings_and_complex_numbers_are_refused() -> None:
    expect(tf.errors.UnimplementedError, lambda: hvd.oob_allreduce(tf.complex(1.0, 2.0)), "complex64", "float32")
    expect(tf.errors.UnimplementedError, lambda: hvd.oob_allreduce(tf.constant(["text"])), "string")
    variables = [tf.Variable(1.0), tf.Variable("text")]
    expect(tf.errors.UnimplementedError, lambda: hvd.broadcast_variables(variables, 0), "variable.1.")
    assert library().pending() == 0

    def wrong() -> tf.Tensor:
        return hvd.oob_allreduce(tf.ones(1), op="mean")

    for call in (wrong, tf.function(wrong)):  # What TensorFlow makes of an error in a function is of its kind still.
        expect(herring.InvalidArgumentError, call, "'mean'", "AVERAGE")
    expect(herring.InvalidArgumentError, lambda: hvd.broadcast(tf.ones(1), 7), "7", "from 0 to")


def in_a_function() -> None:
    """Without names, constants among them, and with another shape later."""
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(1, size + 1))

    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        doubled = hvd.oob_allreduce(2 * value, op="sum")
        assert doubled.shape == value.shape
        return doubled + hvd.oob_allreduce(tf.constant(1.0), op="sum")

    completed = herring.stats()["ops_completed"]
    for number in range(5):
        close(step(tf.fill([3], (rank + 1.0) * number)), np.full(3, 2 * total * number + size))
    if size > 1:  # A job of one process counts none.
        assert herring.stats()["ops_completed"] - completed == 10, "a constant was reduced once for all"
    close(step(tf.fill([2, 2], rank + 1.0)), np.full((2, 2), 2 * total + size))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def unknown(value: tf.Tensor) -> tf.Tensor:
        return hvd.oob_allreduce(value, op="max")

    for length in (1, 5, 0):
        close(unknown(tf.fill([length], rank + 1.0)), np.full(length, size))


def control_flow() -> None:
    rank, size = hvd.rank(), hvd.size()

    @tf.function
    def step(number: tf.Tensor) -> tf.Tensor:
        value = tf.fill([2], tf.cast(rank, tf.float32))
        if number % 2 == 0:
            value = hvd.oob_allreduce(value + 1.0, op="sum", name="even")
        for _ in tf.range(number):
            value = hvd.oob_allreduce(value, op="average", name="loop")
        return value

    for number in range(6):
        start = size * (size + 1) / 2 if number % 2 == 0 else (size - 1) / 2 if number else 0.0
        close(step(tf.constant(number)), np.full(2, start))


def unused_results_are_reduced_all_the_same() -> None:
    @tf.function
    def step() -> tf.Tensor:
        hvd.oob_allreduce(tf.ones(3), op="sum")
        return tf.constant(1.0)

    completed = herring.stats()["ops_completed"]
    step()
    step()
    assert herring.stats()["ops_completed"] - completed == 2


def gradients_travel_while_others_are_computed() -> None:
    """The second tensor is there when the first has been submitted, not before."""

    def slow(value: np.ndarray) -> np.ndarray:
        limit = time.monotonic() + 20
        while library().pending() == 0:
            assert time.monotonic() < limit, "the first was not submitted"
            time.sleep(0.001)
        return value

    from herring.tensorflow._ops import reduce_all

    @tf.function
    def step(value: tf.Tensor) -> list[tf.Tensor]:
        late = tf.numpy_function(slow, [value], tf.float32, stateful=False)
        late.set_shape([4])
        return reduce_all([late, value], ["late", "early"], "sum")

    for result in step(tf.ones(4)):
        close(result, np.full(4, hvd.size()))


def gradients_of_reductions() -> None:
    size = hvd.size()
    for op, wanted in (("sum", size), ("average", 1.0)):
        variable = tf.Variable([1.0, 2.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hvd.oob_allreduce(variable * 3.0, op=op))
        close(tape.gradient(loss, variable), np.full(2, 3.0 * wanted))
    variable = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(hvd.oob_allreduce(variable * 1.0, op="max"))
    expect(herring.InvalidArgumentError, lambda: tape.gradient(loss, variable), "'max'", "SUM")


def tape() -> None:
    rank, size = hvd.rank(), hvd.size()
    weight, unused, table = tf.Variable([2.0, 3.0]), tf.Variable(1.0), tf.Variable(tf.ones([4, 2]))

    def gradients() -> dict[str, tf.Tensor]:
        with tf.GradientTape() as recorded:
            rows = tf.gather(table, [rank])
            loss = tf.reduce_sum(weight * weight) * (rank + 1.0) + tf.reduce_sum(rows)
        distributed = hvd.DistributedGradientTape(recorded)
        return distributed.gradient(loss, {"weight": weight, "unused": unused, "table": table})

    for call in (gradients, tf.function(gradients)):
        result = call()
        close(result["weight"], np.array([4.0, 6.0]) * (size + 1) / 2)
        assert result["unused"] is None
        wanted = np.zeros((4, 2))
        wanted[:size] = 1 / size
        close(result["table"], wanted)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as recorded:
        loss = weight[0] * (rank + 1.0)
    for _ in range(2):
        close(recorded.gradient(loss, weight), [(size + 1) / 2, 0.0])
    assert recorded.watched_variables() == (weight,)
    halved = hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.fp16, op=hvd.ReduceOp.SUM)
    with halved:
        loss = tf.reduce_sum(weight * (rank + 1.0))
    result = halved.gradient(loss, [weight])[0]
    assert result.dtype == tf.float32
    close(result, np.full(2, size * (size + 1) / 2))
    expect(herring.InvalidArgumentError, lambda: hvd.DistributedGradientTape(weight), "tf.GradientTape")


def many_gradients() -> None:
    """Small and large ones of two dtypes, scalars, empty ones, and shapes that a graph does not know."""
    rank, size = hvd.rank(), hvd.size()
    shapes: list[list[int]] = [[3], [], [0, 4], [30_000], [2, 5], [100_000], [16_000], [7, 7]] * 4
    kinds = [tf.float32, tf.float64]
    variables = [
        tf.Variable(tf.ones(shape, kinds[index // 3 % 2]), name=f"weight{index}") for index, shape in enumerate(shapes)
    ]

    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as recorded:
            losses = [
                tf.cast(tf.reduce_sum(each), tf.float32) * (rank + 1.0) * index for index, each in enumerate(variables)
            ]
            loss = tf.add_n(losses)
        return hvd.DistributedGradientTape(recorded, op="sum").gradient(loss, variables)

    for call in (gradients, tf.function(gradients)):
        for index, (gradient, variable) in enumerate(zip(call(), variables, strict=True)):
            assert (gradient.shape, gradient.dtype) == (variable.shape, variable.dtype)
            close(gradient, np.full(variable.shape, index * size * (size + 1) / 2))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def unknown(value: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as recorded:
            recorded.watch(value)
            loss = tf.reduce_sum(value * value)
        return hvd.DistributedGradientTape(recorded).gradient(loss, [value])[0]

    close(unknown(tf.ones(5)), np.full(5, 2.0))


def data(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.normal(size=(count, 8)).astype("float32"), random.normal(size=(count, 1)).astype("float32")


def model(seed: int) -> object:
    tf.keras.utils.set_random_seed(seed)
    layers = [tf.keras.layers.Dense(16, activation="relu", name="first"), tf.keras.layers.Dense(1, name="last")]
    return tf.keras.Sequential([tf.keras.Input((8,)), *layers])


def keras_fit() -> None:
    """As one process with the whole batch; each rank starts with other weights."""
    rank, size = hvd.rank(), hvd.size()
    inputs, labels = data(96)
    alone, shared = model(1), model(1 if rank == 0 else 50 + rank)
    hvd.broadcast_variables(shared.variables, 0)
    alone.compile(tf.keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=False)
    alone.fit(inputs, labels, batch_size=24, epochs=2, shuffle=False, verbose=0)
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05, momentum=0.9))
    assert type(optimizer).__name__ == "SGD"
    shared.compile(optimizer, "mse", jit_compile=False)
    mine = np.concatenate([np.arange(24)[rank::size] + 24 * step for step in range(4)])
    shared.fit(inputs[mine], labels[mine], batch_size=24 // size, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(alone.variables, shared.variables, strict=True):
        close(other, one, 1e-5)
    if rank == 0:
        shared.save("shared.keras")
        loaded = tf.keras.models.load_model("shared.keras")
        assert type(loaded.optimizer) is tf.keras.optimizers.SGD
    expect(herring.InvalidArgumentError, lambda: hvd.DistributedOptimizer("sgd"), "optimizer of Keras 3")


def what_is_no_optimizer_is_refused() -> None:
    for wrong in (model(1), tf.keras.layers.Dense(1), "sgd", tf.keras.optimizers.SGD):
        expect(
            herring.InvalidArgumentError, lambda wrong=wrong: hvd.DistributedOptimizer(wrong), "must be an optimizer"
        )
    once = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), op="sum")
    expect(herring.InvalidArgumentError, lambda: hvd.DistributedOptimizer(once, op="sum"), "SGD", "already")


def custom_loop() -> None:
    rank, size = hvd.rank(), hvd.size()
    inputs, labels = data(32)
    shared, optimizer = model(3), tf.keras.optimizers.Adam(0.01)
    loss_of = tf.keras.losses.MeanSquaredError()

    @tf.function
    def step(images: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as recorded:
            loss = loss_of(wanted, shared(images, training=True))
        recorded = hvd.DistributedGradientTape(recorded)
        gradients = recorded.gradient(loss, shared.trainable_variables)
        optimizer.apply_gradients(zip(gradients, shared.trainable_variables, strict=True))
        return hvd.oob_allreduce(loss)

    losses = [float(step(inputs[rank::size], labels[rank::size])) for _ in range(20)]
    assert losses[-1] < losses[0]
    for variable in shared.variables:
        close(hvd.oob_allreduce(variable, op="max"), variable, 0.0)
    assert library().pending() == 0


def broadcasts() -> None:
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    variables = [tf.Variable(tf.fill([3], float(rank))), tf.Variable(rank), tf.Variable(rank == root)]
    hvd.broadcast_variables(variables, root)
    assert [np.asarray(each).tolist() for each in variables] == [[root] * 3, root, True]
    value = tf.function(lambda: hvd.broadcast(tf.fill([2], float(rank)), 0))()
    close(value, [0.0, 0.0])
    expect(herring.InvalidArgumentError, lambda: hvd.broadcast_global_variables(0), "broadcast_variables")


def large_results_are_written_where_they_are_read() -> None:
    """Without another copy on this rank (a job of one process counts none)."""
    step = tf.function(lambda value: hvd.oob_allreduce(value, op="sum", name="large"))
    value = tf.ones([300_000])
    for call in (step, lambda each: hvd.broadcast(each, 0)):
        before = herring.stats()
        for _ in range(5):
            call(value)
        after = herring.stats()
        wanted = 5 if hvd.local_size() > 1 else 0
        assert after["zero_copy_ops"] - before["zero_copy_ops"] == wanted
        assert after["staged_ops"] == before["staged_ops"]


def large_results_belong_to_who_has_them() -> None:
    """Nothing writes into one, later operations neither, and no operation into what it reads."""
    rank, size = hvd.rank(), hvd.size()
    total, length = sum(range(1, size + 1)), 200_000
    constant, variable = tf.fill([length], rank + 1.0), tf.Variable(tf.fill([length], rank + 1.0))

    @tf.function
    def step(number: tf.Tensor) -> list[tf.Tensor]:
        made = tf.fill([length], (rank + 1.0) * number)  # Nobody but the reduction has it, at first.
        reduced = hvd.oob_allreduce(made, op="sum", name="made")
        again = hvd.oob_allreduce(reduced, op="average", name="again")  # Of a result, which others read as well.
        of_variable = hvd.oob_allreduce(variable, op="sum", name="variable")
        of_constant = hvd.oob_allreduce(constant, op="sum", name="constant")
        changed = tf.identity(reduced) * 0.0 - 1.0
        return [made, reduced, again, of_variable, of_constant, changed]

    kept = []
    for number in range(12):
        results = step(tf.constant(float(number)))
        kept.append((number, results))
        copy = tf.Variable(results[1])
        copy.assign(results[2])
        copy.assign_add(tf.ones([length]))
        copy.assign_sub(results[1])
        assert (copy.numpy() == 1).all()
        eager = hvd.oob_allreduce(results[1], op="max")
        assert (eager.numpy() == total * number).all()
        del eager
    for number, results in kept:
        values = [(rank + 1) * number, total * number, total * number, total, total, -1]
        for place, (result, value) in enumerate(zip(results, values, strict=True)):
            assert (result.numpy() == value).all(), (number, place, result)
    assert (variable.numpy() == rank + 1).all()
    assert (constant.numpy() == rank + 1).all()
    for dtype in (tf.float16, tf.bfloat16, tf.float64, tf.int8, tf.int32, tf.int64):
        for shape in ([65_536], [3, 50_001], [1, 70_000, 1]):
            result = hvd.oob_allreduce(tf.cast(tf.fill(shape, rank + 1), dtype), op="sum")
            assert (result.dtype, result.shape) == (dtype, shape)
            assert (tf.cast(result, tf.int64).numpy() == total).all()
    gathered = hvd.allgather(tf.fill([30_000 + rank, 2], rank))
    assert gathered.numpy()[:, 0].tolist() == [each for each in range(size) for _ in range(30_000 + each)]


def large_gradients() -> None:
    """Of a variable that the same step changes and reads; with an optimizer; and through a reduction."""
    rank, size = hvd.rank(), hvd.size()
    weight = tf.Variable(tf.ones([100_000]))
    optimizer = tf.keras.optimizers.SGD(0.5, momentum=0.5)

    @tf.function
    def step() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as recorded:
            loss = tf.reduce_sum(weight * (rank + 1.0))
        gradient = hvd.DistributedGradientTape(recorded, op="sum").gradient(loss, weight)
        optimizer.apply_gradients([(gradient, weight)])
        return gradient, weight.read_value()

    total, velocity, value, kept = size * (size + 1) / 2, 0.0, 1.0, []
    for _ in range(6):
        velocity = 0.5 * velocity - 0.5 * total
        value += velocity
        gradient, after = step()
        kept.append(gradient)
        close(after, np.full(100_000, value))
    for gradient in kept:
        close(gradient, np.full(100_000, total))
    with tf.GradientTape() as recorded:
        reduced = hvd.oob_allreduce(weight * 1.0, op="sum", name="loss")
        loss = tf.reduce_sum(reduced * reduced)
    close(recorded.gradient(loss, weight), np.full(100_000, 2 * value * size * size), 1e-5)


def a_large_result_after_an_error() -> None:
    """And what was reduced before it is as it was."""
    rank, size = hvd.rank(), hvd.size()
    step = tf.function(lambda value: hvd.oob_allreduce(value, op="sum", name="retried"))
    before = step(tf.fill([100_000], 1.0))
    for number in range(3):
        wrong = tf.fill([100_000 + 4096 * rank], 7.0)
        expect(tf.errors.FailedPreconditionError, lambda wrong=wrong: step(wrong), "retried", "rank 0")
        assert (wrong.numpy() == 7).all()
        right = tf.fill([100_000], float(number))
        assert (step(right).numpy() == size * number).all()
        assert (right.numpy() == number).all()
    assert (before.numpy() == size).all()
    assert library().pending() == 0


def full_arena() -> None:
    """HERRING_ARENA_BYTES: results that do not fit are in ordinary memory, and right."""
    size = hvd.size()
    results = [hvd.oob_allreduce(tf.fill([200_000], float(number)), op="sum") for number in range(30)]  # 24 MB
    for number, result in enumerate(results):
        assert (result.numpy() == number * size).all()
    hvd.shutdown()
    assert (results[7].numpy() == 7 * size).all()  # They outlive the job.
    results = results[8:]
    hvd.init()
    again = [hvd.oob_allreduce(tf.fill([200_000], float(number)), op="sum") for number in range(30)]
    for number, result in enumerate(results, 8):
        assert (result.numpy() == number * size).all()
    for number, result in enumerate(again):
        assert (result.numpy() == number * size).all()


def tensorflow_1_session() -> None:
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("weight", initializer=float(hvd.rank()))
        hook = hvd.BroadcastGlobalVariablesHook(1)
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            assert session.run(variable) == 1.0


def mismatches_are_named_on_all_ranks() -> None:
    rank = hvd.rank()
    step = tf.function(lambda value: hvd.oob_allreduce(value, op="sum", name="loss"))
    for call in (lambda value: hvd.oob_allreduce(value, op="sum"), step):
        wrong = tf.ones([3 + rank])
        expect(tf.errors.FailedPreconditionError, lambda call=call, wrong=wrong: call(wrong), "[3]", "[4]", "rank 0")
        close(call(tf.ones(3)), np.full(3, hvd.size()))
    variables = [tf.Variable(tf.ones([2]), name="one"), tf.Variable(tf.ones([20_000 + rank]), name="two")]
    with tf.GradientTape() as recorded:
        loss = tf.add_n([tf.reduce_sum(each) for each in variables])
    recorded = hvd.DistributedGradientTape(recorded)
    expect(tf.errors.FailedPreconditionError, lambda: recorded.gradient(loss, variables), "gradient.1.two")
    assert library().pending() == 0


def many_steps_leave_nothing() -> None:
    value = tf.ones([10_000])
    step = tf.function(lambda: [hvd.oob_allreduce(value * index, op="sum", name=str(index)) for index in range(4)])
    import resource

    def grown() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(300):
        step()
    before = grown()
    for _ in range(1500):
        step()
    assert library().pending() == 0
    assert grown() - before < 60_000, "KB in 1,500 steps, which make 480,000 KB of tensors"


def compiled_by_xla() -> None:
    """XLA has no such operation: said so, no hang."""
    step = tf.function(lambda value: hvd.oob_allreduce(value, op="sum", name="x"), jit_compile=True)
    expect(tf.errors.InvalidArgumentError, lambda: step(tf.ones(3)), "Herring")


def tf_config_is_known() -> None:
    """What TensorFlow reads from it is what Herring says."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    addresses = [each for kind in ("chief", "worker") for each in resolver.cluster_spec().as_dict().get(kind, [])]
    place = resolver.task_id + (1 if resolver.task_type == "worker" and "chief" in resolver.cluster_spec().jobs else 0)
    assert (len(addresses), place) == (hvd.size(), hvd.rank())
    assert len(set(addresses)) == hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())


def starting_again() -> None:
    """Graphs that are there go to the new job, whoever joins it."""
    step = tf.function(lambda: hvd.oob_allreduce(tf.ones(2), op="sum", name="again"))
    for start in (hvd.init, herring.init):
        close(step(), np.full(2, hvd.size()))
        hvd.shutdown()
        expect(herring.ShutdownError, lambda: hvd.oob_allreduce(tf.ones(1)), "init()")
        expect(tf.errors.FailedPreconditionError, step, "shut down")
        start()
        close(step(), np.full(2, hvd.size()))


def one_thread() -> None:
    """With one inter-op thread, and calls that a graph may run in any order."""
    variables = [tf.Variable(tf.fill([100 + index], float(index))) for index in range(16)]

    @tf.function
    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as recorded:
            loss = tf.add_n([tf.reduce_sum(each * each) for each in variables])
        gradients = hvd.DistributedGradientTape(recorded).gradient(loss, variables)
        others = [hvd.oob_allreduce(tf.reduce_sum(each), op="sum") for each in reversed(gradients)]
        return [tf.reduce_sum(tf.stack(others))]

    wanted = hvd.size() * sum(2 * index * (100 + index) for index in range(16))
    for _ in range(20):
        close(step()[0], wanted, 1e-5)


def dead_rank() -> None:
    """The last rank dies in the middle of a step; the others are told who."""
    step = tf.function(lambda: hvd.oob_allreduce(tf.ones(10), op="sum", name="loss"))
    step()
    last = hvd.size() - 1
    if hvd.rank() == last:
        os._exit(9)
    begun = time.monotonic()
    expect(tf.errors.AbortedError, lambda: [step() for _ in range(1_000_000)], f"worker {last}")
    assert time.monotonic() - begun < 5


def lost_server() -> None:
    """One of two servers is killed while a tf.function trains: the same sums in every step."""
    rank, size = hvd.rank(), hvd.size()
    pids = server_pids()
    assert sorted(pids) == [0, 1]
    values = [tf.fill([300_000], rank + 1.0), tf.fill([10], rank + 1.0), tf.fill([50_000], rank + 1.0)]

    @tf.function
    def step(number: tf.Tensor) -> list[tf.Tensor]:
        return [hvd.oob_allreduce(value * number, op="sum") for value in values]

    for number in range(1, 40):
        if number == 10 and rank == 0:
            os.kill(pids[1], signal.SIGKILL)
        for result in step(tf.constant(float(number))):
            assert (result.numpy() == number * sum(range(1, size + 1))).all(), number
        time.sleep(0.01)


def main(names: list[str], cases: dict[str, Callable[[], None]]) -> None:
    """Runs those of the cases that are named."""
    if "before_init" in names:
        names.remove("before_init")
        for call in (hvd.oob_allreduce, tf.function(lambda value: hvd.oob_allreduce(value))):
            expect(herring.ShutdownError, lambda call=call: call(tf.ones(1)), "init()")
        print(f"<{os.environ['RANK']} before_init ok>", flush=True)
    hvd.init()
    rank = hvd.rank()
    failed = False
    for name in names:
        try:
            cases[name]()
            print(f"<{rank} {name} ok>", flush=True)
        except BaseException:
            failed = True
            print(f"<{rank} {name} failed>\n{traceback.format_exc()}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:], globals())
