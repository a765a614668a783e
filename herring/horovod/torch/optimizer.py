"""horovod.torch.optimizer's names."""

from herring.horovod.torch._optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
