"""Starting and asking about the default process group, for the modules that mirror other packages' names."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from herring.torch._launch import is_launched_by_mpi, prepare_environment
from herring.torch._register import NAME, register


def ensure_initialized(*args: Any, **kwargs: Any) -> None:
    """Creates the default group where there is none, as torch.distributed.init_process_group does.

    The backend is herring where none is named. A process that no launcher started becomes a group of one.
    """
    if dist.is_initialized():
        return
    register()
    prepare_environment()
    if not args and "backend" not in kwargs:
        kwargs["backend"] = NAME
    places = ("init_method", "store", "rank", "world_size")
    if len(args) <= 1 and not any(name in kwargs for name in places) and "RANK" not in os.environ:
        kwargs.update(store=HashStore(), rank=0, world_size=1)
    dist.init_process_group(*args, **kwargs)


def is_launched() -> bool:
    """Whether a launcher started this process as one of a job."""
    return "RANK" in os.environ or is_launched_by_mpi()


def local_rank() -> int:
    """This process's rank on its host: the launcher's LOCAL_RANK, else what the runtime found, else 0."""
    text = os.environ.get("LOCAL_RANK")
    if text is not None:
        return int(text)
    from herring._context import process

    session = process.session()
    return 0 if session is None else session.local_rank
