"""horovod.tensorflow.sync_batch_norm's names."""

from herring.horovod.tensorflow._sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
