"""horovod.runner.common.util.env's name that Horovod's own tests use."""

from herring.horovod._engine.environment import get_env_rank_and_size

__all__ = ["get_env_rank_and_size"]
