"""Arrays on GPUs in herring's functions on arrays, on a fake driver: the bits of arrays on the CPU, whatever the stream
does, with ranks that have no GPU, and errors."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import herring

COUNT = 50_000  # of float32, more than stays out of pinned memory


def values(rank, dtype, shape):
    return np.random.default_rng(rank).integers(0, 2 if dtype == "bool" else 4, shape).astype(dtype)


def same(array, expected):
    """Bits."""
    host = array.get() if hasattr(array, "get") else array
    assert host.shape == expected.shape, (host.shape, expected.shape)
    assert host.dtype == expected.dtype
    assert host.tobytes() == expected.tobytes()


def everything(cpu_rank=None):
    """Every function, on a GPU and on the CPU; `cpu_rank` has no GPU."""
    import fake_cuda

    herring.init()
    rank, size = herring.rank(), herring.size()
    on_cpu = rank == cpu_rank

    def put(host):
        return host.copy() if on_cpu else fake_cuda.asarray(host)

    for dtype in ("float32", "float64", "float16", "int8", "int64", "uint8", "bool"):
        for shape in ((), (0,), (7,), (size * 3, 5), (COUNT // 4, 4)):
            host = values(rank, dtype, shape)
            op = "max" if dtype == "bool" else "sum"
            expected = herring.allreduce(host, op)
            result = herring.allreduce(put(host), op)
            assert on_cpu or isinstance(result, fake_cuda.ndarray)
            same(result, expected)
            array = put(host)
            assert herring.allreduce_(array, op) is array
            same(array, expected)
            out = put(np.zeros_like(host))
            assert herring.allreduce(put(host), op, out=out) is out
            same(out, expected)
            same(herring.broadcast(put(host), 1), values(1, dtype, shape))
            array = put(host)
            assert herring.broadcast_(array, 0) is array
            same(array, values(0, dtype, shape))
            same(herring.allgather(put(host)), herring.allgather(host))
    host = values(rank, "float32", (size * 6, 3))
    same(herring.alltoall(put(host)), herring.alltoall(host))
    rows, counts = herring.alltoall(put(host), [6] * size)
    same(rows, herring.alltoall(host))
    assert counts == [6] * size
    same(herring.reduce_scatter(put(host), "sum"), herring.reduce_scatter(host, "sum"))
    uneven = values(rank, "int32", (rank + 1, 2))
    same(herring.allgather(put(uneven), uneven=True), herring.allgather(uneven, uneven=True))
    many = [values(rank + 7 * i, "float32", (i + 1, 3)) for i in range(12)] + [values(rank, "float32", (COUNT,))]
    expected = herring.grouped_allreduce(many, "average")
    for each, wanted in zip(herring.grouped_allreduce([put(each) for each in many], "average"), expected, strict=True):
        same(each, wanted)
    places = [put(each) for each in many]
    assert herring.grouped_allreduce_(places, "average") is places
    for each, wanted in zip(places, expected, strict=True):
        same(each, wanted)
    del places, each, array, out, result, rows
    herring.shutdown()
    gc.collect()
    return fake_cuda.exports()


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_bits_are_those_of_arrays_on_the_cpu(job, gpus, seed):
    assert job.run(everything, 2, env={**gpus, "HERRING_TEST_SEED": seed}) == [0, 0]


def test_ranks_with_and_without_a_gpu(job, gpus):
    env = {**gpus, "HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"}
    assert job.run(everything, 3, {"cpu_rank": 1}, env=env) == [0, 0, 0]


def in_thread(i):
    import fake_cuda

    fake_cuda.driver.enter()
    array = fake_cuda.asarray(np.full(COUNT, i, np.float32))
    result = herring.allreduce(array, "sum", name=f"thread{i}")
    host = result.get()
    del array, result
    return host


def handles(cpu_rank=None):
    """Several at once, by name in another order on each rank, from several threads, and bfloat16."""
    import fake_cuda

    herring.init()
    rank = herring.rank()
    if rank == cpu_rank:  # What the others do below.
        for i in range(8):
            herring.allreduce(values(rank + i, "float32", (100 * i + 1,)), "sum")
        hosts = {f"layer{i}": values(rank + i, "float32", (100 * i + 1,)) for i in range(8)}
        pending = [herring.allreduce_(host, "sum", name=name, async_op=True) for name, host in hosts.items()]
        for handle in pending:
            handle.wait()
        herring.allreduce(hosts["layer3"], "sum")
        for i in range(6):
            herring.allreduce(np.full(COUNT, i, np.float32), "sum", name=f"thread{i}")
        herring.shutdown()
        return True
    hosts = {f"layer{i}": values(rank + i, "float32", (100 * i + 1,)) for i in range(8)}
    expected = {name: herring.allreduce(host, "sum") for name, host in hosts.items()}
    arrays = {name: fake_cuda.asarray(host) for name, host in hosts.items()}
    order = sorted(arrays, reverse=rank == 1)
    pending = {name: herring.allreduce_(arrays[name], "sum", name=name, async_op=True) for name in order}
    while not all(handle.done() for handle in pending.values()):
        pass
    for name, handle in pending.items():
        same(arrays[name], expected[name])  # done() is enough
        assert handle.wait() is arrays[name]
        assert handle.contributors() == [0, 1]
        assert "done" in repr(handle)
    result = herring.allreduce(arrays["layer3"], "sum", async_op=True).wait(30)
    same(result, 2 * expected["layer3"])
    with ThreadPoolExecutor(6) as pool:
        calls = [
            pool.submit(herring.allreduce, np.full(COUNT, i, np.float32), "sum", name=f"thread{i}") if i == 5
            else pool.submit(in_thread, i) for i in range(6)
        ]  # fmt: skip
        for i, call in enumerate(calls):
            same(call.result(), np.full(COUNT, 2 * i, np.float32))
    if cpu_rank is not None:
        herring.shutdown()
        return True
    bits = np.full(5, 0x3FC0 if rank == 0 else 0x4010, np.int16)  # 1.5 and 2.25
    summed = herring.allreduce(fake_cuda.asarray(bits, "bfloat16"), "sum")
    assert summed.dtype == "bfloat16"
    same(summed, np.full(5, 0x4070, np.int16))  # 3.75
    herring.shutdown()
    return True


def test_handles_and_names(job, gpus):
    assert job.run(handles, 2, env=gpus) == [True, True]


def test_names_with_a_rank_without_a_gpu(job, gpus):
    assert job.run(handles, 2, {"cpu_rank": 1}, env=gpus) == [True, True]


def refusal(call):
    try:
        call()
    except herring.HerringError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def errors():
    """What a user does wrong, and that the job works after each."""
    import fake_cuda

    herring.init()
    rank = herring.rank()
    good = np.ones(4, np.float32)

    class Strange:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **_arguments):
            raise BufferError("it has a hole")

    class Other(fake_cuda.ndarray):
        def __dlpack_device__(self):
            return (10, 0)

    said = [
        refusal(lambda: herring.allreduce(Strange())),
        refusal(lambda: herring.allreduce(fake_cuda.asarray(good), out=good.copy())),
        refusal(lambda: herring.allreduce(good, out=fake_cuda.asarray(good))),
        refusal(lambda: herring.allreduce(fake_cuda.asarray(good), out=fake_cuda.asarray(np.ones(5, np.float32)))),
        refusal(lambda: herring.grouped_allreduce([fake_cuda.asarray(good), good])),
        refusal(lambda: herring.allreduce(fake_cuda.asarray(good), "sideways")),
        refusal(lambda: herring.broadcast(fake_cuda.asarray(good), 7)),
        refusal(lambda: herring.allreduce_(Other((4,), "float32"))),
        refusal(lambda: herring.allreduce(fake_cuda.asarray(np.ones(4 + rank, np.float32)))),
    ]
    same(herring.allreduce(fake_cuda.asarray(good), "sum"), 2 * good)
    herring.shutdown()
    return said


def test_errors_say_what_is_wrong_and_leave_the_job_alone(job, gpus):
    hole, cpu_out, gpu_out, shape, mixed, op, root, device, mismatch = job.run(errors, 2, env=gpus)[0]
    assert "InvalidArgumentError: allreduce: the array was not exported by its library" in hole
    assert "it has a hole" in hole
    assert "allreduce: the array is on a CUDA device, and out is not" in cpu_out
    assert "all arrays of the call are on GPUs" in gpu_out
    assert "out has shape (5,) and dtype float32, the array (4,) and float32" in shape
    assert "grouped_allreduce: array 1 of the list is not on a CUDA device" in mixed
    assert "sideways" in op
    assert "root is 7" in root
    assert "device of DLPack type 10" in device
    assert mismatch.startswith("MismatchError")


def late():
    """A kernel that takes longer than the limit."""
    import fake_cuda

    herring.init()
    array = fake_cuda.asarray(np.ones(6 << 20, np.float32))
    said = refusal(lambda: herring.allreduce(array, timeout=0.02))
    fake_cuda.driver.wait()
    same(herring.allreduce(fake_cuda.asarray(np.ones(4, np.float32)), "sum"), np.full(4, 2, np.float32))
    herring.shutdown()
    return said


def test_an_array_that_is_not_ready_in_time(job, gpus):
    for said in job.run(late, 2, env=gpus):
        assert "HerringTimeoutError: allreduce: the array on cuda:0 was not ready after 0.02 s: a kernel" in said


def is_refused():
    import fake_cuda

    herring.init()
    said = refusal(lambda: herring.allreduce_(fake_cuda.asarray(np.ones(4, np.float32))))
    herring.shutdown()
    return said


def test_with_cuda_off_they_are_refused(job, gpus):
    [said] = job.run(is_refused, 1, env={**gpus, "HERRING_CUDA": "off"})
    assert "HERRING_CUDA is off" in said


def without_driver():
    """An array whose library has a driver that Herring does not find."""

    class Array:
        def __dlpack_device__(self):
            return (2, 0)

        def __dlpack__(self, **_arguments):
            raise AssertionError

    herring.init()
    said = refusal(lambda: herring.allreduce_(Array()))
    herring.shutdown()
    return said


def test_without_a_driver(job):
    [said] = job.run(without_driver, 1)
    assert "libcuda.so.1" in said


def forked():
    """A child of a process that has used the GPU."""
    import fake_cuda

    herring.init()
    array = fake_cuda.asarray(np.ones(4, np.float32))
    herring.allreduce(array)
    child = os.fork()
    if child == 0:
        said = refusal(lambda: herring.allreduce(array))
        print(said, flush=True)
        os._exit(0 if "fork" in said else 1)
    _, status = os.waitpid(child, 0)
    herring.shutdown()
    return status


def test_in_a_forked_child(job, gpus):
    assert job.run(forked, 1, env=gpus) == [0]
