"""TensorFlow on Herring: reductions of tensors in eager mode and in tf.function, and SageMaker's names for training.

>>> import tensorflow as tf
>>> import herring.tensorflow as herring
>>> herring.init()                                  # under herringrun, mpirun or srun
>>> with tf.GradientTape() as tape:
...     loss = loss_of(model(images), labels)
>>> tape = herring.DistributedGradientTape(tape)
>>> optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

The names are those of smdistributed.dataparallel.tensorflow. docs/tensorflow.md says what works and what does not.
"""

from __future__ import annotations

from herring._errors import missing_package

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as _error:
    raise missing_package(__name__, "tensorflow", _error) from _error

from herring import is_initialized, local_rank, local_size, rank, shutdown, size
from herring.tensorflow._collectives import ReduceOp, allgather, allreduce, broadcast, init, oob_allreduce, overlap
from herring.tensorflow._compression import Compression
from herring.tensorflow._gradients import DistributedGradientTape, DistributedOptimizer
from herring.tensorflow._strategy import HerringStrategy
from herring.tensorflow._variables import (
    BroadcastGlobalVariablesHook,
    broadcast_global_variables,
    broadcast_variables,
)

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HerringStrategy",
    "ReduceOp",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "overlap",
    "rank",
    "shutdown",
    "size",
]
