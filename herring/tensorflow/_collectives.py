"""Tensors in, tensors out: in eager mode and in tf.function, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import herring
from herring._errors import InvalidArgumentError
from herring.tensorflow._compression import Compression, Compressor
from herring.tensorflow._ops import broadcast_all, library, reduce_all


class ReduceOp:
    """How tensors of the ranks are combined. AVERAGE of integers truncates toward zero."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


def init(**settings: Any) -> None:
    """Joins the job, as herring.init(), whose settings it takes; returns when every process is here and connected."""
    herring.init(**settings)
    library().attach()


def check_op(op: str) -> str:
    """One of ReduceOp's. Raises InvalidArgumentError."""
    if op not in ("average", "sum", "min", "max", "product"):
        raise InvalidArgumentError(f"op is {op!r}; it must be ReduceOp.AVERAGE, SUM, MIN or MAX")
    return op


def name_in_graph(kind: str, tensor: Any, name: str | None) -> str:
    """What matches a call with those of other ranks. "" in eager mode: the order of calls does; a graph has none."""
    if name:
        return f"{kind}.{name}"
    return "" if tf.executing_eagerly() else f"{kind}.{tensor.name}"


def dense(value: Any) -> Any:
    """A tensor of what is one, or IndexedSlices."""
    return tf.convert_to_tensor(value)


def _reduced(tensor: Any, name: str, compression: type[Compressor], op: str) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(value: Any) -> tuple[Any, Callable[[Any], Any]]:
        small, context = compression.compress(value)
        result = compression.decompress(reduce_all([small], [name], op)[0], context)

        def gradient(upstream: Any) -> Any:
            if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
                raise InvalidArgumentError(f"op={op!r} has no gradient; SUM and AVERAGE have")
            own = name_in_graph("gradient_of", upstream, name or None)
            return reduce_all([upstream], [own], op)[0]

        return result, gradient

    return run(dense(tensor))


def allreduce(
    tensor: Any,
    param_index: int,
    num_params: int,
    compression: type[Compressor] = Compression.none,
    op: str = ReduceOp.AVERAGE,
    *,
    grad: bool = True,
) -> Any:
    """Reduces a gradient over all ranks; every rank gets the same bits.

    Args:
        tensor: Any shape, the same on all ranks: float16, bfloat16, float32, float64, an integer of up to 64 bits.
            IndexedSlices are made dense.
        param_index, num_params: Which of how many gradients it is: what matches it with those of other ranks.
        compression: Compression.fp16 sends float16.
        op: ReduceOp.
        grad: As SageMaker's callers say it; without meaning here.

    Raises tf.errors.FailedPreconditionError where ranks disagree (with both calls), AbortedError for a lost rank,
    DeadlineExceededError after HERRING_TIMEOUT_S. Source: smdistributed.dataparallel.tensorflow.
    """
    del grad
    library().attach()
    return _reduced(tensor, f"parameter.{param_index}.of.{num_params}", compression, check_op(op))


def oob_allreduce(
    tensor: Any,
    compression: type[Compressor] = Compression.none,
    op: str = ReduceOp.AVERAGE,
    *,
    name: str | None = None,
) -> Any:
    """Reduces any other tensor, as allreduce() does.

    `name` matches it with those of other ranks. Without: in eager mode the order of calls, in a tf.function the
    tensor's name in the graph.
    """
    library().attach()
    value = dense(tensor)
    return _reduced(value, name_in_graph("allreduce", value, name), compression, check_op(op))


def broadcast(tensor: Any, root_rank: int, *, name: str | None = None) -> Any:
    """The tensor of rank `root_rank`; shapes and dtypes are the same on all ranks."""
    session = library().attach()
    check_root(root_rank, session.job.size)
    value = dense(tensor)
    return broadcast_all([value], [name_in_graph("broadcast", value, name)], root_rank)[0]


def allgather(tensor: Any, *, name: str | None = None) -> Any:
    """The tensors of all ranks, one after the other along their first dimension, in the order of the ranks.

    Args:
        tensor: Of at least one dimension; the first may differ by rank, the others not. dtypes as allreduce().
        name: As in oob_allreduce().

    Each rank sends a buffer of the result's size, with zeros but for its own rows: twice what a ring would take.
    """
    library().attach()
    value = dense(tensor)
    if value.shape.rank == 0:
        raise InvalidArgumentError("allgather needs at least one dimension; this tensor is a scalar")
    return _gathered(value, name_in_graph("allgather", value, name))


def _gathered(tensor: Any, name: str) -> Any:
    rank, size = herring.rank(), herring.size()

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(value: Any) -> tuple[Any, Callable[[Any], Any]]:
        own = tf.shape(value, tf.int64)[0]
        lengths = reduce_all([tf.one_hot(rank, size, own, tf.constant(0, tf.int64))], [f"{name}.lengths"], "sum")[0]
        begin = tf.reduce_sum(lengths[:rank])
        rows = [[begin, tf.reduce_sum(lengths) - begin - own]]
        padded = tf.pad(_as_integers(value), tf.concat([rows, tf.zeros([tf.rank(value) - 1, 2], tf.int64)], 0))
        whole = _from_integers(reduce_all([padded], [f"{name}.rows"], "sum")[0], value.dtype)
        whole.set_shape([None, *value.shape[1:]])

        def gradient(upstream: Any) -> Any:
            summed = reduce_all([upstream], [f"{name}.gradient"], ReduceOp.SUM)[0]
            return summed[begin : begin + own]

        return whole, gradient

    return run(tensor)


_AS_INTEGERS = {"float16": tf.int16, "bfloat16": tf.int16, "float32": tf.int32, "float64": tf.int64}


def _as_integers(value: Any) -> Any:
    """Its bits: with zeros added they stay as they are, also those of -0.0 and NaN."""
    if value.dtype == tf.bool:
        return tf.cast(value, tf.uint8)
    return tf.bitcast(value, _AS_INTEGERS[value.dtype.name]) if value.dtype.name in _AS_INTEGERS else value


def _from_integers(value: Any, dtype: Any) -> Any:
    if dtype == tf.bool:
        return tf.cast(value, tf.bool)
    return tf.bitcast(value, dtype) if dtype.name in _AS_INTEGERS else value


def check_root(root: Any, size: int) -> None:
    """A rank of the job. Raises InvalidArgumentError."""
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < size:
        raise InvalidArgumentError(f"root_rank is {root!r}; it must be a rank, from 0 to {size - 1}")


def overlap(tensor: Any) -> Any:
    """The tensor itself. Gradients travel while others are computed without it."""
    return tf.identity(tensor)
