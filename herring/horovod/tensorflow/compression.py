"""horovod.tensorflow.compression's names."""

from __future__ import annotations

from herring.tensorflow._compression import Compression, Compressor

NoneCompressor = Compression.none
FP16Compressor = Compression.fp16

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
