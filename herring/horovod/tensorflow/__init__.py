"""Horovod's TensorFlow API on Herring, for CPU tensors: `import herring.horovod.tensorflow as hvd`.

>>> hvd.init()                                     # under herringrun, torchrun or mpirun; alone, a job of one
>>> tape = hvd.DistributedGradientTape(tape)
>>> hvd.broadcast_variables(model.variables, root_rank=0)

docs/horovod.md says where it differs.
"""

from herring._errors import missing_package

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as _error:
    raise missing_package(__name__, "tensorflow", _error) from _error

from herring.horovod.common.exceptions import HostsUpdatedInterrupt
from herring.horovod.tensorflow import elastic, mpi_ops
from herring.horovod.tensorflow._calls import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter
from herring.horovod.tensorflow._functions import BroadcastGlobalVariablesHook, broadcast_global_variables
from herring.horovod.tensorflow._gradients import DistributedGradientTape, PartialDistributedGradientTape
from herring.horovod.tensorflow._optimizer import DistributedOptimizer
from herring.horovod.tensorflow.compression import Compression
from herring.horovod.tensorflow.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from herring.horovod.tensorflow.mpi_ops import *  # noqa: F403
from herring.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from herring.horovod.tensorflow.util import _executing_eagerly

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "_executing_eagerly",
    "allgather_object",
    "allreduce",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]
__all__ += mpi_ops.__all__
