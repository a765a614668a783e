"""Data-parallel training: DistributedDataParallel on Herring."""

from herring.torch.parallel.compression import WireDtype, wire_dtype_hook
from herring.torch.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel", "WireDtype", "wire_dtype_hook"]
