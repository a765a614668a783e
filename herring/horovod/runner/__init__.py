"""Horovod's name for where run() is: `from herring.horovod.runner import run`."""

from herring.horovod._engine.launch import run

__all__ = ["run"]
