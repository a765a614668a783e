"""horovod.torch.sync_batch_norm's names."""

from herring.horovod.torch._sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
