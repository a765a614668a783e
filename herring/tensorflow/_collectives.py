"""Tensors in, tensors out: in eager mode and in tf.function, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

import herring
from herring._errors import InvalidArgumentError
from herring.tensorflow._compression import Compression, Compressor
from herring.tensorflow._ops import Group, broadcast_all, gather_all, library, reduce_all

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from herring._settings import InitOptions


class ReduceOp:
    """How tensors of the ranks are combined. AVERAGE of integers truncates toward zero."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


def init(**settings: Unpack[InitOptions]) -> None:
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
    return "" if tf.executing_eagerly() else f"{kind}.{graph_name(tensor)}"


def graph_name(tensor: Any) -> str:
    """A tensor's name in its graph. One from outside of it has none there, or a number that is another on each rank."""
    name = "" if isinstance(tensor, tf.__internal__.EagerTensor) else str(tensor.name)
    return "captured" if name.partition(":")[0].isdecimal() or not name else name


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

    """
    library().attach()
    value = dense(tensor)
    if value.shape.rank == 0:
        raise InvalidArgumentError("allgather needs at least one dimension; this tensor is a scalar")
    return _gathered(value, name_in_graph("allgather", value, name))


_KEYED = Group(0, has_key=True)


def _gathered(tensor: Any, name: str) -> Any:
    rank = herring.rank()

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(value: Any) -> tuple[Any, Callable[[Any], Any]]:
        def gradient(upstream: Any) -> Any:
            own = tf.shape(value, tf.int64)[:1]
            lengths = gather_all([own], [f"{name}.rows" if name else ""], _KEYED)[0]
            begin = tf.reduce_sum(lengths[:rank])
            label = f"{name}.gradient" if name else ""
            return reduce_all([upstream], [label], ReduceOp.SUM, _KEYED)[0][begin : begin + own[0]]

        return gather_all([value], [name], _KEYED)[0], gradient

    return run(tensor)


def check_root(root: Any, size: int) -> None:
    """A rank of the job. Raises InvalidArgumentError."""
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < size:
        raise InvalidArgumentError(f"root_rank is {root!r}; it must be a rank, from 0 to {size - 1}")


def overlap(tensor: Any) -> Any:
    """The tensor itself. Gradients travel while others are computed without it."""
    return tf.identity(tensor)
