"""Values and models, as Horovod's Keras modules take them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from herring.horovod._engine.reduce_ops import Average
from herring.horovod.tensorflow import _calls as calls
from herring.horovod.tensorflow._functions import broadcast_global_variables as broadcast_in_graph
from herring.horovod.tensorflow._gradients import Reduction
from herring.horovod.tensorflow._optimizer import distribute_in_place
from herring.horovod.tensorflow.compression import Compression


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """hvd.allreduce() of what tf.constant() takes."""
    return calls.allreduce(
        tf.convert_to_tensor(value), average, compression=compression, op=op, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, name=name,
    )  # fmt: skip


def allgather(value: Any, name: str | None = None) -> Any:
    """hvd.allgather() likewise."""
    return calls.allgather(tf.convert_to_tensor(value), name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """hvd.broadcast() likewise."""
    return calls.broadcast(tf.convert_to_tensor(value), root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """hvd.reducescatter() likewise."""
    return calls.reducescatter(tf.convert_to_tensor(value), op=op, name=name)


def broadcast_global_variables(root_rank: int) -> Any:
    """For graphs of TensorFlow 1. Raises RuntimeError in eager mode."""
    return broadcast_in_graph(root_rank)


def load(
    keras: Any,
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """A saved model whose optimizer, with its state, is a DistributedOptimizer from now on."""
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    if getattr(model, "optimizer", None) is not None:
        distribute_in_place(model.optimizer, Reduction(compression=compression))
    return model
