"""What each rank does in test_horovod.py, as cases.py: Horovod's operations against what they mean."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from cases import close, expect, main

import herring.horovod.tensorflow as hvd
from herring.tensorflow._ops import library

tf.get_logger().setLevel("ERROR")  # Each case traces functions of its own.
FLOATS = [tf.float32, tf.float64, tf.float16, tf.bfloat16]
INTEGERS = [tf.int8, tf.int32, tf.int64, tf.uint8]


def in_both(call: Callable[..., object], *arguments: tf.Tensor) -> list[object]:
    """Its result in eager mode and in a tf.function."""
    return [call(*arguments), tf.function(call)(*arguments)]


def mine(rows: int = 3, rank: int | None = None) -> np.ndarray:
    """Rank's data: whole numbers, so that sums are exact."""
    who = hvd.rank() if rank is None else rank
    return np.random.default_rng(who).integers(1, 9, size=(rows, 2)).astype(np.float32)


def all_of(rows: int = 3) -> np.ndarray:
    return np.stack([mine(rows, rank) for rank in range(hvd.size())])


NAMES = """
init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank
cross_rank is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built
ddl_built ccl_built cuda_built rocm_built Average Sum Adasum Min Max Product Compression ProcessSet
global_process_set add_process_set remove_process_set
"""
OF_TENSORFLOW = """
allreduce grouped_allreduce allgather grouped_allgather broadcast broadcast_ alltoall reducescatter
grouped_reducescatter join barrier rank_op size_op local_rank_op local_size_op process_set_included_op
broadcast_variables broadcast_object broadcast_object_fn allgather_object broadcast_global_variables
BroadcastGlobalVariablesHook DistributedGradientTape PartialDistributedGradientTape DistributedOptimizer
SyncBatchNormalization HorovodInternalError HostsUpdatedInterrupt elastic
"""
OF_KERAS = """
allreduce allgather broadcast reducescatter broadcast_global_variables load_model DistributedOptimizer
PartialDistributedOptimizer callbacks elastic
"""
OF_CALLBACKS = """
BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback
BestModelCheckpoint
"""
OF_ELASTIC = "run KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback"


def names() -> None:
    """What scripts ask for is there."""
    import herring.horovod.keras as keras_face
    import herring.horovod.tensorflow.keras as tf_keras_face

    wanted = [(hvd, NAMES + OF_TENSORFLOW), (hvd.elastic, "run State ObjectState TensorFlowState TensorFlowKerasState")]
    for face in (keras_face, tf_keras_face):
        wanted += [(face, NAMES + OF_KERAS), (face.callbacks, OF_CALLBACKS), (face.elastic, OF_ELASTIC)]
    for module, every in wanted:
        missing = [name for name in every.split() if name not in module.__all__ or not hasattr(module, name)]
        assert not missing, (module.__name__, missing)


def every_op() -> None:
    size = hvd.size()
    every = all_of().astype(np.float64)
    wanted = {hvd.Sum: every.sum(0), hvd.Average: every.mean(0), hvd.Min: every.min(0), hvd.Max: every.max(0)}
    for dtype in FLOATS + INTEGERS:
        for op, value in wanted.items():
            expected = value if dtype in FLOATS else np.trunc(value)
            for result in in_both(lambda x, op=op: hvd.allreduce(x, op=op), tf.cast(mine(), dtype)):
                assert result.dtype == dtype
                close(tf.cast(result, tf.float64), expected, 2e-2 if dtype.size == 2 else 1e-6)
    close(hvd.allreduce(tf.constant(2.0), op=hvd.Product), 2.0**size)
    close(hvd.allreduce(mine(), average=False), wanted[hvd.Sum])
    expect(ValueError, lambda: hvd.allreduce(mine(), average=True, op=hvd.Sum), "supersedes")
    expect(ValueError, lambda: hvd.allreduce(mine(), op=17), "17")
    texts = [tf.constant(["a text too long for the place of its pointer"]), tf.constant(["another"])]
    expect(tf.errors.UnimplementedError, lambda: hvd.grouped_allreduce(texts, op=hvd.Sum), "string")


def scaling() -> None:
    total = all_of().sum(0)
    for result in in_both(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), mine()):
        close(result, total * 1.5)
    integer = hvd.allreduce(tf.constant([3]), op=hvd.Sum, prescale_factor=0.5)
    close(integer, [hvd.size()])  # 1.5 is truncated before the sum.
    half = hvd.allreduce(tf.cast(mine(), tf.float32), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert half.dtype == tf.float32
    close(half, total, 1e-3)


def grouped() -> None:
    size = hvd.size()
    values = [tf.ones([index + 1]) * (hvd.rank() + 1.0) for index in range(20)] + [tf.cast(mine(), tf.float64)]
    for results in in_both(lambda: hvd.grouped_allreduce(values, op=hvd.Sum, name="many")):
        for index, result in enumerate(results[:-1]):
            close(result, np.full(index + 1, size * (size + 1) / 2))
        close(results[-1], all_of().sum(0))
    assert hvd.grouped_allreduce([], op=hvd.Sum) == []
    gathered = hvd.grouped_allgather([tf.ones([1, 2]), tf.ones([2]) * hvd.rank()])
    close(gathered[0], np.ones((size, 2)))
    close(gathered[1], np.repeat(np.arange(size), 2))
    parts = hvd.grouped_reducescatter([tf.ones([size, 2]), tf.ones([2 * size])], op=hvd.Sum)
    close(parts[0], np.full((1, 2), size))
    close(parts[1], np.full(2, size))


def gathers() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = np.concatenate([mine(each + 1, each) for each in range(size)])
    for dtype in [*FLOATS, *INTEGERS, tf.bool]:
        for result in in_both(hvd.allgather, tf.cast(mine(rank + 1), dtype)):
            assert result.dtype == dtype
            close(tf.cast(result, tf.float64), rows != 0 if dtype == tf.bool else rows, 1e-2)
    only_last = hvd.allgather(tf.ones([1 if rank == size - 1 else 0, 3]))
    close(only_last, np.ones((1, 3)))
    assert hvd.allgather(tf.ones([0, 3])).shape == [0, 3]

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def unknown(value: tf.Tensor) -> tf.Tensor:
        return hvd.allgather(value)

    for _ in range(2):
        close(unknown(mine(rank + 1)), rows)
    expect(tf.errors.InvalidArgumentError, lambda: hvd.allgather(tf.constant(1.0)), "dimension")
    if size == 1:
        return
    expect(
        tf.errors.FailedPreconditionError, lambda: hvd.allgather(tf.ones([2, rank + 1])), "first dimension", "rank 0"
    )
    expect(
        tf.errors.FailedPreconditionError,
        lambda: hvd.allgather(tf.ones([2], tf.float32 if rank else tf.float64)), "float32", "float64",
    )  # fmt: skip
    close(hvd.allgather(tf.ones([1])), np.ones(size))


def broadcasts() -> None:
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    for dtype in FLOATS + INTEGERS:
        for result in in_both(lambda x: hvd.broadcast(x, root), tf.cast(mine(), dtype)):
            close(tf.cast(result, tf.float64), mine(rank=root))
    variables = [tf.Variable(tf.fill([3], float(rank))), tf.Variable(rank == root)]
    hvd.broadcast_variables(variables, root_rank=root)
    assert [each.numpy().tolist() for each in variables] == [[root] * 3, True]
    values = hvd.broadcast_([tf.Variable(float(rank)), tf.Variable(rank)], 0)
    assert [float(each) for each in values] == [0.0, 0.0]
    expect(ValueError, lambda: hvd.broadcast(mine(), size), str(size))


def exchanges() -> None:
    rank, size = hvd.rank(), hvd.size()
    # Rank r sends r + 1 + i rows, that say who sends them to whom, to rank i.
    splits = [rank + 1 + each for each in range(size)]
    rows = np.concatenate([np.full((count, 2), rank * 10 + each) for each, count in enumerate(splits)])
    wanted = np.concatenate([np.full((each + 1 + rank, 2), each * 10 + rank) for each in range(size)])
    for dtype in [tf.float32, tf.float64, tf.int32, tf.bfloat16]:
        for kind in (tf.int32, tf.int64):
            given = tf.constant(splits, kind)
            for result, received in in_both(lambda x, given=given: hvd.alltoall(x, given), tf.cast(rows, dtype)):
                close(tf.cast(result, tf.float64), wanted, 1e-2)
                assert received.dtype == kind
                close(received, [each + 1 + rank for each in range(size)])
    close(hvd.alltoall(np.arange(size, dtype=np.float32) + 100 * rank), np.arange(size) * 100 + rank)
    nothing, received = hvd.alltoall(tf.ones([0, 2]), [0] * size)
    assert nothing.shape == [0, 2]
    close(received, [0] * size)
    for bad in ([1] * (size + 1), [size + 5] * size, [-1] * size):
        expect(tf.errors.InvalidArgumentError, lambda bad=bad: hvd.alltoall(tf.ones([size]), bad), "splits")
    expect(tf.errors.InvalidArgumentError, lambda: hvd.alltoall(tf.ones([size]), tf.ones([size])), "int32")
    if size == 1:
        return
    expect(tf.errors.InvalidArgumentError, lambda: hvd.alltoall(tf.ones([size + 1])), "divided equally")
    expect(tf.errors.FailedPreconditionError, lambda: hvd.alltoall(tf.ones([size, rank + 1])), "first dimension")


def scatters() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = 2 * size + 1  # The first rank has one more.
    every = np.stack([mine(rows, each) for each in range(size)])
    start, stop = (0, 3) if rank == 0 else (2 * rank + 1, 2 * rank + 3)
    for dtype in FLOATS + INTEGERS:
        for result in in_both(lambda x: hvd.reducescatter(x, op=hvd.Sum), tf.cast(mine(rows), dtype)):
            close(tf.cast(result, tf.float64), every.sum(0)[start:stop], 1e-2)
    close(hvd.reducescatter(mine(rows), op=hvd.Average), every.mean(0)[start:stop])
    close(
        hvd.reducescatter(mine(rows), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        every.sum(0)[start:stop] * 2,
    )
    expect(tf.errors.InvalidArgumentError, lambda: hvd.reducescatter(tf.constant(1.0)), "dimension")
    expect(ValueError, lambda: hvd.reducescatter(mine(), op=hvd.Adasum), "Average")


def gradients() -> None:
    """Of each operation, as Horovod defines them, in eager mode and in a tf.function."""
    rank, size = hvd.rank(), hvd.size()
    weights = np.arange(1.0, 3.0, dtype=np.float32)
    start = sum(each + 1 for each in range(rank))
    everybody = np.arange(sum(each + 1 for each in range(size)), dtype=np.float32)
    given = tf.constant([1] * size)
    cases: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], np.ndarray, np.ndarray]] = {
        "sum": (lambda x: hvd.allreduce(x, op=hvd.Sum) * weights, np.ones(2), weights * size),
        "average": (lambda x: hvd.allreduce(x) * weights, np.ones(2), weights),
        "grouped": (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1] * weights, np.ones(2), weights * size),
        "broadcast": (
            lambda x: hvd.broadcast(x, 0) * weights, np.ones(2), weights if rank == 0 else np.zeros(2),
        ),
        "allgather": (
            lambda x: hvd.allgather(x) * everybody, np.ones(rank + 1), everybody[start : start + rank + 1],
        ),
        "reducescatter": (
            lambda x: hvd.reducescatter(x, op=hvd.Sum) * (rank + 1.0), np.ones(size), np.arange(1.0, size + 1) * size,
        ),
        "alltoall": (
            lambda x: hvd.alltoall(x, given)[0] * (rank + 1.0), np.ones(size + 1), np.array([*range(1, size + 1), 0.0]),
        ),
    }  # fmt: skip
    for name, (call, value, wanted) in cases.items():
        variable = tf.Variable(value.astype(np.float32))

        def gradient(call: Callable = call, variable: tf.Variable = variable) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(call(variable * 1.0))
            return tape.gradient(loss, variable)

        for result in in_both(gradient):
            np.testing.assert_allclose(result, wanted, 1e-6, err_msg=name)


def places() -> None:
    for rank, size, local, locals_, included in in_both(
        lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op())
    ):
        assert (int(rank), int(size)) == (hvd.rank(), hvd.size())
        assert (int(local), int(locals_), int(included)) == (hvd.local_rank(), hvd.local_size(), 1)
    assert int(hvd.process_set_included_op(77)) == -3
    expect(tf.errors.InvalidArgumentError, lambda: hvd.size_op(77), "77")
    assert not any([hvd.mpi_built(), hvd.nccl_built(), hvd.cuda_built(), hvd.mpi_threads_supported()])
    assert hvd.gloo_built()  # Scripts ask for it: it is Horovod's word for CPU tensors without MPI.
    assert hvd.gloo_enabled()
    assert hvd.is_homogeneous()


def process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    first = hvd.add_process_set([0])
    rest = hvd.add_process_set(list(range(1, size)))
    own = first if rank == 0 else rest
    ranks = list(own.ranks)
    every = np.stack([mine(3, each) for each in ranks])
    for result in in_both(lambda x: hvd.allreduce(x, process_set=own), mine()):
        close(result, every.mean(0))
    close(hvd.allgather(mine(), process_set=own), np.concatenate(list(every)))
    close(hvd.broadcast(mine(), ranks[-1], process_set=own), every[-1])
    close(hvd.reducescatter(tf.ones([len(ranks)]), op=hvd.Sum, process_set=own), [len(ranks)])
    sent = tf.cast(tf.range(len(ranks)), tf.float32) + 10.0 * rank
    close(hvd.alltoall(sent, process_set=own), [10 * each + ranks.index(rank) for each in ranks])
    assert int(hvd.size_op(own.process_set_id)) == len(ranks)
    assert int(hvd.process_set_included_op(first.process_set_id)) == int(rank == 0)
    other = rest if rank == 0 else first
    expect(
        tf.errors.InvalidArgumentError,
        lambda: hvd.allreduce(mine(), process_set=other),
        f"rank is not in process set {other.process_set_id}",
    )
    expect(ValueError, lambda: hvd.broadcast(mine(), ranks[0] + size, process_set=own), "root rank")
    variable = tf.Variable(float(rank))
    with tf.GradientTape() as tape:
        loss = variable * float(rank + 1)
    tape = hvd.DistributedGradientTape(tape, process_set=rest)
    wanted = 1.0 if rank == 0 else np.mean([each + 1 for each in range(1, size)])
    close(tape.gradient(loss, [variable])[0], wanted)
    assert hvd.remove_process_set(first)
    assert hvd.remove_process_set(rest)
    expect(ValueError, lambda: hvd.allreduce(mine(), process_set=own), "not in use")


def join() -> None:
    """Ranks have different numbers of steps: who has none left counts as zeros."""
    rank, size = hvd.rank(), hvd.size()
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="joined"))
    for round_ in range(2):
        for number in range(rank + 1 + round_):
            active = size - max(number - round_, 0)
            close(step(tf.ones([5])), np.full(5, active))
            close(hvd.allreduce(tf.ones([2], tf.bfloat16), op=hvd.Sum), np.full(2, active))
            close(hvd.allreduce(tf.constant(7), op=hvd.Max), 7)
        last = int(hvd.join())
        assert last == size - 1
    close(hvd.allreduce(tf.ones([3]), op=hvd.Sum), np.full(3, size))
    if rank == 0:
        hvd.join()
    else:
        expect(tf.errors.FailedPreconditionError, lambda: hvd.allgather(tf.ones([2])), "rank 0", "barrier")
        hvd.join()


def objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    root = size - 1
    assert hvd.broadcast_object({"rank": rank, "much": [rank] * 100_000}, root)["rank"] == root
    assert hvd.broadcast_object_fn(root_rank=0)(rank) == 0
    assert hvd.allgather_object("x" * rank) == ["x" * each for each in range(size)]
    hvd.barrier()


def adasum() -> None:
    """Equal gradients average, orthogonal ones add."""
    rank, size = hvd.rank(), hvd.size()
    if size & (size - 1):
        expect(NotImplementedError, lambda: hvd.allreduce(mine(), op=hvd.Adasum), "power of 2")
        return
    for result in in_both(lambda x: hvd.allreduce(x, op=hvd.Adasum), tf.constant([3.0, 4.0])):
        close(result, [3.0, 4.0])
    close(hvd.allreduce(tf.one_hot(rank, size), op=hvd.Adasum), np.ones(size))
    expect(ValueError, lambda: hvd.allreduce(tf.constant([1]), op=hvd.Adasum), "floating point")


def slices() -> None:
    """IndexedSlices are put together."""
    rank, size = hvd.rank(), hvd.size()
    mine_ = tf.IndexedSlices(tf.ones([rank + 1, 2]) * (rank + 1.0), tf.range(rank + 1), tf.constant([size, 2]))
    dense = np.zeros((size, 2))
    for each in range(size):
        dense[: each + 1] += each + 1
    for result in in_both(lambda: hvd.allreduce(mine_, op=hvd.Sum)):
        assert isinstance(result, tf.IndexedSlices)
        close(tf.convert_to_tensor(result), dense)
    close(tf.convert_to_tensor(hvd.allreduce(mine_)), dense / size)
    first, second = hvd.grouped_allreduce([mine_, tf.constant([1.0])], op=hvd.Sum)
    close(tf.convert_to_tensor(first), dense)
    close(second, [size])
    expect(NotImplementedError, lambda: hvd.allreduce(mine_, op=hvd.Max), "Sum and Average")


def mismatches() -> None:
    """Named on all ranks; what comes after works."""
    rank = hvd.rank()
    by_shape = {"shape": lambda: hvd.allreduce(tf.ones([3 + rank]), name="w")}
    by_dtype = {"dtype": lambda: hvd.allreduce(tf.ones([3], tf.float64 if rank else tf.float32), name="w")}
    by_op = {"op": lambda: hvd.allreduce(tf.ones([3]), op=hvd.Min if rank else hvd.Max, name="w")}
    by_root = {"root": lambda: hvd.broadcast(tf.ones([3]), 1 if rank else 0, name="w")}
    words = {"shape": ["[3]", "[4]"], "dtype": ["float32", "float64"], "op": ["min", "max"], "root": ["root"]}
    for kind, call in (by_shape | by_dtype | by_op | by_root).items():
        for run in (call, tf.function(call)):
            expect(tf.errors.FailedPreconditionError, run, "rank 0", "w", *words[kind])
    close(hvd.allreduce(tf.ones([3]), name="w"), np.ones(3))
    assert library().pending() == 0


def in_any_order_from_threads() -> None:
    """Operations with names meet by them."""
    rank, size = hvd.rank(), hvd.size()
    results: dict[str, float] = {}

    def reduce(name: str) -> None:
        results[name] = float(hvd.allreduce(tf.constant(float(len(name))), op=hvd.Sum, name=name))

    names = ["a", "bb", "ccc"]
    threads = [threading.Thread(target=reduce, args=[name]) for name in (names if rank % 2 else reversed(names))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert results == {name: len(name) * size for name in names}


def one_thread() -> None:
    """With one inter-op thread: every kind of operation in one graph, with control flow."""
    rank, size = hvd.rank(), hvd.size()

    @tf.function
    def step(x: tf.Tensor, number: tf.Tensor) -> list[tf.Tensor]:
        total = hvd.allreduce(x, op=hvd.Sum)
        rows = hvd.allgather(x[: rank + 1])
        swapped = hvd.alltoall(x)
        part = hvd.reducescatter(x, op=hvd.Sum)
        if number % 2 == 0:
            total = total + hvd.broadcast(x, 0)
        for _ in tf.range(number):
            total = hvd.allreduce(total)
        return [total, tf.reduce_sum(rows), tf.reduce_sum(swapped), tf.reduce_sum(part)]

    x = tf.ones([size * 2])
    for number in range(6):
        total, rows, swapped, part = step(x, tf.constant(number))
        close(total, np.full(size * 2, size + (number % 2 == 0)))
        close(rows, size * (size + 1) / 2)
        close(swapped, size * 2)
        close(part, 2 * size)


def a_session_with_few_threads() -> None:
    """TensorFlow 1: more calls in one run than TensorFlow has threads, in another order on each rank."""
    rank, size = hvd.rank(), hvd.size()
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        order = list(range(40))
        random.Random(rank).shuffle(order)
        rows = {
            each: hvd.allgather(tf.ones([rank + 1, each + 1]) * each, name=f"rows.{each}")
            if each % 2
            else hvd.allreduce(tf.ones([3]) * each, op=hvd.Sum, name=f"sum.{each}")
            for each in order
        }
        moved = hvd.alltoall(tf.ones([size]), name="moved")
        for _ in range(5):
            for each, value in session.run(rows).items():
                if each % 2:
                    assert value.shape == (size * (size + 1) // 2, each + 1)
                close(value, np.full(value.shape, each if each % 2 else each * size))
            close(session.run(moved), np.ones(size))
        # One call that waits for another.
        twice = hvd.allreduce(hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="once"), op=hvd.Sum, name="twice")
        close(session.run(twice), [size * size] * 2)
        # An error is told to the session, and names the tensor.
        wrong = hvd.allreduce(tf.ones([2 + rank]), name="wrong")
        expect(tf.errors.FailedPreconditionError, lambda: session.run(wrong), "wrong", "float32[3]")


def control_flow_of_a_session_with_few_threads() -> None:
    """TensorFlow 1: the same in branches, loops and functions. They would take all threads, others on each rank."""
    rank, size = hvd.rank(), hvd.size()
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)

    def total(value: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.allreduce(value, op=hvd.Sum, name=name)

    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        is_on = tf.compat.v1.placeholder(tf.bool, [])
        order = list(range(10))
        random.Random(rank).shuffle(order)
        calls: dict[tuple[str, int], tf.Tensor] = {}
        for each in order:
            value = tf.ones([3]) * each
            calls["branch", each] = tf.cond(is_on, lambda x=value, n=each: total(x, f"branch.{n}"), lambda x=value: x)
            calls["loop", each] = tf.while_loop(
                lambda i, _: i < 2, lambda i, x, n=each: (i + 1, total(x, f"loop.{n}")), [0, value]
            )[1]
            calls["function", each] = tf.function(lambda x, n=each: total(x, f"function.{n}"))(value)
        factors = {"branch": size, "loop": size**2, "function": size}
        for _ in range(3):
            for (kind, each), result in session.run(calls, {is_on: True}).items():
                close(result, np.full(3, each * factors[kind]))
        close(session.run(calls["branch", 7], {is_on: False}), np.full(3, 7))


def loops_of_a_session() -> None:
    """TensorFlow 1 runs several iterations at once, in an order of each rank's own: they are not mixed."""
    rank, size = hvd.rank(), hvd.size()

    def slowly(number: int) -> np.ndarray:
        time.sleep(0.002 * ((number * 7 + rank * 3) % 5))
        return np.float32([number])

    def body(number: tf.Tensor, sums: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
        value = tf.ensure_shape(tf.numpy_function(slowly, [number], tf.float32), [1])
        return number + 1, sums.write(number, hvd.allreduce(value, op=hvd.Sum, name="in.loop"))

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        _, sums = tf.while_loop(lambda number, _: number < 30, body, [0, tf.TensorArray(tf.float32, 30)])
        for _ in range(2):
            close(session.run(sums.stack())[:, 0], np.arange(30) * size)


def a_session_that_waits_holds_no_thread() -> None:
    """200 calls that wait for a rank which is late."""
    threads = len(os.listdir("/proc/self/task"))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        sums = [hvd.allreduce(tf.ones([2]), op=hvd.Sum, name=f"late.{number}") for number in range(200)]
        if hvd.rank() == 0:
            time.sleep(1)
        for result in session.run(sums):
            close(result, np.full(2, hvd.size()))
    # Those that run what follows on an operation are there for all of them, and 64 at most.
    assert len(os.listdir("/proc/self/task")) - threads < 100


def before_init_of_horovod() -> None:
    expect(ValueError, lambda: hvd.allreduce(tf.ones([1])), "hvd.init()")
    expect(ValueError, hvd.rank, "hvd.init()")
    assert int(hvd.process_set_included_op()) == -1


if __name__ == "__main__":
    if "before_init_of_horovod" in sys.argv:
        before_init_of_horovod()
        sys.argv.remove("before_init_of_horovod")
        print(f"<{os.environ['RANK']} before_init_of_horovod ok>", flush=True)
    hvd.init()
    main(sys.argv[1:], globals())
