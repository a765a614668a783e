"""Horovod's names. `sed s/horovod/herring.horovod/` on a script's imports is all that it needs.

herring.horovod.torch has the torch API; `run` starts a function in several processes, on this machine or on several.
"""

from herring._version import __version__
from herring.horovod._engine.launch import run

__all__ = ["__version__", "run"]
