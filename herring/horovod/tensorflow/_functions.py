"""Variables and objects of one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from herring.horovod._engine import objects
from herring.horovod._engine.process_sets import ProcessSet, global_process_set
from herring.horovod.tensorflow._calls import broadcast_values


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Gives the variables (tf.Variable, Keras's) the values that they have on rank `root_rank`.

    They are matched by their names and places, which must be the same on all ranks. In a graph of TensorFlow 1: returns
    the operation that does it. `inplace` says nothing here.
    """
    del inplace
    every = list(variables)
    results = broadcast_values(every, root_rank, None, process_set)
    assigned = [variable.assign(result) for variable, result in zip(every, results, strict=True)]
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*assigned)


def broadcast_global_variables(root_rank: int) -> Any:
    """broadcast_variables() for all that a graph of TensorFlow 1 has. Raises RuntimeError in eager mode."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. Please use "
            "`hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """For sessions of TensorFlow 1: the variables of rank `root_rank` for all, when the session begins."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        del device
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """The graph is about to be closed."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Variables have values."""
        del coord
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank `root_rank`'s object, on every rank; there the very one. Goes past TensorFlow: at once, in no graph."""
    del session
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """broadcast_object() with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The ranks' objects, in order of rank. As broadcast_object()."""
    del session
    return objects.allgather_object(obj, name, process_set)
