"""Starting and asking about the default process group, for the modules that mirror other packages' names."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from herring._detect import number
from herring.torch._launch import is_launched, prepare_environment
from herring.torch._register import NAME, register

__all__ = ["ensure_initialized", "is_launched", "local_rank"]


def ensure_initialized(*args: Any, **kwargs: Any) -> None:
    """Creates the default group where there is none, as torch.distributed.init_process_group does.

    The backend is herring where none is named. A process that no launcher started becomes a group of one.
    """
    if dist.is_initialized():
        return
    register()
    places = ("init_method", "store", "rank", "world_size")
    is_placed = len(args) > 1 or any(name in kwargs for name in places)
    prepare_environment(is_asked=not is_placed)
    if not args and "backend" not in kwargs:
        kwargs["backend"] = NAME
    if not is_placed and "RANK" not in os.environ:
        kwargs.update(store=HashStore(), rank=0, world_size=1)
    dist.init_process_group(*args, **kwargs)


def local_rank() -> int:
    """This process's rank on its host: the launcher's LOCAL_RANK, else what the runtime found, else 0."""
    told = number(os.environ, "LOCAL_RANK")
    if told is not None:
        return told
    from herring._context import process

    session = process.session()
    return 0 if session is None else session.local_rank
