"""horovod.keras.callbacks' names."""

import keras

from herring.horovod._keras import callbacks as _impl


class BroadcastGlobalVariablesCallback(_impl.BroadcastGlobalVariables, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.BroadcastGlobalVariables.__doc__


class MetricAverageCallback(_impl.MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.MetricAverage.__doc__


class LearningRateScheduleCallback(_impl.LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(_impl.LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = _impl.LearningRateWarmup.__doc__


class BestModelCheckpoint(_impl.BestModelCheckpoint, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    __doc__ = _impl.BestModelCheckpoint.__doc__


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
