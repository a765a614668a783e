"""As in Horovod; see env."""
