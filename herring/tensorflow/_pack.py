"""Small tensors that travel as one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from herring.tensorflow import _gpu_stream
from herring.tensorflow._ops import library

# TensorFlow's own operation copies with several threads, which pays for more than this.
_MOST_BYTES = 1 << 20


def pack(tensors: Sequence[Any]) -> Any:
    """All elements of these, of one dtype and of known shapes, in a vector."""
    if _is_ours(tensors):
        return library().ops.herring_pack(list(tensors))
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def unpack(packed: Any, like: Sequence[Any]) -> list[Any]:
    """Tensors of the shapes that these have, with the elements of the vector."""
    if not _is_ours(like):
        pieces = tf.split(packed, [tensor.shape.num_elements() for tensor in like])
        return [tf.reshape(piece, tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
    shapes = [number for tensor in like for number in (tensor.shape.rank, *tensor.shape)]
    results = list(library().ops.herring_unpack(packed, tf.constant(shapes, tf.int32), N=len(like)))
    for result, tensor in zip(results, like, strict=True):
        result.set_shape(tensor.shape)
    return results


def _is_ours(tensors: Sequence[Any]) -> bool:
    """Herring's operations move them in one go. On a GPU whose stream Herring is not told, TensorFlow's do, there."""
    is_by_stream = library().by_stream
    if is_by_stream and tensors[0].dtype != tf.int32:  # Which is in the host's memory there too.
        return True
    size = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in tensors)
    return size <= _MOST_BYTES and (is_by_stream or not _has_gpus())


@functools.cache
def _has_gpus() -> bool:
    return _gpu_stream.has_gpus()
