"""Makes torch.distributed know the backend "herring". Cheap: everything else is loaded when a group is created.

`autoload` is an entry point of the group torch.backends: torch calls it at the end of `import torch`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from datetime import timedelta
from typing import Any

NAME = "herring"


def autoload() -> None:
    """Registers the backend, so that scripts need not import Herring at all."""
    register()
    # torch's import brought herring.torch in. A user's own `import herring.torch` shall run its body once more, as that
    # prepares the process for mpirun, which merely importing torch must not do.
    package = sys.modules.get("herring.torch")
    if package is not None and not getattr(package.__spec__, "_initializing", False):
        del sys.modules["herring.torch"]


def is_importing_torch() -> bool:
    """Whether this runs inside `import torch`."""
    package = sys.modules.get("torch")
    return package is not None and bool(getattr(package.__spec__, "_initializing", False))


def register() -> None:
    """Registers the backend for CPU tensors. Idempotent."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    _open_monitored_barrier()
    mpi_variables = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    if "RANK" not in os.environ and any(name in os.environ for name in mpi_variables):
        _prepare_before_env_rendezvous()


def _create(options: Any, group_options: Any) -> Any:
    """What torch calls for each process group: c10d's DistributedBackendOptions -> Backend."""
    from herring.torch._groups import create_group

    return create_group(options, group_options)


def _open_monitored_barrier() -> None:
    """torch.distributed.monitored_barrier asks for gloo by name; from now on it takes Herring's groups too."""
    import torch.distributed as dist

    module = importlib.import_module("torch.distributed.distributed_c10d")
    original = module.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> Any:
        if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_backend(group) != NAME:
            return original(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = timedelta(milliseconds=-1)  # The group's own.
        elif isinstance(timeout, float):  # As torch does with gloo.
            timeout = timedelta(seconds=timeout)
        which = module._get_default_group() if group is None else group
        return which.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    for each in (module, dist):
        vars(each)["monitored_barrier"] = monitored_barrier


def _prepare_before_env_rendezvous() -> None:
    """Under mpirun, init_process_group() finds no RANK where the script does not import herring.torch: set it then."""
    # By its full name: torch.distributed.rendezvous, the attribute, is a function of that module.
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]

    def prepared(url: str, **arguments: Any) -> Any:
        from herring.torch._launch import prepare_environment

        prepare_environment()
        return original(url, **arguments)

    handlers["env"] = prepared
