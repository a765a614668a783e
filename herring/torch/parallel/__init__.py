"""Data-parallel training: DistributedDataParallel on Herring."""

from herring.torch.parallel.compression import WireDtype, wire_dtype_hook
from herring.torch.parallel.distributed import DistributedDataParallel
from herring.torch.parallel.hooks import in_order

__all__ = ["DistributedDataParallel", "WireDtype", "in_order", "wire_dtype_hook"]
