"""torch.distributed on Herring: the backend "herring" for CPU tensors, and DistributedDataParallel.

>>> import herring.torch
>>> torch.distributed.init_process_group("herring")          # under herringrun, torchrun, mpirun or srun
>>> model = herring.torch.parallel.DistributedDataParallel(model)

Importing this registers the backend (as installing Herring does for `import torch`), and under mpirun and srun sets
what torch reads (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) where it is unset.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from herring._errors import missing_package

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise missing_package(__name__, "torch", _error) from _error

from herring.torch._launch import prepare_environment
from herring.torch._register import register

__all__ = ["distributed", "parallel"]

register()
prepare_environment()


def __getattr__(name: str) -> ModuleType:
    # Loaded when asked for: who only wants the backend pays for the registration.
    if name in __all__:
        return importlib.import_module(f"herring.torch.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
