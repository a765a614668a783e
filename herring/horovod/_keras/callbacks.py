"""Callbacks, to be mixed in before Keras's own class; both of Keras 3 and of tf_keras."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from herring._errors import InvalidArgumentError
from herring.horovod._engine import info
from herring.horovod.tensorflow._calls import allreduce
from herring.horovod.tensorflow._elastic import variables_of_optimizer
from herring.horovod.tensorflow._functions import broadcast_variables
from herring.horovod.tensorflow._gradients import key_of

Logs = dict[str, Any] | None


# Without eager execution tf_keras has a graph of TensorFlow 1, and a session that runs it.


def _run(result: Any) -> Any:
    """A tensor's value; nothing for None."""
    if tf.executing_eagerly():
        return None if result is None else result.numpy()
    return tf.compat.v1.keras.backend.get_session().run(result)


def _number(value: Any) -> float:
    """A variable's."""
    return float(tf.convert_to_tensor(value) if tf.executing_eagerly() else tf.compat.v1.keras.backend.get_value(value))


def _assign(variable: Any, value: float) -> None:
    if tf.executing_eagerly():
        variable.assign(value)
    else:
        tf.compat.v1.keras.backend.set_value(variable, value)


class BroadcastGlobalVariables:
    """Gives all ranks the model's and the optimizer's variables of rank `root_rank`, after the first batch.

    Args:
        local_variables: Some that stay as they are.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        del device
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local: set[int] = set()
        every = local_variables if isinstance(local_variables, Iterable) else [local_variables]
        for variable in [] if local_variables is None else every:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """It is of this rank alone."""
        if not hasattr(var, "assign"):
            raise ValueError("All local variables must be of tf.Variable type.")
        self._local.add(key_of(var))

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        del batch, logs
        if self.broadcast_done:
            return
        every = [*self.model.variables, *variables_of_optimizer(self.model.optimizer, self.model)]
        _run(broadcast_variables([each for each in every if key_of(each) not in self._local], self.root_rank))
        self.broadcast_done = True


class MetricAverage:
    """Averages an epoch's metrics over all ranks. Put it before callbacks that read them."""

    def __init__(self, device: str = "") -> None:
        del device
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        del epoch
        names = sorted(logs or ())
        if not logs or not names:
            return
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        averages = _run(allreduce(values, name=f"metrics.{'.'.join(names)}"))
        logs.update({name: float(value) for name, value in zip(names, averages, strict=True)})


class LearningRateSchedule:
    """From `start_epoch` to `end_epoch` the learning rate is initial_lr * multiplier.

    Args:
        initial_lr: Of the optimizer at the start.
        multiplier: A function of the epoch, or a number that comes in once more each epoch.
        staircase: Set it at the start of an epoch, with whole epochs; else at each batch, with fractions.
        momentum_correction: Where the optimizer's momentum is a variable, it follows for the batch (Goyal et al. 2017).
        steps_per_epoch: For staircase=False, where Keras does not know.
    """

    model: Any
    params: dict[str, Any]

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.current_epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        del logs
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise InvalidArgumentError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter "
                    f"to the {type(self).__name__}()."
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        del logs
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        del logs
        is_over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or is_over:
            return
        if not self.staircase:
            self._adjust(self.current_epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        del batch, logs
        if self._momentum is not None:
            _assign(self.model.optimizer.momentum, self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        del epoch
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return _number(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        momentum: Any = getattr(optimizer, "momentum", None)
        # Keras 3's is a number that is in the compiled step already.
        if self.momentum_correction and hasattr(momentum, "assign") and old:
            self._momentum = _number(momentum)
            _assign(momentum, self._momentum * new / old)


class LearningRateWarmup(LearningRateSchedule):
    """From initial_lr / size() to initial_lr in `warmup_epochs` (Goyal et al. 2017)."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1.0 / (self.steps_per_epoch or 1)  # Round numbers at the end of an epoch.
            return 1.0 / info.size() * (epoch * (info.size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, staircase=False, momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )  # fmt: skip
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0 and info.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.")


class CommitState:
    """state.commit() after every `batches_per_commit` batches, and at the end of an epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        del logs
        self.batches_remaining = self.batches_per_commit  # Equally many on all ranks, new ones too.

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        del batch, logs
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        del epoch, logs
        self.state.commit()


class UpdateBatchState:
    """state.batch is the batch of the epoch."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        del logs
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        del epoch, logs
        self.state.batch = 0


class UpdateEpochState:
    """state.epoch counts epochs, those before a reset too."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        del logs
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        del logs
        self.state.epoch = self.initial_epoch + epoch + 1


class BestModelCheckpoint:
    """Keras's ModelCheckpoint that keeps the best model. Without a `filepath`: best.keras, or best.weights.h5."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str | None = None,
    ) -> None:
        super().__init__(
            filepath=filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor, verbose=verbose, save_best_only=True, save_weights_only=save_weights_only, mode=mode,
            save_freq=save_freq,
        )  # type: ignore[call-arg]  # fmt: skip
