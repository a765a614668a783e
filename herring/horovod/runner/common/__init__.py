"""As in Horovod; see util.env."""
