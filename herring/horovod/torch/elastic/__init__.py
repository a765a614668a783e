"""horovod.torch.elastic's names. See herring.horovod._engine.elastic."""

from herring.horovod.torch._elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
