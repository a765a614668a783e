"""horovod.torch.optimizer's names."""

from herring.horovod.torch._optimizer import DistributedOptimizer, _AdasumDistributed, _Distributed

_DistributedOptimizer = _Distributed  # Scripts import these two as well.
_DistributedAdasumOptimizer = _AdasumDistributed

__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]
