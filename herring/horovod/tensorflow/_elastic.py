"""Elastic training's names for TensorFlow: what is kept of models, optimizers and variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from herring._errors import InvalidArgumentError
from herring.horovod._engine import info
from herring.horovod._engine.elastic import ObjectState, run_fn
from herring.horovod._engine.engine import home
from herring.horovod._engine.process_sets import global_process_set
from herring.horovod.common.exceptions import HorovodInternalError
from herring.horovod.tensorflow._door import door
from herring.horovod.tensorflow._functions import broadcast_object, broadcast_variables

ResultT = TypeVar("ResultT")

# What a failed operation of Herring's becomes in TensorFlow (bindings/tensorflow/kernels.cc).
_FAILURES = (
    tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError, tf.errors.DataLossError, tf.errors.InternalError,
)  # fmt: skip


def run(func: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Decorates func(state, ...): the state is the same on all ranks when it begins. See _engine.elastic.run_fn."""

    @functools.wraps(func)
    def told(state: Any, *arguments: Any, **options: Any) -> ResultT:
        door.members(global_process_set)  # Graphs of an earlier generation go to this one.
        try:
            return func(state, *arguments, **options)
        except _FAILURES as error:
            if "herring: " not in str(error):
                raise
            raise HorovodInternalError(str(error)) from error

    return run_fn(told, _rejoin)


def _rejoin() -> None:
    if home.current().session.elastic is not None:
        home.restart(failed=False)
    else:
        info.shutdown()
        info.init()
    door.members(global_process_set)


class TensorFlowState(ObjectState):
    """Variables and other objects of a training process, these each an attribute by its name.

    sync() gives every rank what rank 0 has; commit() keeps a copy of all, restore() goes back to it.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        self.variables = list(variables or tf.compat.v1.global_variables())
        self.session = session
        self._broadcast = None if tf.executing_eagerly() else broadcast_variables(self.variables, 0)
        self._saved_values: list[Any] = []
        self._keep()
        super().__init__(bcast_object=broadcast_object, get_rank=info.rank, **kwargs)

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self.variables, self._saved_values, strict=True):
            if self._broadcast is None:
                variable.assign(value)
            else:
                variable.load(value, self._in_session())
        super().restore()

    def sync(self) -> None:
        if self._broadcast is None:
            broadcast_variables(self.variables, 0)
        else:
            self._in_session().run(self._broadcast)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        if tf.executing_eagerly():
            self._saved_values = [variable.numpy() for variable in self.variables]
        else:
            self._saved_values = self._in_session().run(self.variables)

    def _in_session(self) -> Any:
        session = self.session or tf.compat.v1.get_default_session()
        if session is None:
            raise InvalidArgumentError("in a graph of TensorFlow 1, TensorFlowState needs a session")
        return session


class TensorFlowKerasState(ObjectState):
    """A Keras model with its optimizer, and other objects, these each an attribute by its name. As TensorFlowState."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        if not getattr(model, "built", True):
            raise InvalidArgumentError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        self._saved_values: list[Any] = []
        self._keep()
        super().__init__(bcast_object=broadcast_object, get_rank=info.rank, **kwargs)

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._variables(), self._saved_values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        broadcast_variables(self._variables(), 0)
        self._keep()
        super().sync()

    def _variables(self) -> list[Any]:
        if self.optimizer is None:
            return list(self.model.variables)
        return [*self.model.variables, *variables_of_optimizer(self.optimizer, self.model)]

    def _keep(self) -> None:
        self._saved_values = [variable.numpy() for variable in self._variables()]


def variables_of_optimizer(optimizer: Any, model: Any) -> list[Any]:
    """All of them, also those that it makes at its first step."""
    if not getattr(optimizer, "built", True) or getattr(optimizer, "_variables", None) == []:
        optimizer.build(model.trainable_variables)
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)
