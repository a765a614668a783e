"""horovod.keras.elastic's names."""

import keras

from herring.horovod._keras import callbacks as _impl
from herring.horovod.tensorflow._elastic import TensorFlowKerasState, run


class KerasState(TensorFlowKerasState):
    __doc__ = TensorFlowKerasState.__doc__


class CommitStateCallback(_impl.CommitState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.CommitState.__doc__


class UpdateBatchStateCallback(_impl.UpdateBatchState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.UpdateBatchState.__doc__


class UpdateEpochStateCallback(_impl.UpdateEpochState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.UpdateEpochState.__doc__


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
