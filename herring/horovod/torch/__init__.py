"""Horovod's torch API on Herring, for tensors on CPUs and GPUs: `import herring.horovod.torch as hvd`.

>>> hvd.init()                                     # under herringrun, torchrun or mpirun; alone, a job of one
>>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
>>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)

docs/horovod.md says where it differs.
"""

from herring._errors import missing_package

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise missing_package(__name__, "torch", _error) from _error

from herring.horovod.common.exceptions import HostsUpdatedInterrupt
from herring.horovod.torch import elastic, mpi_ops
from herring.horovod.torch._memory import empty_like
from herring.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from herring.horovod.torch.mpi_ops import *  # noqa: F403
from herring.horovod.torch.optimizer import DistributedOptimizer
from herring.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "empty_like",
]
__all__ += mpi_ops.__all__
