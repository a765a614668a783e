"""Arrays of any library: where results are made, and what is copied."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from herring import _core
from herring._errors import InvalidArgumentError, text_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Tensor(Protocol):
    """Of a library whose results are of its own kind: torch's. Of all others (lists, numbers, JAX) they are numpy's."""

    def new_empty(self, *args: Any, **kwargs: Any) -> Any:
        """An uninitialised tensor of this shape, of the same dtype."""


TensorT = TypeVar("TensorT", bound=Tensor)

# Below this a copy costs less than a page of shared memory.
_SHARED_FROM_BYTES = 64 << 10
# DLPack's codes of devices: CUDA's memory, and that which moves by itself.
_CUDA = (2, 13)


def is_foreign(array: Any) -> bool:
    """Whether `array` is another library's tensor: it speaks DLPack and is not numpy's."""
    numpy = sys.modules.get("numpy")
    return hasattr(array, "__dlpack__") and not (
        numpy is not None and isinstance(array, (numpy.ndarray, numpy.generic))
    )


def is_on_gpu(array: Any) -> bool:
    """Whether it is in a GPU's memory, and its library says where (DLPack). Raises InvalidArgumentError."""
    if getattr(array, "is_cuda", None) is False:  # torch's; the other question takes longer.
        return False
    device = getattr(array, "__dlpack_device__", None)
    try:
        return device is not None and int(device()[0]) in _CUDA
    except Exception as error:  # Any library's.
        raise InvalidArgumentError(f"the {type(array).__name__} does not say where it is: {text_of(error)}") from error


def refuse_gpu(array: Any) -> None:
    """Raises InvalidArgumentError where `array` is in a GPU's memory."""
    if hasattr(array, "__cuda_array_interface__") or is_on_gpu(array):
        raise InvalidArgumentError(
            f"the {type(array).__name__} is on a CUDA device. Herring takes it there if its library exports it by "
            "DLPack (CuPy, torch and JAX do) and all arrays of the call are on GPUs; else copy it to the CPU first"
        )


def as_input(array: Any) -> Any:
    """`array` as the runtime can read it: row-major, copied where it was not; numbers and lists become numpy arrays."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(array) is numpy.ndarray and array.flags.c_contiguous:
        return array  # As below, in a third of the time.
    if is_foreign(array):
        if is_on_gpu(array):
            refuse_gpu(array)
        contiguous = getattr(array, "contiguous", None)
        return array if contiguous is None else contiguous()
    refuse_gpu(array)
    import numpy as np

    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):  # asarray() would drop the mask in silence.
        raise InvalidArgumentError(
            "the array is a masked array, but its masked values would be used too; pass array.filled(0) or array.data"
        )
    result = np.asarray(array, order="C")
    if result.dtype.hasobject and not isinstance(array, np.ndarray):
        raise InvalidArgumentError(
            f"the array is a {type(array).__name__}, which does not hold numbers; pass a numpy array, a CPU tensor, a "
            "list of numbers or a number"
        )
    return result


def shared_empty(
    runtime: _core.Runtime, shape: int | Sequence[int], dtype: npt.DTypeLike, at_least_bytes: int = 1
) -> np.ndarray[Any, Any]:
    """An uninitialised array in the runtime's shared memory; in ordinary memory where none is left, or it is small."""
    import numpy as np

    kind = np.dtype(dtype)
    dims = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
    if any(size < 0 for size in dims):
        raise InvalidArgumentError(f"shape is {dims}; sizes must not be negative")
    if kind.hasobject:
        raise InvalidArgumentError(f"dtype {kind}: Herring's arrays hold numbers, not Python objects")
    nbytes = math.prod(dims) * kind.itemsize
    if nbytes > sys.maxsize:
        raise InvalidArgumentError(f"an array of shape {dims} and dtype {kind} would have {nbytes} bytes: too many")
    memory = runtime.allocate(nbytes) if nbytes >= max(at_least_bytes, 1) else None
    if memory is None:
        return np.empty(dims, kind)
    array: np.ndarray[Any, Any] = np.frombuffer(memoryview(memory), dtype=kind).reshape(dims)
    return array


def new_result(runtime: _core.Runtime, array: Any, shape: Sequence[int] | None = None) -> Any:
    """Uninitialised memory for a result like `array` (an as_input()), of `shape` where that differs.

    Of numpy where `array` is, of the tensor's own library where it has new_empty() (torch), else of numpy.
    """
    dims = tuple(array.shape if shape is None else shape)
    if not is_foreign(array):
        return shared_empty(runtime, dims, array.dtype, _SHARED_FROM_BYTES)
    new_empty = getattr(array, "new_empty", None)
    if new_empty is not None:
        return new_empty(dims)
    import numpy as np

    try:
        dtype = np.from_dlpack(array).dtype
    except (BufferError, RuntimeError, TypeError) as error:
        refuse_gpu(array)
        raise InvalidArgumentError(
            f"cannot make a result like this {type(array).__name__} ({error}); pass out=, or use the in-place call"
        ) from error
    return shared_empty(runtime, dims, dtype, _SHARED_FROM_BYTES)
