"""What travels instead of a gradient."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Travels as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What travels, and what decompress() needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The result in the tensor's own dtype."""
        del context
        return tensor


class _Float16(Compressor):
    """Floating-point tensors travel as float16; they are summed in float32 and rounded once."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        dtype = tensor.dtype
        return (tf.cast(tensor, tf.float16), dtype) if dtype.is_floating and dtype.size > 2 else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        return tensor if context is None else tf.cast(tensor, context)


class Compression:
    """Values of the argument `compression`."""

    none = Compressor
    fp16 = _Float16
