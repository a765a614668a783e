"""Arrays on GPUs where something is in the way: kernels that do not end, libraries that raise, lists of all kinds,
other GPUs. Each is a right result, or an error that says what to do."""

import collections
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
from test_device_arrays import COUNT, refusal, same

import herring


def timed(call):
    """What it is refused with, if it does not take long."""
    begun = time.monotonic()
    said = refusal(call)
    took = time.monotonic() - begun
    return said if took < 5 else f"after {took:.1f} s: {said}"


def interrupted(call):
    """Ctrl-C in the middle of it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Who started the tests may ignore it.
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    begun = time.monotonic()
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic() - begun < 5
    return False


def behind_a_kernel():
    import fake_cuda

    ones = np.ones(4, np.float32)
    arrays = [fake_cuda.asarray(ones) for _ in range(300)]  # More than a device has tickets.
    large = fake_cuda.asarray(np.ones(COUNT, np.float32))
    said = {}
    with fake_cuda.driver.stuck():
        said["small"] = timed(lambda: herring.allreduce(arrays[0], timeout=0.2))
        said["large"] = timed(lambda: herring.allreduce(large, timeout=0.2))
        said["list"] = timed(lambda: herring.grouped_allreduce(arrays, timeout=0.5))
        said["many large"] = timed(lambda: herring.grouped_allreduce([large] * 300, timeout=0.5))
        assert interrupted(lambda: herring.allreduce(arrays[0]))
        assert interrupted(lambda: herring.allreduce(large))
    same(herring.allreduce(arrays[0], "sum"), ones)
    for each in herring.grouped_allreduce(arrays, "sum"):
        same(each, ones)
    return said


def stuck():
    import fake_cuda

    herring.init()
    said = behind_a_kernel()
    gc.collect()
    herring.allreduce(fake_cuda.asarray(np.ones(4, np.float32)))  # Looks after what the others have left.
    said["exports"] = fake_cuda.exports()
    herring.shutdown()
    return said


def test_a_kernel_that_does_not_end_is_a_timeout_whatever_the_size(job, gpus):
    [said] = job.run(stuck, 1, env=gpus)
    assert said.pop("exports") == 0
    for what, text in said.items():
        assert text.startswith("HerringTimeoutError: "), (what, text)
        assert "a kernel that writes it has not ended" in text


def late_results():
    """The result is on the host, and a kernel that was submitted since keeps it from the GPU."""
    import fake_cuda

    herring.init()
    said = []
    for array in (fake_cuda.asarray(np.ones(4, np.float32)), fake_cuda.asarray(np.ones(COUNT, np.float32))):
        host = array.get()
        for call in (herring.allreduce, herring.allgather, lambda *each, **how: herring.grouped_allreduce(each, **how)):
            handle = call(array, async_op=True)
            with fake_cuda.driver.stuck():
                begun = time.monotonic()
                while time.monotonic() - begun < 0.1:
                    assert not handle.done()
                said.append(timed(lambda handle=handle: handle.wait(0.2)))
                assert interrupted(handle.wait)
            result = handle.wait()
            same(result[0] if isinstance(result, list) else result, host)
    herring.shutdown()
    return said


def test_a_result_that_cannot_be_copied_back_yet(job, gpus):
    [said] = job.run(late_results, 1, env=gpus)
    assert len(said) == 6
    for text in said:
        assert text.startswith("HerringTimeoutError: "), text
        assert "the result's copy to cuda:0 has not ended after" in text


class OnGpu:
    def __dlpack_device__(self):
        return (2, 0)


class Interrupts(OnGpu):
    def __dlpack__(self, **_arguments):
        raise KeyboardInterrupt


class Sharded:
    """As JAX's of several devices."""

    def __dlpack_device__(self):
        raise ValueError("it is on several")

    def __dlpack__(self, **_arguments):
        raise ValueError("it is on several")


class Elsewhere(OnGpu):
    """Exported as a copy on the CPU."""

    def __dlpack__(self, **_arguments):
        return np.ones(4, np.float32).__dlpack__()


class Nowhere:
    def __dlpack_device__(self):
        return (2, -1)


class Twice(OnGpu):
    """The same capsule each time."""

    def __init__(self, array):
        self.capsule, self.array = None, array

    def __dlpack__(self, **arguments):
        self.capsule = self.capsule or self.array.__dlpack__(**arguments)
        return self.capsule


def libraries():
    """Libraries that do not do as they should, and that the job works after each."""
    import fake_cuda

    herring.init()
    said = {}
    try:
        herring.allreduce_(Interrupts())
    except KeyboardInterrupt:
        said["interrupts"] = "KeyboardInterrupt"
    for name, call in (("allreduce", herring.allreduce), ("allreduce_", herring.allreduce_)):
        said[f"sharded {name}"] = refusal(lambda call=call: call(Sharded()))
        said[f"elsewhere {name}"] = refusal(lambda call=call: call(Elsewhere()))
    said["sharded list"] = refusal(lambda: herring.grouped_allreduce_([Sharded()]))
    said["nowhere"] = refusal(lambda: herring.allreduce(Nowhere()))
    twice = Twice(fake_cuda.asarray(np.ones(4, np.float32)))
    herring.allreduce_(twice)
    said["twice"] = refusal(lambda: herring.allreduce_(twice))
    read_only = fake_cuda.asarray(np.ones(4, np.float32))
    read_only.is_read_only = True
    said["read-only"] = refusal(lambda: herring.allreduce_(read_only))
    same(herring.allreduce(read_only, "sum"), np.full(4, 2, np.float32))
    try:
        herring.allreduce(fake_cuda.asarray(np.ones(4 + herring.rank(), np.float32)))
    except herring.MismatchError:
        said["traceback"] = traceback.format_exc()
    herring.shutdown()
    return said


def test_libraries_that_raise_or_say_what_is_not_so(job, gpus):
    said = job.run(libraries, 2, env=gpus)[0]
    assert said["interrupts"] == "KeyboardInterrupt"
    for name in ("sharded allreduce", "sharded allreduce_", "sharded list"):
        assert said[name].startswith("InvalidArgumentError"), said[name]
        assert "does not say where it is: ValueError: it is on several" in said[name]
    for name in ("elsewhere allreduce", "elsewhere allreduce_"):
        assert "is on CUDA device 0, but was exported from device 0 of DLPack type 1" in said[name]
    assert "says that it is on CUDA device -1" in said["nowhere"]
    assert "did not return a DLPack capsule" in said["twice"]
    assert "the array is read-only" in said["read-only"]
    # An error's text must not send the reader elsewhere first.
    assert "ranks disagree" in said["traceback"]
    assert "copy it to the CPU" not in said["traceback"]
    assert "another exception" not in said["traceback"]


def shapes():
    """Lists of all kinds, and arrays that are not row-major."""
    import fake_cuda

    herring.init()
    hosts = [np.full((2, 3), i, np.float32) for i in range(4)]
    wanted = [2 * host for host in hosts]

    def check(results):
        for result, each in zip(results, wanted, strict=True):
            same(result, each)

    for put in (fake_cuda.asarray, np.copy):
        check(herring.grouped_allreduce((put(host) for host in hosts), "sum"))
        check(herring.grouped_allreduce(collections.deque(map(put, hosts)), "sum"))
        by_name = {str(i): put(host) for i, host in enumerate(hosts)}
        places = by_name.values()
        assert herring.grouped_allreduce_(places, "sum") is places
        check(places)
    array = fake_cuda.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    turned = np.ascontiguousarray(array.get().T)
    same(herring.allreduce(array.T, "sum"), 2 * turned)
    same(herring.allgather(array.T), np.concatenate([turned, turned]))
    said = [
        refusal(lambda: herring.allreduce_(array.T)),
        refusal(lambda: herring.allreduce(fake_cuda.asarray(turned), out=array.T)),
        refusal(lambda: herring.allreduce([array, array])),
    ]
    herring.shutdown()
    return said


def test_lists_of_all_kinds_and_arrays_that_are_not_row_major(job, gpus):
    in_place, out, not_an_array = job.run(shapes, 2, env=gpus)[0]
    assert "the array is not contiguous" in in_place
    assert "out is not contiguous" in out
    assert "the array is a list" in not_an_array


def other_gpus():
    """Arrays of a GPU that is not the current one, and of two at once."""
    import fake_cuda

    herring.init()
    host = np.arange(10, dtype=np.float32)
    with fake_cuda.Device(2):
        array = fake_cuda.asarray(host)
    same(herring.allreduce_(array, "sum"), 2 * host)
    for result in (herring.allreduce(array, "sum"), herring.allreduce(array, "sum", async_op=True).wait()):
        assert result.device.number == 2
        same(result, 4 * host)
    both = herring.grouped_allreduce([array, fake_cuda.asarray(host)], "sum")
    assert [each.device.number for each in both] == [2, 0]
    same(both[1], 2 * host)

    class Mine(fake_cuda.ndarray):
        """Of a module that is no library of arrays."""

    mine = Mine(host.shape, "float32")
    mine.set(host)
    assert isinstance(herring.allreduce(mine), fake_cuda.ndarray)
    herring.shutdown()
    return refusal(lambda: herring.allreduce(mine))


def test_arrays_of_another_gpu_than_the_current_one(job, three_gpus):
    for said in job.run(other_gpus, 2, env=three_gpus):
        assert "call herring.init()" in said


def broken():
    """A kernel has gone wrong, before a call and while its result is on the way."""
    import fake_cuda

    herring.init()
    host = np.ones(COUNT, np.float32)
    arrays = [fake_cuda.asarray(host) for _ in range(2)]
    handles = [herring.allreduce(array, async_op=True) for array in arrays]
    with fake_cuda.driver.stuck():
        begun = time.monotonic()
        while time.monotonic() - begun < 0.2:
            assert not any(handle.done() for handle in handles)
        fake_cuda.driver.fail()
    said = [timed(handle.wait) for handle in handles]
    assert all(handle.done() for handle in handles)
    said.append(timed(lambda: herring.allreduce(arrays[0])))
    same(herring.allreduce(host, "sum"), 2 * host)
    herring.shutdown()
    return said


def test_a_gpu_that_fails_is_an_error_and_leaves_the_job_alone(job, gpus):
    for said in job.run(broken, 2, env=gpus):
        assert len(said) == 3
        assert all("illegal memory access" in each for each in said), said
        assert all("cuda:0" in each for each in said)


def full():
    """No room for the result."""
    import fake_cuda

    herring.init()
    array = fake_cuda.asarray(np.ones(5 << 20, np.float32))
    handle = herring.allreduce(array, "sum", async_op=True)
    rest = [fake_cuda.asarray(np.ones(5 << 20, np.float32)) for _ in range(2)]
    begun = time.monotonic()
    while not handle.done() and time.monotonic() - begun < 5:
        pass
    said = [refusal(handle.wait), refusal(lambda: herring.allreduce(array, "sum"))]
    del rest[:]
    same(handle.wait(), np.full(5 << 20, 2, np.float32))
    herring.shutdown()
    return said


def test_a_gpu_without_room_for_the_result(job, gpus):
    for said in job.run(full, 2, env=gpus):
        for each in said:
            assert each.startswith("UnavailableError: allreduce: no memory for the result on the GPU"), said


def elastic():
    """Arrays of some ranks on GPUs, before and after a rank is lost."""
    import fake_cuda

    herring.init()
    rank = herring.rank()
    host = np.full(COUNT, rank + 1, np.float32)
    put = np.copy if rank == 0 else fake_cuda.asarray
    same(herring.allreduce(put(host), "sum"), np.full(COUNT, 6, np.float32))
    handle = herring.allreduce_(put(host), "sum", async_op=True)
    same(handle.wait(), np.full(COUNT, 6, np.float32))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    same(herring.allreduce(put(host), "sum"), np.full(COUNT, 3, np.float32))
    same(herring.broadcast(put(host), 0), np.ones(COUNT, np.float32))
    herring.shutdown()
    return True


def test_in_an_elastic_job_that_loses_a_rank(clean_env, gpus):
    program = [sys.executable, str(Path(__file__).with_name("runner.py")), __file__, "elastic", "{}"]
    command = [sys.executable, "-m", "herring._launch", "--elastic", "-np", "3", "--", *program]
    done = subprocess.run(command, env={**clean_env, **gpus}, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.count("@@result true") == 2, done.stdout + done.stderr
