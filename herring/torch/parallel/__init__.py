"""Data-parallel training: DistributedDataParallel on Herring."""

from herring.torch.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
