"""bfloat16 in memory of numpy's, which has no such dtype: enough of an array for herring._composed, through DLPack."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

# DLTensor of DLPack's dlpack.h: data (8 bytes), device (8), ndim (4), then the dtype, whose first byte is its code.
_CODE_OFFSET = 20
_BFLOAT = 4

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Bfloat16Array:
    """`bits` (int16, contiguous, writable) as bfloat16: the upper half of a float32."""

    dtype = "bfloat16"

    def __init__(self, bits: npt.NDArray[np.int16]) -> None:
        self.bits = bits

    @property
    def shape(self) -> tuple[int, ...]:
        """As numpy's."""
        return self.bits.shape

    @property
    def nbytes(self) -> int:
        """As numpy's."""
        return self.bits.nbytes

    def new_empty(self, shape: tuple[int, ...]) -> Bfloat16Array:
        """As torch's."""
        return Bfloat16Array(np.empty(shape, np.int16))

    def is_contiguous(self) -> bool:
        """As torch's."""
        return True

    def reshape(self, *shape: int) -> Bfloat16Array:
        """A view."""
        return Bfloat16Array(self.bits.reshape(*shape))

    def __getitem__(self, place: slice) -> Bfloat16Array:
        return Bfloat16Array(self.bits[place])

    def __setitem__(self, place: slice, value: Bfloat16Array) -> None:
        self.bits[place] = value.bits

    def __dlpack__(self) -> Any:
        capsule = self.bits.__dlpack__()
        code = ctypes.c_uint8.from_address(_pointer_of(capsule, b"dltensor") + _CODE_OFFSET)
        code.value = _BFLOAT
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)
