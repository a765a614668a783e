"""horovod.common's names."""
