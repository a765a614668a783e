"""Optimizers of Keras 3 and of tf_keras (Keras 2) that reduce gradients before they apply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from herring._errors import InvalidArgumentError

Reduce = Callable[[list[Any], list[Any]], list[Any]]


class _Reducer:
    """What one optimizer does with its gradients: reduces them at once, or adds up those of several passes before."""

    def __init__(self, reduce: Reduce, passes: int, averages_passes: bool) -> None:
        self.passes = passes
        self.counter: Any = None  # Passes whose gradients wait in `_sums`.
        self._reduce = reduce
        self._averages = averages_passes
        self._sums: list[Any] = []
        self._is_reduced = False  # What is applied next comes from compute(),
        self._by_a_function = False  # which a tf.function calls: this code runs while it is traced, once for all steps.

    def compute(self, gradients: list[Any], sources: list[Any]) -> list[Any]:
        """What compute_gradients() returns: reduced, but for those that add up, which reduce() does when it is time."""
        if self.passes > 1:
            return gradients
        self._is_reduced = True
        self._by_a_function = not tf.executing_eagerly()
        return self._reduce(gradients, sources)

    def reduce(self, gradients: list[Any], sources: list[Any]) -> list[Any]:
        """What is applied: the reduced gradients, once."""
        if self._is_reduced:
            self._is_reduced = self._by_a_function and tf.executing_eagerly()
            return gradients
        return self._reduce(gradients, sources)

    def step(
        self, optimizer: Any, gradients: list[Any], sources: list[Any], apply: Callable[[list[Any]], object]
    ) -> None:
        """Adds the gradients to what there is; each time that there are those of `passes`, applies their reduction."""
        gradients = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if self.counter is None:
            with tf.init_scope():
                self.counter = tf.Variable(0, trainable=False, name="backward_passes")
                self._sums = [
                    tf.Variable(tf.zeros(sources[index].shape, gradients[index].dtype), trainable=False)
                    for index in present
                ]
        if len(present) != len(self._sums):
            raise InvalidArgumentError(
                f"there are {len(present)} gradients, and there were {len(self._sums)} in an earlier backward pass; "
                "backward_passes_per_step needs the same ones in each"
            )
        for total, index in zip(self._sums, present, strict=True):
            total.assign_add(gradients[index])
        count = self.counter.assign_add(1)

        def apply_all() -> Any:
            sums = list(gradients)
            for total, index in zip(self._sums, present, strict=True):
                sums[index] = tf.convert_to_tensor(total)
            reduced = self._reduce(sums, sources)
            if self._averages:
                reduced = [None if each is None else each / self.passes for each in reduced]
            apply(reduced)
            for total in self._sums:
                total.assign(tf.zeros_like(total))
            self.counter.assign(0)
            return tf.constant(True)

        def pass_by() -> Any:
            optimizer.iterations.assign_add(1)
            return tf.constant(False)

        tf.cond(count >= self.passes, apply_all, pass_by)


def _gradients(loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> list[tuple[Any, Any]]:
    """With their variables. Of a loss that is computed here, or was under `tape`."""
    if not callable(loss) and tape is None:
        raise InvalidArgumentError("loss is a tensor: compute_gradients() needs the tape that it was computed under")
    tape = tf.GradientTape() if tape is None else tape
    if callable(loss):
        with tape:  # Which sees trainable variables by itself, and watch() does not take Keras 3's.
            loss = loss()
    variables = list(var_list() if callable(var_list) else var_list)
    return list(zip(tape.gradient(loss, variables, grad_loss), variables, strict=True))


def _horovods(kind: Any) -> dict[str, Any]:
    """Methods that Horovod's optimizers have, and scripts call."""

    def _compute_gradients(self: Any, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        if not callable(var_list) or not callable(loss):  # Else asked after the loss, which may make variables.
            var_list = list(var_list() if callable(var_list) else var_list)
        if hasattr(kind, "_compute_gradients"):
            pairs = list(kind._compute_gradients(self, loss, var_list, grad_loss, tape))
        elif grad_loss is None and hasattr(kind, "compute_gradients"):
            pairs = list(kind.compute_gradients(self, loss, var_list, tape))
        else:
            pairs = _gradients(loss, var_list, grad_loss, tape)
        gradients, variables = [each for each, _ in pairs], [each for _, each in pairs]
        return list(zip(self._herring_reducer.compute(gradients, variables), variables, strict=True))

    def compute_gradients(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Pairs of all ranks' gradients and variables, for apply_gradients(); with backward_passes_per_step of this
        rank's gradients."""
        return self._compute_gradients(loss, var_list, None, tape)

    def get_gradients(self: Any, loss: Any, params: Any) -> Any:
        return self._herring_reducer.compute(list(kind.get_gradients(self, loss, params)), list(params))

    def _agg_helper(self: Any) -> Any:
        return self._herring_reducer if self._herring_reducer.passes > 1 else None

    methods: dict[str, Any] = {
        "_compute_gradients": _compute_gradients,
        "compute_gradients": compute_gradients,
        "_agg_helper": property(_agg_helper),
    }
    if hasattr(kind, "get_gradients"):
        methods["get_gradients"] = get_gradients
    return methods


def _keras_3(kind: Any) -> dict[str, Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        reducer: _Reducer = self._herring_reducer
        grads = list(grads)
        sources = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if reducer.passes == 1:
            return kind.apply(self, reducer.reduce(grads, sources), trainable_variables)
        if not self.built:
            with tf.init_scope():
                self.build(sources)
        reducer.step(self, grads, sources, lambda reduced: kind.apply(self, reduced, trainable_variables))
        return self.iterations

    return {"apply": apply}


def _keras_2(kind: Any) -> dict[str, Any]:
    def apply_gradients(self: Any, grads_and_vars: Any, *arguments: Any, **options: Any) -> Any:
        reducer: _Reducer = self._herring_reducer
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        grads, sources = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]

        def apply(reduced: list[Any]) -> Any:
            return kind.apply_gradients(self, zip(reduced, sources, strict=True), *arguments, **options)

        if reducer.passes == 1:
            return apply(reducer.reduce(grads, sources))
        with tf.init_scope():
            create = getattr(self, "_create_all_weights", None) or self.build
            create(sources)
        reducer.step(self, grads, sources, apply)
        return self.iterations

    return {"apply_gradients": apply_gradients}


def distributed_class(kind: Any) -> Any:
    """A subclass of an optimizer's class, of the same name: Keras writes that into saved models, which so load without
    Herring. Raises InvalidArgumentError where it is no optimizer of Keras."""
    if not (hasattr(kind, "from_config") and hasattr(kind, "apply_gradients")):  # Layers and models have the first.
        raise InvalidArgumentError(f"optimizer is {kind.__name__}; it must be an optimizer of Keras 3 or tf_keras")
    methods = _keras_3(kind) if callable(getattr(kind, "apply", None)) else _keras_2(kind)
    return type(kind.__name__, (kind,), {**_horovods(kind), **methods, "__module__": kind.__module__})


def set_reducer(optimizer: Any, reduce: Reduce, passes: int = 1, averages_passes: bool = False) -> Any:
    """Gives an optimizer of a distributed_class() what it reduces with; returns it."""
    # Not as Keras sets attributes: it would save what is in there with the model.
    object.__setattr__(optimizer, "_herring_reducer", _Reducer(reduce, passes, averages_passes))
    return optimizer


def distributed(
    optimizer: Any, reduce: Reduce, name: str | None = None, passes: int = 1, averages_passes: bool = False
) -> Any:
    """A new optimizer like `optimizer`, whose gradients are those that reduce(gradients, variables) returns.

    `passes`: so many times gradients add up before they are reduced and applied, divided by it where `averages_passes`.
    """
    if is_distributed(optimizer):
        raise InvalidArgumentError(
            f"this {type(optimizer).__name__} is already distributed; pass the one it was made of"
        )
    kind = distributed_class(type(optimizer))
    settings = optimizer.get_config()
    if name is not None:
        settings["name"] = name
    return set_reducer(kind.from_config(settings), reduce, passes, averages_passes)


def is_distributed(optimizer: Any) -> bool:
    """Made by distributed()."""
    return hasattr(optimizer, "_herring_reducer")
