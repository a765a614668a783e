"""Optimizers that step with the gradients of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from herring._errors import InvalidArgumentError
from herring.horovod._engine.process_sets import ProcessSet, global_process_set
from herring.horovod._engine.reduce_ops import Adasum, Average, Sum
from herring.horovod.tensorflow._gradients import Groups, LocalReduction, Reduction, checked_groups, variables_of
from herring.horovod.tensorflow.compression import Compression
from herring.tensorflow._optimizers import distributed, distributed_class, set_reducer

_V1: Any = tf.compat.v1.train.Optimizer


class _LegacyOptimizer(_V1):  # type: ignore[misc]
    """An optimizer of TensorFlow 1 whose compute_gradients() are those of all ranks."""

    def __init__(self, optimizer: Any, reduction: Reduction, name: str | None, use_locking: bool) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction

    def compute_gradients(self, *arguments: Any, **options: Any) -> list[tuple[Any, Any]]:
        """The wrapped optimizer's, reduced."""
        pairs = self._optimizer.compute_gradients(*arguments, **options)
        variables = [variable for _, variable in pairs]
        reduced = self._reduction([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, *arguments: Any, **options: Any) -> Any:
        """The wrapped optimizer's; so are all others."""
        return self._optimizer.apply_gradients(*arguments, **options)

    def get_slot(self, *arguments: Any, **options: Any) -> Any:
        return self._optimizer.get_slot(*arguments, **options)

    def get_slot_names(self, *arguments: Any, **options: Any) -> Any:
        return self._optimizer.get_slot_names(*arguments, **options)

    def variables(self, *arguments: Any, **options: Any) -> Any:
        return self._optimizer.variables(*arguments, **options)


def keras_optimizer(
    optimizer: Any, reduction: Reduction, name: str | None, passes: int, averages: bool, scales_local: bool = True
) -> Any:
    """An optimizer of Keras 3 or tf_keras like `optimizer`, that reduces. It has register_local_var()."""
    if reduction.op not in (Average, Sum):
        raise InvalidArgumentError("op currently only supports Average and Sum")
    if passes <= 0:
        raise InvalidArgumentError("backward_passes_per_step must be > 0")
    local = LocalReduction(reduction, scales_local)
    made = distributed(optimizer, local, name, passes, averages)
    object.__setattr__(made, "register_local_var", local.register)
    return made


def distribute_in_place(optimizer: Any, reduction: Reduction) -> None:
    """The optimizer reduces from now on; what it has learned so far it keeps."""
    optimizer.__class__ = distributed_class(type(optimizer))
    local = LocalReduction(reduction, True)
    set_reducer(optimizer, local)
    object.__setattr__(optimizer, "register_local_var", local.register)


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer like `optimizer` (of Keras 3, tf_keras or tf.compat.v1.train) that steps with all ranks' gradients.

    Args:
        backward_passes_per_step: Gradients add up over so many passes before they are reduced and applied; Keras alone.
        average_aggregated_gradients: Divide them by the number of passes.

    The others as DistributedGradientTape(). Adasum is for the tape: `op` is Average or Sum here.
    """
    del device_dense, device_sparse
    groups = checked_groups(groups, num_groups)
    if op == Adasum and average_aggregated_gradients:
        raise InvalidArgumentError("Adasum does not support average_aggregated_gradients == True")
    reduction = Reduction(op, compression, sparse_as_dense, gradient_predivide_factor, groups, process_set)
    if not isinstance(optimizer, _V1):
        if op == Adasum:
            raise InvalidArgumentError("op == Adasum is not supported yet with Keras")
        return keras_optimizer(
            optimizer, reduction, name, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients
        )
    if backward_passes_per_step != 1 or op == Adasum:
        raise NotImplementedError(
            f"{type(optimizer).__name__} is an optimizer of TensorFlow 1: backward_passes_per_step and Adasum "
            "work with optimizers of Keras, and with hvd.DistributedGradientTape(op=hvd.Adasum)"
        )
    return _LegacyOptimizer(optimizer, reduction, name, use_locking)


def DistributedKerasOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """DistributedOptimizer() in the order of arguments of Horovod's Keras modules."""
    return DistributedOptimizer(
        optimizer, name, False, device_dense, device_sparse, compression, sparse_as_dense, backward_passes_per_step, op,
        gradient_predivide_factor, average_aggregated_gradients, num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """DistributedKerasOptimizer() but for the layers `local_layers`, whose gradients stay those of this rank."""
    made = DistributedKerasOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for variable in variables_of(local_layers):
        made.register_local_var(variable)
    return made
