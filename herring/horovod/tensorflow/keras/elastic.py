"""horovod.tensorflow.keras.elastic's names."""

import tensorflow as tf

from herring.horovod._keras import callbacks as _impl
from herring.horovod.tensorflow._elastic import TensorFlowKerasState, run


class KerasState(TensorFlowKerasState):
    __doc__ = TensorFlowKerasState.__doc__


class CommitStateCallback(_impl.CommitState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.CommitState.__doc__


class UpdateBatchStateCallback(_impl.UpdateBatchState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.UpdateBatchState.__doc__


class UpdateEpochStateCallback(_impl.UpdateEpochState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.UpdateEpochState.__doc__


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
