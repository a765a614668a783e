"""Gradients that are averaged before anybody sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from herring._errors import InvalidArgumentError
from herring.tensorflow._collectives import ReduceOp, check_op, dense
from herring.tensorflow._compression import Compression, Compressor
from herring.tensorflow._ops import JOB, Group, check_dtypes, library, reduce_all
from herring.tensorflow._optimizers import distributed
from herring.tensorflow._pack import pack, unpack

# Smaller gradients travel together: each operation costs about what 64 KB take.
_SMALL_BYTES = 64 << 10
_TOGETHER_BYTES = 1 << 20


def name_of(variable: Any) -> str:
    """What ranks find a variable by."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor")


def _together(tensors: Sequence[Any]) -> list[list[int]]:
    """Which of them travel as one: small ones of a dtype, in their order. The same on all ranks."""
    parts: list[list[int]] = []
    open_parts: dict[Any, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        elements = tensor.shape.num_elements()  # None: not known before it is there.
        if elements is None or elements * tensor.dtype.size > _SMALL_BYTES:
            parts.append([index])
            continue
        part, size = open_parts.get(tensor.dtype, ([], 0))
        if not part or size + elements * tensor.dtype.size > _TOGETHER_BYTES:
            part, size = [], 0
            parts.append(part)
        part.append(index)
        open_parts[tensor.dtype] = (part, size + elements * tensor.dtype.size)
    return parts


def reduce_together(
    tensors: Sequence[Any],
    names: Sequence[str],
    op: str,
    kind: str = "gradient",
    group: Group = JOB,
    parts: list[list[int]] | None = None,
) -> list[Any]:
    """The reduced tensors, in their order. All travel at once, each when it has been computed; small ones together, or
    those of each of `parts`, which are of one dtype."""
    check_dtypes(tensors, names)
    parts = _together(tensors) if parts is None else parts
    sent, labels = [], []
    for number, part in enumerate(parts):
        first = part[0]
        if len(part) == 1:
            sent.append(tensors[first])
            labels.append(f"{kind}.{first}.{names[first]}")
        else:
            sent.append(pack([tensors[index] for index in part]))
            labels.append(f"{kind}s.{number}.{names[first]}")
    reduced: dict[int, Any] = {}
    for part, result in zip(parts, reduce_all(sent, labels, op, group), strict=True):
        if len(part) == 1:
            reduced[part[0]] = result
            continue
        reduced.update(zip(part, unpack(result, [tensors[index] for index in part]), strict=True))
    return [reduced[index] for index in range(len(tensors))]


def reduce_gradients(
    gradients: Sequence[Any], sources: Sequence[Any], compression: type[Compressor], op: str
) -> list[Any]:
    """The reduced gradients, in their order; None stays None."""
    library().attach()
    reduced = list(gradients)
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    pairs = [compression.compress(dense(gradients[index])) for index in present]
    names = [name_of(sources[index]) for index in present]
    results = reduce_together([tensor for tensor, _ in pairs], names, op)
    for index, result, (_, context) in zip(present, results, pairs, strict=True):
        reduced[index] = compression.decompress(result, context)
    return reduced


class ReducedTape:
    """A tf.GradientTape whose gradient() is what `reduce(gradients, sources)` makes of it."""

    def __init__(self, gradtape: Any, reduce: Callable[[list[Any], list[Any]], list[Any]]) -> None:
        if not isinstance(gradtape, tf.GradientTape):
            raise InvalidArgumentError(f"gradtape is {type(gradtape).__name__}; it must be a tf.GradientTape")
        self._tape = gradtape
        self._reduce = reduce

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, **options: Any) -> Any:
        """tf.GradientTape.gradient(), reduced over all ranks; in the structure of `sources`."""
        gradients = self._tape.gradient(target, sources, output_gradients, **options)
        reduced = self._reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, reduced)

    def __enter__(self) -> Any:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)


class DistributedGradientTape(ReducedTape):
    """A tf.GradientTape whose gradient() is reduced over all ranks.

    Args:
        gradtape: The tape that has recorded, or is going to.
        device_dense, device_sparse: As SageMaker's callers say them; without meaning here.
        compression: Compression.fp16 sends float16.
        sparse_as_dense: IndexedSlices are always made dense.
        op: ReduceOp.

    Gradients are matched by the variables' names (Keras: paths) and places in the list, which must be the same on all
    ranks. Source: smdistributed.dataparallel.tensorflow.
    """

    def __init__(
        self,
        gradtape: Any,
        device_dense: str = "",
        device_sparse: str = "",
        compression: type[Compressor] = Compression.none,
        sparse_as_dense: bool = False,
        op: str = ReduceOp.AVERAGE,
    ) -> None:
        del device_dense, device_sparse, sparse_as_dense
        check_op(op)
        super().__init__(gradtape, lambda gradients, sources: reduce_gradients(gradients, sources, compression, op))


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: str = ReduceOp.AVERAGE,
    bucket_cap_mb: int = 25,
) -> Any:
    """An optimizer of Keras 3 or tf_keras like `optimizer`, which reduces the gradients over all ranks before it
    applies them.

    For model.compile(optimizer=..., jit_compile=False). It has the optimizer's class name, so that a saved model loads
    without Herring. Keras clips (clipnorm, clipvalue) what has been reduced. `use_locking`, the devices,
    `sparse_as_dense` and `bucket_cap_mb` are without meaning here.
    """
    del use_locking, device_dense, device_sparse, sparse_as_dense, bucket_cap_mb
    check_op(op)
    return distributed(
        optimizer, lambda gradients, sources: reduce_gradients(gradients, sources, compression, op), name
    )
