"""horovod.tensorflow.keras.callbacks' names."""

import tensorflow as tf

from herring.horovod._keras import callbacks as _impl


class BroadcastGlobalVariablesCallback(_impl.BroadcastGlobalVariables, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks rank `root_rank`'s variables of the model and the optimizer, after the first batch.

    Args:
        local_variables: Variables that each rank keeps for itself.
    """


class MetricAverageCallback(_impl.MetricAverage, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over all ranks. Put it before callbacks that read them."""


class LearningRateScheduleCallback(_impl.LearningRateSchedule, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to initial_lr * multiplier, from `start_epoch` to `end_epoch`.

    Args:
        initial_lr: The learning rate of the optimizer at the start.
        multiplier: A function of the epoch, or a number: the factor from one epoch to the next.
        staircase: True: set it once, at the start of an epoch. False: set it at each batch, with fractions of an epoch.
        momentum_correction: Adjust the momentum too, where it is a variable of the optimizer (Goyal et al. 2017).
        steps_per_epoch: Needed with staircase=False where Keras does not know it.
    """


class LearningRateWarmupCallback(_impl.LearningRateWarmup, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate from initial_lr / size() to initial_lr in `warmup_epochs` epochs (Goyal et al. 2017)."""


class BestModelCheckpoint(_impl.BestModelCheckpoint, tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras's ModelCheckpoint that keeps the best model. Without a `filepath`: best.keras or best.weights.h5."""


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
