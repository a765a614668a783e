"""Gives a process started by mpirun the variables that torch's env:// expects, so that the same script runs."""

from __future__ import annotations

import os
import socket
import time

from herring._errors import InvalidArgumentError
from herring._placement import Placement, find_placement

MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_MPI_LIMIT_S = 120.0


def prepare_environment() -> None:
    """Under mpirun sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT where unset.

    The master's address comes from rank 0 through mpi4py: then every rank must call this. Does nothing under torchrun,
    or where nothing launched this process. Raises UnavailableError where mpi4py is needed and missing.
    """
    if "RANK" in os.environ or not is_launched_by_mpi():
        return
    # As MPI says it: what else is set may be half of a pair, for children that the script starts by itself.
    placement = find_placement(
        environment={k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "LOCAL_RANK")}
    )
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        address, port = _agree_on_master(placement)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, port
    values = {
        "RANK": placement.rank,
        "WORLD_SIZE": placement.size,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_size,
    }
    for name, value in values.items():
        if value is not None:
            os.environ.setdefault(name, str(value))


def is_launched_by_mpi() -> bool:
    """Whether mpirun (or another MPI launcher) started this process."""
    return any(name in os.environ for name in MPI_VARIABLES)


def _agree_on_master(placement: Placement) -> tuple[str, str]:
    from herring._mpi import broadcast_text

    text = ""
    if placement.rank == 0:
        address = _own_address(placement)
        text = f"{address} {_free_port(address)}"
    if placement.size > 1:
        text = broadcast_text(text, time.monotonic() + _MPI_LIMIT_S)
    address, separator, port = text.partition(" ")
    if not separator or not port.isdigit():
        raise InvalidArgumentError(f"rank 0 published the master's address as {text!r}")
    return os.environ.get("MASTER_ADDR", address), os.environ.get("MASTER_PORT", port)


def _own_address(placement: Placement) -> str:
    """Where the other ranks reach this one."""
    if placement.local_size == placement.size:
        return "127.0.0.1"
    from herring import _core
    from herring._rendezvous import published_address

    return published_address(False, _core.read_config().interface, os.environ.get("MASTER_ADDR"))


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])
