"""horovod.torch.elastic.sampler's names."""

from herring.horovod.torch._elastic import ElasticSampler

__all__ = ["ElasticSampler"]
