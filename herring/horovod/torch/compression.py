"""horovod.torch.compression's names."""

from herring.horovod.torch._compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
