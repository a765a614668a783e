"""What goes into an operation and what comes out, in a job of one process."""

import gc

import numpy as np
import pytest

import herring

DTYPES = ["float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (1, 2, 1, 2, 1, 2, 1, 2, 3, 2)])
def test_shape_and_dtype_survive(single, dtype, shape):
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    for result in (
        herring.allreduce(array, "sum"),
        herring.broadcast(array),
        herring.allreduce_(array.copy(), "max"),
        herring.broadcast_(array.copy()),
    ):
        assert type(result) is np.ndarray
        assert result.dtype == array.dtype
        assert result.shape == array.shape
        np.testing.assert_array_equal(result, array)


def test_the_argument_is_not_changed_and_the_result_is_new(single):
    array = np.arange(100000, dtype=np.float32)
    result = herring.allreduce(array, "sum")
    result[:] = -1
    np.testing.assert_array_equal(array, np.arange(100000, dtype=np.float32))


def test_out_and_in_place_return_what_they_wrote(single):
    array = np.arange(4.0)
    out = np.zeros(4)
    assert herring.allreduce(array, out=out) is out
    np.testing.assert_array_equal(out, array)
    assert herring.allreduce_(array) is array
    assert herring.allreduce(array, out=array) is array


def test_strided_arrays_are_copied_where_the_result_is_new(single):
    array = np.arange(24.0).reshape(4, 6)
    for view in (array.T, array[:, ::2], array[::-1]):
        np.testing.assert_array_equal(herring.allreduce(view, "sum"), view)
        np.testing.assert_array_equal(herring.broadcast(view), view)
        np.testing.assert_array_equal(herring.allgather(view), view)


def test_numbers_and_lists(single):
    assert herring.allreduce(2.5) == 2.5
    np.testing.assert_array_equal(herring.allreduce([1, 2], "sum"), [1, 2])
    np.testing.assert_array_equal(herring.allgather(7), [7])


def test_read_only_input_is_fine_and_read_only_output_is_not(single):
    array = np.arange(4.0)
    array.flags.writeable = False
    np.testing.assert_array_equal(herring.allreduce(array), array)
    with pytest.raises(herring.InvalidArgumentError, match="read-only"):
        herring.allreduce_(array)


@pytest.mark.parametrize(
    ("array", "names"),
    [
        (np.zeros((4, 4)).T[::2], "not contiguous"),
        (np.zeros(3, np.complex64), "complex64"),
        (np.ma.masked_array(np.ones(3), [True, False, False]), "masked"),
        (np.ma.masked, "masked"),
        (np.zeros(3, np.uint32), "uint32"),
        (np.zeros(3, ">f4"), ">f4"),
        (np.array([None]), "object"),
        (np.zeros(3, "datetime64[s]"), "datetime64"),
        ("text", "str"),
        (None, "NoneType"),
    ],
)
def test_what_cannot_be_reduced_is_refused_by_name(single, array, names):
    with pytest.raises(herring.InvalidArgumentError, match=names):
        herring.allreduce_(array)


def test_what_is_no_array_at_all_is_named(single):
    """A gradient that is None is the usual case; the text spoke of shared memory."""
    for wrong, kind in ((None, "NoneType"), ({"weight": 1.0}, "dict"), ([1.0, None], "list")):
        for call in (herring.allreduce, herring.broadcast, herring.allgather):
            with pytest.raises(
                herring.InvalidArgumentError, match=f"the array is a {kind}, which does not hold numbers"
            ):
                call(wrong)
    for call in (lambda: herring.allreduce(np.array([None])), lambda: herring.empty(3, object)):
        with pytest.raises(herring.InvalidArgumentError, match="dtype object: Herring's arrays hold numbers"):
            call()


def test_an_array_that_was_given_is_not_called_the_output(single):
    """Where nobody gave an output, one is made like the input: the same is wrong with it, and the text blamed it."""
    wrong, right = np.zeros(3, np.complex64), np.zeros(3, np.float32)
    for call in (herring.allreduce, herring.allreduce_, herring.broadcast):
        with pytest.raises(herring.InvalidArgumentError, match="the array has dtype complex64"):
            call(wrong)
    with pytest.raises(herring.InvalidArgumentError, match="the output has dtype complex64"):
        herring.allreduce(right, out=wrong)


def test_a_mask_is_not_dropped_in_silence(single):
    masked = np.ma.masked_array(np.ones(3), [True, False, False])
    for call in (herring.allreduce, herring.broadcast, herring.allgather, lambda x: herring.grouped_allreduce([x])):
        with pytest.raises(herring.InvalidArgumentError, match=r"masked.*filled\(0\)"):
            call(masked)
    with pytest.raises(herring.InvalidArgumentError, match="masked"):
        herring.allreduce(np.ones(3), out=masked)
    # What a mean of nothing is: it would count as 0.
    with pytest.raises(herring.InvalidArgumentError, match="masked"):
        herring.allreduce(np.ma.masked_array(np.ones(3), True).mean())


def test_bad_arguments_are_named(single):
    array = np.arange(4.0)
    with pytest.raises(herring.InvalidArgumentError, match="op is 'mean'.*average"):
        herring.allreduce(array, "mean")
    with pytest.raises(herring.InvalidArgumentError, match="root is 1"):
        herring.broadcast(array, root=1)
    with pytest.raises(herring.InvalidArgumentError, match="root is 0.5"):
        herring.broadcast(array, root=0.5)
    for call in (herring.allreduce, herring.allreduce_, herring.broadcast, herring.allgather):
        for async_op in (False, True):
            with pytest.raises(herring.InvalidArgumentError, match="name is 5"):
                call(array, name=5, async_op=async_op)
            with pytest.raises(herring.InvalidArgumentError, match=r"name is 'a\\ud800'.*surrogate"):
                call(array, name="a\ud800", async_op=async_op)
    with pytest.raises(herring.InvalidArgumentError, match="name is b'x'"):
        herring.barrier(name=b"x")
    with pytest.raises(herring.InvalidArgumentError, match="timeout"):
        herring.allreduce(array, timeout=0)
    with pytest.raises(herring.InvalidArgumentError, match="32 bytes.*16"):
        herring.allreduce(array, out=np.zeros(2))
    with pytest.raises(herring.InvalidArgumentError, match="float64.*float32"):
        herring.allreduce(array, out=np.zeros(4, np.float32))
    with pytest.raises(herring.InvalidArgumentError, match="overlap"):
        herring.allreduce(array[:2], out=array[1:3])
    with pytest.raises(herring.InvalidArgumentError, match="float64.*band|band.*float64"):
        herring.allreduce(array, "band")


def test_ops_by_name_and_by_constant(single):
    array = np.array([3, 5], np.int32)
    for op in herring.ReduceOp:
        np.testing.assert_array_equal(herring.allreduce(array, op), array)
        np.testing.assert_array_equal(herring.allreduce(array, op.value), array)


def test_buffers_that_are_not_arrays(single):
    data = bytearray(b"\x01\x02\xff")
    assert herring.allreduce_(data, "bor") is data
    assert data == b"\x01\x02\xff"


def test_shared_memory_outlives_the_job_and_its_array(bare_environment):
    herring.init()
    array = herring.empty((1000, 100), "float64")
    assert array.shape == (1000, 100)
    assert array.dtype == np.float64
    array[:] = 3.5
    part = array[500:]
    herring.shutdown()
    del array
    gc.collect()
    assert (part == 3.5).all()


@pytest.mark.parametrize(
    ("shape", "dtype"), [(-1, "float32"), ((2, -3), "int8"), (3, object), ((1 << 40, 1 << 40), "int8")]
)
def test_impossible_shared_arrays_are_refused(single, shape, dtype):
    with pytest.raises(herring.InvalidArgumentError):
        herring.empty(shape, dtype)


def test_shared_arrays_of_any_size(single):
    for shape in ((), 0, 1, (3, 5), 100_000):
        assert herring.empty(shape, np.int16).shape == np.empty(shape).shape


class Tensor:
    """A CPU tensor of a library that knows DLPack and nothing else."""

    def __init__(self, array, device=(1, 0)):
        self.array = array
        self.shape = array.shape
        self._device = device

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._device


class OldTensor(Tensor):
    """One from before DLPack 1.0: its __dlpack__ takes no max_version."""

    def __dlpack__(self):
        return self.array.__dlpack__()


@pytest.mark.parametrize("kind", [Tensor, OldTensor])
def test_dlpack_tensors(single, kind):
    tensor = kind(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert herring.allreduce_(tensor, "sum") is tensor
    result = herring.allreduce(tensor)
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, tensor.array)


def test_dlpack_tensors_are_released(single):
    """The library's reference must come back: a training loop would otherwise leak a tensor a step."""
    import sys

    array = np.arange(6, dtype=np.float32)
    before = sys.getrefcount(array)
    for _ in range(10):
        herring.allreduce_(Tensor(array))
    herring.barrier()
    herring.shutdown()  # Ends the thread that lets go of finished operations.
    gc.collect()
    assert sys.getrefcount(array) == before


def test_tensors_elsewhere_are_refused_by_name(single):
    with pytest.raises(herring.UnavailableError, match=r"the array is on a CUDA device.*libcuda\.so\.1"):
        herring.allreduce_(Tensor(np.zeros(3), device=(2, 0)))
    with pytest.raises(herring.InvalidArgumentError, match="not contiguous"):
        herring.allreduce_(Tensor(np.zeros((4, 4)).T))


class OnGpu:
    """A GPU's array of a library that gives it away in no other way (CuPy: __dlpack__ refuses; Numba: the interface
    alone)."""

    def __init__(self, *, has_dlpack):
        self.shape, self.dtype = (3,), np.dtype("float32")
        self.__cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (0xDEAD0000, False), "version": 3}
        if has_dlpack:
            self.__dlpack__ = self._refuse
            self.__dlpack_device__ = lambda: (2, 0)

    def _refuse(self, **_arguments):
        raise BufferError("CUDA arrays cannot be exported to the CPU")

    def __array__(self, *_arguments, **_more):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")


@pytest.mark.parametrize(
    ("has_dlpack", "why"),
    [(False, r"CUDA device.*DLPack.*copy it to the CPU first"), (True, r"libcuda\.so\.1")],
    ids=["numba", "no driver"],
)
def test_arrays_on_gpus_that_cannot_be_taken_are_refused_with_what_to_do(single, has_dlpack, why):
    """A user of Numba, or of a machine without a driver, learns what to do, whatever call he has made."""
    array = OnGpu(has_dlpack=has_dlpack)
    calls = [
        lambda: herring.allreduce_(array),
        lambda: herring.allreduce(array),
        lambda: herring.grouped_allreduce([array]),
        lambda: herring.grouped_allreduce_([array]),
        lambda: herring.allgather(array),
        lambda: herring.broadcast(array, 0),
        lambda: herring.alltoall(array),
        lambda: herring.reduce_scatter(array),
    ]
    for call in calls:
        with pytest.raises(herring.HerringError, match=why):
            call()


def test_torch_tensors(single):
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool):
        tensor = torch.arange(6).reshape(2, 3).to(dtype)
        result = herring.allreduce(tensor.T, "max")
        assert isinstance(result, torch.Tensor)
        assert torch.equal(result, tensor.T)
        assert herring.allreduce_(tensor, "max") is tensor
    with pytest.raises(herring.InvalidArgumentError, match="requires? grad"):
        herring.allreduce_(torch.zeros(3, requires_grad=True))
    with pytest.raises(herring.InvalidArgumentError, match="not contiguous"):
        herring.allreduce_(torch.zeros(4, 4).T)
