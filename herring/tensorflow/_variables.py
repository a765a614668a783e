"""One rank's values for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from herring._errors import InvalidArgumentError
from herring.tensorflow._collectives import check_root
from herring.tensorflow._ops import broadcast_all, library


def _broadcast(variables: list[Any], root_rank: int) -> list[Any]:
    session = library().attach()
    check_root(root_rank, session.job.size)
    values = [tf.convert_to_tensor(variable) for variable in variables]
    names = [f"variable.{index}.{variable.name}" for index, variable in enumerate(variables)]
    return broadcast_all(values, names, root_rank)


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> Any:
    """Gives the variables (tf.Variable, Keras's) the values that they have on rank `root_rank`.

    They are matched by their names and places, which must be the same on all ranks. In a graph of TensorFlow 1: returns
    the operation that does it.
    """
    every = list(variables)
    results = _broadcast(every, root_rank)
    assigned = [variable.assign(result) for variable, result in zip(every, results, strict=True)]
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*assigned)


def broadcast_global_variables(root_rank: int) -> Any:
    """broadcast_variables() for all that a graph of TensorFlow 1 has."""
    if tf.executing_eagerly():
        raise InvalidArgumentError(
            "in eager mode there are no global variables; call broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """For sessions of TensorFlow 1: the variables of rank `root_rank` for all, when the session begins."""

    def __init__(self, root_rank: int) -> None:
        self._root_rank = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """The graph is about to be closed."""
        self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Variables have values."""
        del coord
        session.run(self._operation)
