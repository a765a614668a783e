"""horovod.torch.elastic's names. A job keeps its size so far: see herring.horovod._engine.elastic."""

from herring.horovod.torch._elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
