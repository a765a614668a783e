"""horovod.tensorflow.keras.elastic's names."""

import tensorflow as tf

from herring.horovod._keras import callbacks as _impl
from herring.horovod.tensorflow._elastic import TensorFlowKerasState, run


class KerasState(TensorFlowKerasState):
    """The state of an elastic job: a Keras model with its optimizer, and other objects as attributes by their names."""


class CommitStateCallback(_impl.CommitState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Calls state.commit() after every `batches_per_commit` batches, and at the end of an epoch."""


class UpdateBatchStateCallback(_impl.UpdateBatchState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps state.batch: the number of the batch in this epoch."""


class UpdateEpochStateCallback(_impl.UpdateEpochState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps state.epoch: how many epochs are done, those before a reset too."""


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
