"""horovod.common.elastic's names."""

from herring.horovod._engine.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
