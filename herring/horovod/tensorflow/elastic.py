"""horovod.tensorflow.elastic's names."""

from herring.horovod._engine.elastic import ObjectState, State
from herring.horovod.tensorflow._elastic import TensorFlowKerasState, TensorFlowState, run

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
