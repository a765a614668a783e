"""Gives a process started by mpirun, srun or another scheduler the variables that torch's env:// expects."""

from __future__ import annotations

import os
import socket
import time

from herring._detect import detect
from herring._errors import InvalidArgumentError
from herring._placement import Placement, find_placement

_MPI_LIMIT_S = 120.0


def prepare_environment(*, is_asked: bool = False) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, where unset.

    Under mpirun the master's address comes from rank 0 through mpi4py: then every rank must call this. Does nothing
    under torchrun, or where nothing launched this process. Raises UnavailableError where mpi4py is needed and missing;
    InvalidArgumentError, where a group `is_asked` for, if the variables contradict each other or do not suffice. Else
    they are left alone: a script that starts its ranks by itself sets some of them.
    """
    if "RANK" in os.environ:
        return
    try:
        if not detect(os.environ).is_launched:
            return
        placement = find_placement()
        _set(placement)
    except InvalidArgumentError:
        if is_asked:
            raise


def _set(placement: Placement) -> None:
    has_master = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    if not has_master and placement.hub is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = placement.hub.host, str(placement.hub.port)
    elif not has_master and (placement.is_mpi and not placement.no_hub):
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = _agree_on_master(placement)
    elif not has_master and placement.size == 1:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(_free_port("127.0.0.1"))
    elif not has_master:
        raise InvalidArgumentError(
            f"worker {placement.rank} of {placement.size} (from {placement.source}): "
            + (placement.no_hub or "set MASTER_ADDR (worker 0's host) and MASTER_PORT for all of them")
        )
    values = {
        "RANK": placement.rank,
        "WORLD_SIZE": placement.size,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_size,
    }
    for name, value in values.items():
        if value is not None:
            os.environ.setdefault(name, str(value))


def is_launched() -> bool:
    """Whether a launcher started this process as one of a job, be it that it does not say enough."""
    try:
        return detect(os.environ).is_launched
    except InvalidArgumentError:
        return True


def _agree_on_master(placement: Placement) -> tuple[str, str]:
    from herring._mpi import broadcast_text

    text = ""
    if placement.rank == 0:
        address = _own_address(placement)
        text = f"{address} {_free_port(address)}"
    if placement.size > 1:
        text = broadcast_text(text, placement.size, time.monotonic() + _MPI_LIMIT_S)
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
