"""What each rank does in test_gpu.py, on a GPU that is a fake (accelerator.py): `cases_gpu.py NAME ...`.

What is computed is computed on the CPU, and lies on the GPU where Herring takes it: TensorFlow's build without CUDA has
only some of its kernels for GPUs, and those crash.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import accelerator
import numpy as np
import pytest
import tensorflow as tf
from cases import FLOATS, INTEGERS, close, expect, main

import herring.horovod.tensorflow as horovod
import herring.tensorflow as hvd
from herring.tensorflow import _gpu_stream
from herring.tensorflow._ops import library, reduce_all
from herring.tensorflow._pack import pack, unpack

GPU, OPS = accelerator.load()
IS_BY_STREAM = os.environ.get("HERRING_TENSORFLOW_STREAM") == "on"
if "real_finder" in sys.argv:  # Which finds none here.
    sys.argv.remove("real_finder")
elif IS_BY_STREAM:
    _gpu_stream.find = lambda: ctypes.cast(GPU.fake_stream_of, ctypes.c_void_p).value
late = OPS.fake_gpu_late


def moved(array: object, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """On the GPU."""
    with tf.device("/CPU:0"):
        value = tf.constant(array, dtype)
    with tf.device("/GPU:0"):
        return tf.identity(value)


def some(count: int, dtype: tf.DType = tf.float32, seed: int = 0) -> np.ndarray:
    """Another on each rank."""
    random = np.random.default_rng(100 * seed + hvd.rank())
    numbers = random.normal(size=count) if dtype in FLOATS else random.integers(0, 5, count)
    return numbers.astype(dtype.as_numpy_dtype)


def check_no_fault() -> None:
    assert GPU.fake_fault() == b"", GPU.fake_fault()
    assert library().pending() == 0


def is_there(tensor: tf.Tensor) -> bool:
    return "GPU:0" in tensor.device


def same_bits_as_on_the_cpu() -> None:
    """All dtypes, operations and sizes that the two ways to the host have; late kernels before and after."""
    for dtype in FLOATS + INTEGERS:
        for count in (1, 3, 5000, 70_000):
            values = some(count, dtype, count)
            with tf.device("/CPU:0"):
                wanted = hvd.oob_allreduce(tf.constant(values), op="average").numpy()
            with tf.device("/GPU:0"):
                result = late(value=hvd.oob_allreduce(late(value=moved(values, dtype)), op="average"))
                assert is_there(result)
            assert result.numpy().tobytes() == wanted.tobytes(), (dtype, count)
    for shape in ([], [0], [3, 0, 2], [2, 3, 4]):
        with tf.device("/GPU:0"):
            result = hvd.oob_allreduce(moved(np.full(shape, hvd.rank() + 1.0)), op="max")
        assert result.shape == shape
        close(result, np.full(shape, hvd.size()))
    check_no_fault()


def who_copies() -> None:
    """By stream TensorFlow copies nothing, and Herring out and back once each."""
    with tf.device("/GPU:0"):
        value = late(value=moved(some(100_000)))
        hvd.oob_allreduce(value)  # What is done once.
        before, own = GPU.fake_copies(), GPU.fake_own_copies()
        for _ in range(5):
            value = hvd.oob_allreduce(value)
        after, own_after = GPU.fake_copies(), GPU.fake_own_copies()
    if IS_BY_STREAM:
        assert (after - before, own_after - own) == (0, 10), (after - before, own_after - own)
    else:
        assert (after - before, own_after - own) == (10, 0), (after - before, own_after - own)


def in_a_function() -> None:
    """With kernels of the step before and after, several in flight, and the GPU far behind the host."""
    rank, size = hvd.rank(), hvd.size()

    @tf.function
    def step(values: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device("/GPU:0"):
            slow = [late(value=late(value=each)) for each in values]
            reduced = reduce_all(slow, [f"value{index}" for index in range(len(slow))], "sum")
            return [late(value=each) for each in reduced]

    lengths = (1, 20_000, 300_000, 7, 64_000, 50_000)
    values = [moved(np.full(length, rank + 1.0)) for length in lengths]
    for number in range(1, 6):
        values = step(values)
        for value, length in zip(values, lengths, strict=True):
            close(value, np.full(length, size ** (number - 1) * size * (size + 1) / 2))
    check_no_fault()


def packed_by_herrings_kernel() -> None:
    """As TensorFlow's own operations do it, in one kernel among theirs."""
    shapes = [(3,), (), (0,), (2, 3, 4), (7, 0, 2), (70_001,), (1,), (5, 5)]
    for dtype in FLOATS + INTEGERS:
        values = [some(int(np.prod(shape)), dtype, index).reshape(shape) for index, shape in enumerate(shapes)]
        wanted = np.concatenate([value.ravel() for value in values])
        with tf.device("/GPU:0"):
            there = [late(value=moved(value, dtype)) for value in values]
            packed = late(value=pack(there))
            results = [late(value=each) for each in unpack(packed, there)]
        assert is_there(packed)
        assert packed.numpy().tobytes() == wanted.tobytes(), dtype
        for result, value in zip(results, values, strict=True):
            assert (result.shape, result.numpy().tobytes()) == (value.shape, value.tobytes()), (dtype, value.shape)
    check_no_fault()


def small_ones_are_packed_on_the_gpu() -> None:
    """One copy out and one back for all gradients; by stream also what tells the two kernels what to do."""
    rank, size = hvd.rank(), hvd.size()
    with tf.device("/CPU:0"):
        variables = [tf.Variable(tf.zeros(100 + index), name=f"weight{index}") for index in range(30)]

    @tf.function
    def step(values: list[tf.Tensor]) -> list[tf.Tensor]:
        from herring.tensorflow._gradients import reduce_gradients

        with tf.device("/GPU:0"):
            return reduce_gradients(values, variables, hvd.Compression.none, "sum")

    values = [moved(np.full(100 + index, rank + index)) for index in range(30)]
    step(values)
    before, own = GPU.fake_copies(), GPU.fake_own_copies()
    results = step(values)
    assert (GPU.fake_copies() - before, GPU.fake_own_copies() - own) == ((0, 4) if IS_BY_STREAM else (2, 0))
    for index, result in enumerate(results):
        assert is_there(result)
        close(result, np.full(100 + index, size * index + size * (size - 1) / 2))
    check_no_fault()


def tape() -> None:
    """Gradients that come late, of variables on the GPU, which the results go into."""
    rank, size = hvd.rank(), hvd.size()
    with tf.device("/GPU:0"):
        weight = tf.Variable(moved(np.full(40_000, float(rank))))
    hvd.broadcast_variables([weight], size - 1)
    close(weight, np.full(40_000, size - 1.0))

    @tf.custom_gradient
    def loss_of(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(_: tf.Tensor) -> tf.Tensor:
            with tf.device("/GPU:0"):
                return late(value=moved(np.full(40_000, rank + 1.0)))

        return moved(1.0), gradient

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as recorded, tf.device("/GPU:0"):
            loss = loss_of(weight)
        with tf.device("/GPU:0"):
            gradient = hvd.DistributedGradientTape(recorded).gradient(loss, weight)
            weight.assign(late(value=gradient))
            return gradient

    for _ in range(3):
        step()
        close(weight, np.full(40_000, (size + 1) / 2))
    check_no_fault()


def ranks_with_and_without_a_gpu() -> None:
    for number in range(3):
        values = some(30_000 + 50_000 * number, seed=number)
        with tf.device("/CPU:0"):
            wanted = hvd.oob_allreduce(tf.constant(values), op="sum", name="wanted").numpy()
        mine = moved(values) if hvd.rank() == 0 else tf.constant(values)
        with tf.device("/GPU:0" if hvd.rank() == 0 else "/CPU:0"):
            result = hvd.oob_allreduce(mine, op="sum", name="mixed")
        assert is_there(result) == (hvd.rank() == 0)
        assert result.numpy().tobytes() == wanted.tobytes()
    check_no_fault()


def the_other_functions() -> None:
    """What has no way by stream: the result is right, wherever it is."""
    rank, size = hvd.rank(), hvd.size()
    value = moved(np.full((rank + 1, 2), float(rank)))
    for in_graph in (False, True):
        call = tf.function(hvd.allgather) if in_graph else hvd.allgather
        with tf.device("/GPU:0"):
            close(call(value), np.concatenate([np.full((each + 1, 2), float(each)) for each in range(size)]))
            close(hvd.broadcast(moved([rank, 1.0]), size - 1), [size - 1.0, 1.0])
            close(hvd.broadcast(moved([rank], tf.int32), size - 1), [size - 1.0])
            close(hvd.oob_allreduce(moved([True]), op="max"), [1.0])
    check_no_fault()


def horovods_functions() -> None:
    horovod.init()
    rank, size = hvd.rank(), hvd.size()
    with tf.device("/GPU:0"):
        value = late(value=moved(np.full(20_000, rank + 1.0)))
        close(horovod.allreduce(value, op=horovod.Sum), np.full(20_000, size * (size + 1) / 2))
        for result in horovod.grouped_allreduce([value, value], op=horovod.Sum):
            close(result, np.full(20_000, size * (size + 1) / 2))
        close(horovod.broadcast(value, 0), np.ones(20_000))
        close(horovod.allgather(moved([float(rank)])), np.arange(size))
        close(horovod.reducescatter(moved(np.full(2 * size, 1.0)), op=horovod.Sum), np.full(2, size))
        received, _ = horovod.alltoall(moved(np.full(size, float(rank))), splits=tf.ones(size, tf.int32))
        close(received, np.arange(size))
    check_no_fault()


def submitted_in_one_place_and_waited_for_in_another() -> None:
    operation = {"collective": 1, "reduce": 1, "root": 0}
    for first, second in (("/GPU:0", "/CPU:0"), ("/CPU:0", "/GPU:0")):
        for count in (10, 70_000):
            token = library().ops.herring_begin()
            with tf.device("/CPU:0"):
                value = tf.constant(np.full(count, hvd.rank() + 1.0), tf.float32)
            with tf.device(first):
                name = f"{first}{count}"
                handle = library().ops.herring_submit(tf.identity(value), token, tensor_name=name, **operation)
            with tf.device(second):
                result = library().ops.herring_wait([handle], T=[tf.float32])[0]
            assert second.strip("/") in result.device
            close(result, np.full(count, hvd.size() * (hvd.size() + 1) / 2))
    check_no_fault()


def strict_placement() -> None:
    """TensorFlow may not move an operation to the CPU where the program says GPU."""
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device("/GPU:0"):
            value = moved([hvd.rank() + 1.0])
            for call in (hvd.oob_allreduce, tf.function(lambda each: hvd.oob_allreduce(each, name="strict"))):
                close(call(value), [(hvd.size() + 1) / 2])
            hvd.broadcast(value, 0)
    finally:
        tf.config.set_soft_device_placement(True)


def session_of_tensorflow_1() -> None:
    size = hvd.size()
    with tf.Graph().as_default(), tf.device("/GPU:0"):
        placed = [tf.compat.v1.placeholder(tf.float32, [1000]) for _ in range(12)]
        sums = [hvd.oob_allreduce(tf.identity(each), op="sum", name=f"s{i}") for i, each in enumerate(placed)]
        with tf.compat.v1.Session() as session:
            results = session.run(sums, {each: np.full(1000, i + 1.0) for i, each in enumerate(placed)})
    for index, result in enumerate(results):
        close(result, np.full(1000, size * (index + 1.0)))


def disagreements_are_named() -> None:
    rank = hvd.rank()
    value = moved(np.ones(10 + rank % 2))
    with tf.device("/GPU:0"):
        expect(tf.errors.FailedPreconditionError, lambda: hvd.oob_allreduce(value, name="odd"), "odd", "[10]", "[11]")
        expect(
            tf.errors.FailedPreconditionError,
            tf.function(lambda: reduce_all([value, moved(np.ones(50_000))], ["odd", "even"], "sum")),
            "odd",
        )
        close(hvd.oob_allreduce(moved([1.0]), op="sum"), [hvd.size()])
    check_no_fault()


def a_wait_holds_up_no_kernels() -> None:
    """While a call waits for a rank that is late, the step's other kernels are launched."""
    depth = 6

    @tf.function
    def step(value: tf.Tensor) -> list[tf.Tensor]:
        with tf.device("/GPU:0"):
            value = other = late(value=value)
            for _ in range(depth):
                other = late(value=other)
            return [reduce_all([value], ["waited"], "sum")[0], other]

    def tell() -> None:
        with tf.device("/CPU:0"):
            hvd.oob_allreduce(tf.constant([1.0]), name="others have launched")

    value = moved(np.ones(50_000))
    step(value)
    have_launched = [True]
    if hvd.rank() == 0:
        tell()  # This rank comes when all others have launched their kernels.
        results = step(value)
    else:
        wanted = GPU.fake_launches() + depth + 1

        def look() -> None:
            deadline = time.monotonic() + 10
            while GPU.fake_launches() < wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            have_launched[0] = GPU.fake_launches() == wanted
            tell()

        looking = threading.Thread(target=look)
        looking.start()
        results = step(value)
        looking.join()
    assert have_launched[0]
    close(results[0], np.full(50_000, hvd.size()))
    close(results[1], np.ones(50_000))
    check_no_fault()


def what_is_let_go_has_no_effect_later() -> None:
    """Where one tensor of a call fails, the others' next calls do not meet what other ranks have begun of this one."""
    rank, size = hvd.rank(), hvd.size()

    @tf.function
    def step(values: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device("/GPU:0"):
            slow = late(value=late(value=values[1])) if rank == 1 else values[1]
            return reduce_all([values[0], slow], ["odd", "even"], "sum")

    odd = moved(np.ones(10 + rank % 2))
    for number in range(4):
        lost = moved(np.full(50_000, 1000.0))
        with pytest.raises(tf.errors.FailedPreconditionError, match="odd"):
            step([odd, lost])
        with tf.device("/GPU:0"):
            result = reduce_all([moved(np.full(50_000, float(number)))], ["even"], "sum")[0]
        close(result, np.full(50_000, float(number * size)))
    check_no_fault()


def a_call_that_is_submitted_in_part() -> None:
    """As where the GPU has no room for a result: nothing is kept."""
    operation = {"collective": 1, "reduce": 1, "root": 0}
    value = moved(np.ones(50_000))
    for device in ("/GPU:0", "/CPU:0"):
        with tf.device(device):
            token = library().ops.herring_begin()
            library().ops.herring_submit(value, token, tensor_name=f"first.{device}", **operation)
            with pytest.raises(tf.errors.InvalidArgumentError, match="second.*process set 99"):
                library().ops.herring_submit(value, token, tensor_name="second", group=99, has_key=1, **operation)
            assert library().pending() == 0
    check_no_fault()


def a_step_leaves_nothing_on_the_gpu() -> None:
    """Neither gradients nor results, until the next step or at all."""

    @tf.function
    def step(values: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device("/GPU:0"):
            slow = [late(value=each) for each in values]
            return reduce_all(slow, [f"value{index}" for index in range(len(slow))], "sum")

    values = [moved(np.ones(100_000)) for _ in range(4)]
    used = tf.config.experimental.get_memory_info("GPU:0")["current"]
    for _ in range(3):
        results = step(values)
        for result in results:
            close(result, np.full(100_000, float(hvd.size())))
        del result, results
        assert tf.config.experimental.get_memory_info("GPU:0")["current"] <= used
    check_no_fault()


def many_steps_keep_nothing() -> None:
    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        with tf.device("/GPU:0"):
            return reduce_all([late(value=value)], ["value"], "average")[0]

    for length in (10, 100_000):  # Each of one size, so that TensorFlow's allocator leaves no gaps.
        value, used = moved(np.ones(length)), []
        for _ in range(40):
            value = step(value)
            close(value, np.ones(length))  # By then all before it is over.
            used.append(tf.config.experimental.get_memory_info("GPU:0")["current"])
        assert max(used) - used[0] < 8 * max(4 * length, 256), used
    check_no_fault()


def starting_again() -> None:
    """Graphs, streams and pinned memory serve the next job; a kernel that the job's end has overtaken harms nothing."""

    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        with tf.device("/GPU:0"):
            return late(value=hvd.oob_allreduce(late(value=value), op="sum", name="again"))

    value = moved(np.ones(70_000))
    for _ in range(3):
        close(step(value), np.full(70_000, hvd.size()))
        step(value)  # Late kernels of it are still to come.
        hvd.shutdown()
        expect(tf.errors.FailedPreconditionError, lambda: step(value), "shut down")
        hvd.init()
        close(step(value), np.full(70_000, hvd.size()))
        check_no_fault()


def what_the_real_finder_says() -> None:
    """The code for CUDA, built for this release, on a stream that is not CUDA's: no, and no crash."""
    os.environ["XDG_CACHE_HOME"] = str(Path.cwd() / f"cache{hvd.rank()}")
    real = ctypes.CDLL(str(_gpu_stream.build())).herring_stream_of
    for device in ("/GPU:0", "/CPU:0"):
        with tf.device(device):
            assert int(OPS.fake_gpu_ask(function=ctypes.cast(real, ctypes.c_void_p).value)) == 0
    with tf.device("/GPU:0"):
        own = ctypes.cast(GPU.fake_stream_of, ctypes.c_void_p).value
        assert int(OPS.fake_gpu_ask(function=own)) == 1
    why = "GPU:0 is not a CUDA device"
    for setting, state, text in (("off", "ok", "=off"), ("auto", "ok", why), ("on", "problem", why)):
        said = _gpu_stream.describe(setting)
        assert said[0] == state, said
        assert text in said[1], said


def ranks_that_wait_for_each_other() -> None:
    """Under different names, after late kernels: all are told, long before the time limit."""
    value = moved(np.ones(50_000))
    name = f"of rank {hvd.rank()}"
    begun = time.monotonic()
    with tf.device("/GPU:0"):
        expect(
            tf.errors.FailedPreconditionError,
            lambda: reduce_all([late(value=value)], [name], "sum"),
            "ranks wait for each other",
            "of rank 0",
            "of rank 1",
        )
    assert time.monotonic() - begun < 20


def a_kernel_that_does_not_end() -> None:
    """The time limit ends the call, and says what it waited for; the others' too."""
    value = moved(np.ones(50_000))
    rank = hvd.rank()
    stalled = rank == 0
    if stalled:
        GPU.fake_stall(1)
        threading.Timer(6, GPU.fake_stall, [0]).start()
    begun = time.monotonic()
    with tf.device("/GPU:0"), pytest.raises(tf.errors.OpError) as caught:
        hvd.oob_allreduce(late(value=value), name="stuck")
    assert isinstance(caught.value, tf.errors.DeadlineExceededError), caught.value
    assert ("a kernel that was submitted before it has not ended" in str(caught.value)) == stalled, caught.value
    assert "stuck" in str(caught.value), caught.value
    assert time.monotonic() - begun < 12


def more_copies_than_a_stuck_gpu_takes() -> None:
    """The calls after the first have no room for their events, and end in time all the same."""
    values = [moved(np.ones(count)) for count in [20_000, 10] * 40]
    GPU.fake_stall(1)
    begun = time.monotonic()
    for number in range(2):
        names = [f"stuck{number}.{index}" for index in range(len(values))]
        with tf.device("/GPU:0"), pytest.raises(tf.errors.DeadlineExceededError):
            reduce_all([late(value=values[0]), *values[1:]], names, "sum")
    assert time.monotonic() - begun < 20
    GPU.fake_stall(0)


def a_dead_rank() -> None:
    last = hvd.size() - 1
    value = moved(np.ones(100_000))

    @tf.function
    def step(each: tf.Tensor) -> tf.Tensor:
        with tf.device("/GPU:0"):
            return late(value=hvd.oob_allreduce(late(value=each), op="average", name="loss"))

    step(value)
    if hvd.rank() == last:
        os._exit(9)
    begun = time.monotonic()
    expect(tf.errors.AbortedError, lambda: [step(value) for _ in range(1_000_000)], f"worker {last}")
    assert time.monotonic() - begun < 10


def a_gpu_that_fails() -> None:
    """An error that names it, on its rank, and no hang."""
    value = moved(np.ones(100_000))
    GPU.fake_break()
    begun = time.monotonic()
    with tf.device("/GPU:0"):
        expect(tf.errors.OpError, lambda: hvd.oob_allreduce(value, name="lost"), "lost", "the device failed")
    assert time.monotonic() - begun < 10


if __name__ == "__main__":
    main(sys.argv[1:], globals())
