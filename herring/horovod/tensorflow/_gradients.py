"""Gradients that are reduced before anybody sees them: the tape, and what optimizers do with theirs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from herring._errors import InvalidArgumentError
from herring.horovod._engine.engine import Members, home
from herring.horovod._engine.process_sets import ProcessSet, global_process_set
from herring.horovod._engine.reduce_ops import OPS, Adasum, Average, Sum
from herring.horovod.tensorflow import _operations as operations
from herring.horovod.tensorflow._calls import gather_slices
from herring.horovod.tensorflow._door import door, group_of
from herring.horovod.tensorflow._operations import scaled
from herring.horovod.tensorflow.compression import Compression
from herring.tensorflow import _ops as ops
from herring.tensorflow._gradients import ReducedTape, name_of, reduce_together

Groups = int | Sequence[Sequence[Any]] | None


def checked_groups(groups: Groups, num_groups: int) -> Groups:
    """What the two arguments mean together. Raises InvalidArgumentError (a ValueError) for what is neither."""
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is not None and not isinstance(groups, (list, tuple)) and not (isinstance(groups, int) and groups > 0):
        raise InvalidArgumentError("groups should be a positive integer or a list of lists of tf.Variable.")
    return groups


def key_of(variable: Any) -> int:
    """What tells variables apart: a Keras variable is the tf.Variable in it."""
    return id(getattr(variable, "value", variable) if _is_keras(variable) else variable)


def _is_keras(variable: Any) -> bool:
    return not isinstance(variable, tf.Variable) and isinstance(getattr(variable, "value", None), tf.Variable)


@dataclass(frozen=True)
class Reduction:
    """How gradients become those of all ranks; called with them and their variables."""

    op: int = Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    groups: Groups = None
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and self.op != Average:
            raise InvalidArgumentError("gradient_predivide_factor not supported with op != Average")
        if self.op not in (*OPS, Adasum):
            raise InvalidArgumentError(f"op is {self.op!r}; it must be hvd.Average, Sum, Adasum, Min, Max or Product")

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """None stays None. On ranks outside of the process set all stay as they are."""
        members = door.members(self.process_set)
        results = list(gradients)
        is_alone = len(members.ranks) == 1 and home.current().session.elastic is None
        if members.index is None or is_alone:
            return results
        if self.sparse_as_dense:
            results = [tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in results]
        sparse = [index for index, each in enumerate(results) if isinstance(each, tf.IndexedSlices)]
        dense = [index for index, each in enumerate(results) if each is not None and index not in sparse]
        names = [name_of(each) for each in variables]
        self._reduce_dense(results, dense, names, variables, members)
        self._reduce_sparse(results, sparse, names)
        return results

    def _reduce_sparse(self, results: list[Any], indices: list[int], names: list[str]) -> None:
        if not indices:
            return
        if self.op not in (Average, Sum):
            raise NotImplementedError(
                "Only Sum and Average ops are supported with tf.IndexedSlices; sparse_as_dense=True makes them dense"
            )
        labels = [f"sparse.{index}.{names[index]}" for index in indices]
        gathered = gather_slices([results[index] for index in indices], labels, self.op, self.process_set)
        for index, each in zip(indices, gathered, strict=True):
            results[index] = each

    def _reduce_dense(
        self, results: list[Any], indices: list[int], names: list[str], variables: Sequence[Any], members: Members
    ) -> None:
        if not indices:
            return
        pairs = [self.compression.compress(results[index]) for index in indices]
        sent = [scaled(each, 1.0 / self.predivide) for each, _ in pairs]
        labels = [names[index] for index in indices]
        if self.op == Adasum:
            own = [f"gradient.{index}.{names[index]}" for index in indices]
            reduced = operations.adasum(sent, own, members)
        else:
            parts = None if self.groups is None else self._parts([variables[index] for index in indices], sent)
            reduced = reduce_together(sent, labels, OPS[self.op], "gradient", group_of(members), parts)
        for index, each, (_, context) in zip(indices, reduced, pairs, strict=True):
            results[index] = self.compression.decompress(scaled(each, self.predivide), context)

    def _parts(self, variables: Sequence[Any], tensors: Sequence[Any]) -> list[list[int]]:
        """Which gradients travel as one: those of a group, of one dtype and with known shapes."""
        count = len(variables)
        if isinstance(self.groups, int):
            size = -(-count // self.groups)
            groups = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
        else:
            place = {key_of(variable): index for index, variable in enumerate(variables)}
            named = [[place[key_of(each)] for each in group if key_of(each) in place] for group in self.groups or ()]
            grouped = {index for group in named for index in group}
            groups = [group for group in named if group] + [[each] for each in range(count) if each not in grouped]
        parts: list[list[int]] = []
        for group in groups:
            by_dtype: dict[Any, list[int]] = {}
            for index in group:
                tensor = tensors[index]
                is_known = tensor.shape.num_elements() is not None
                by_dtype.setdefault(tensor.dtype if is_known else index, []).append(index)
            parts += by_dtype.values()
        return parts


class LocalReduction:
    """A Reduction that leaves the gradients of some variables to their ranks."""

    def __init__(self, reduction: Reduction, scales: bool) -> None:
        self.reduction = reduction
        self.local: set[int] = set()
        self._kept: list[Any] = []  # So that nobody else gets their ids.
        self._scales = scales

    def register(self, variable: Any) -> None:
        """It is of this rank alone."""
        self.local.add(key_of(variable))
        self._kept.append(variable)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Local ones are divided by the number of ranks, where that is wanted: the others' average is."""
        results = list(gradients)
        shared = [index for index, each in enumerate(variables) if key_of(each) not in self.local]
        reduced = self.reduction([results[index] for index in shared], [variables[index] for index in shared])
        for index, each in zip(shared, reduced, strict=True):
            results[index] = each
        if self._scales and len(shared) < len(results):
            size = ops.place(ops.SIZE, door.members(self.reduction.process_set).set_id)
            for index in set(range(len(results))) - set(shared):
                results[index] = _divided(results[index], size)
        return results


def _divided(gradient: Any, size: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient / tf.cast(size, gradient.dtype)


class _Tape(ReducedTape):
    def __init__(self, gradtape: Any, reduction: LocalReduction) -> None:
        super().__init__(gradtape, reduction)
        self._local = reduction

    def register_local_source(self, source: Any) -> None:
        """Its gradient stays that of this rank."""
        self._local.register(source)

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **options: Any
    ) -> Any:
        """tf.GradientTape.gradient(), reduced over all ranks. `use_generic_names` says nothing here."""
        del use_generic_names
        return super().gradient(target, sources, output_gradients, **options)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """(source, gradient) pairs: those of this rank alone, and those of all."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if key_of(pair[0]) in self._local.local]
        return local, [pair for pair in pairs if key_of(pair[0]) not in self._local.local]


def DistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape like tf.GradientTape `gradtape`, whose gradient() is that of all ranks.

    Args:
        compression: hvd.Compression.fp16 halves what is sent.
        sparse_as_dense: Reduce IndexedSlices as dense tensors.
        gradient_predivide_factor: For Average: divided by it before the sum, the rest after.
        groups: A number of groups, or lists of variables, whose gradients travel together.
        process_set: Ranks that train together; on others the gradients stay as they are.
        scale_local_gradients: Divide those of register_local_source()'s variables by the number of ranks.

    The devices and `num_groups` (an older name of `groups`) are Horovod's. Gradients are matched by the variables'
    names (Keras: paths) and places in the list.
    """
    del device_dense, device_sparse
    groups = checked_groups(groups, num_groups)
    reduction = Reduction(op, compression, sparse_as_dense, gradient_predivide_factor, groups, process_set)
    return _Tape(gradtape, LocalReduction(reduction, scale_local_gradients))


def PartialDistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """DistributedGradientTape() but for the layers `local_layers`, whose gradients stay those of this rank."""
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
        groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for variable in variables_of(local_layers):
        tape.register_local_source(variable)
    return tape


def variables_of(layers: Any) -> list[Any]:
    """Trainable variables of a Keras layer, or of several. Raises InvalidArgumentError for anything else."""
    every = [] if layers is None else list(layers) if isinstance(layers, Iterable) else [layers]
    if not all(hasattr(each, "trainable_weights") for each in every):
        raise InvalidArgumentError("All local layers must be of tf.keras.layers.Layer type.")
    return [variable for layer in every for variable in layer.trainable_weights]
