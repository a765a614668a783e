"""What `import torch` runs where Herring is installed: an entry point of the group torch.backends.

It stands beside the package `herring`, not in it: importing torch then loads nothing of Herring, native or not, and a
broken installation is nobody's business until the backend is asked for. It adds a name to torch and replaces nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

NAME = "herring"
# Any of them tells that a launcher other than torchrun is in sight; which it is, herring._detect finds out.
_LAUNCHERS = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "SLURM_PROCID",
    "PET_NNODES",
    "SM_CURRENT_HOST",
    "JOB_COMPLETION_INDEX",
    "VC_TASK_INDEX",
)


def autoload() -> None:
    """Registers the backend, so that scripts need not import Herring at all. Never raises."""
    with contextlib.suppress(Exception):  # `import herring.torch` says what it was.
        register()


def register() -> None:
    """Registers the backend for tensors on the CPU and on GPUs. Idempotent."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    if "RANK" not in os.environ and any(name in os.environ for name in _LAUNCHERS):
        _prepare_env_rendezvous()


def _create(options: Any, group_options: Any) -> Any:
    """What torch calls for each process group: c10d's DistributedBackendOptions -> Backend."""
    from herring.torch._groups import create_group

    return create_group(options, group_options)


def _prepare_env_rendezvous() -> None:
    """Under mpirun or srun, init_process_group("herring") finds no RANK where the script does not import herring.torch.

    It is set then, and for that backend only: any other one gets torch's own rendezvous, and its error.
    """
    # By its full name: torch.distributed.rendezvous, the attribute, is a function of that module.
    from importlib import import_module

    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]

    def env(url: str, **arguments: Any) -> Iterator[Any]:
        if _asks_for_herring(sys._getframe(1)):
            from herring.torch._launch import prepare_environment

            prepare_environment(is_asked=True)
        yield from original(url, **arguments)

    handlers["env"] = env


def _asks_for_herring(frame: Any) -> bool:
    """Whether `frame`, which takes the rendezvous' result, is init_process_group() with Herring's backend."""
    return frame.f_code.co_name == "init_process_group" and NAME in str(frame.f_locals.get("backend", "")).lower()
