"""Herring: gradient averaging through servers, for any array library on the CPU.

>>> import herring
>>> herring.init()                              # under herringrun, torchrun, mpirun, srun; alone, a job of one
>>> mean = herring.allreduce(gradient)          # numpy in, numpy out; torch in, torch out
>>> herring.shutdown()                          # or at exit

`herring.torch` has the torch.distributed backend and DistributedDataParallel; nothing here imports torch.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

try:
    from herring import _core  # noqa: F401  (only to say what to do where it is missing)
except ImportError as error:
    from herring._native import why_not_loaded

    raise ImportError(why_not_loaded(error)) from error

from herring._collectives import (
    ReduceOp,
    allgather,
    allreduce,
    allreduce_,
    barrier,
    broadcast,
    broadcast_,
    empty,
    empty_like,
    server_counters,
    stats,
    stragglers,
)
from herring._context import process as _process
from herring._errors import (
    CancelledError,
    CorruptedError,
    HerringError,
    HerringTimeoutError,
    InternalError,
    InvalidArgumentError,
    MismatchError,
    MissingPackageError,
    NotFiniteError,
    PeerLostError,
    ProtocolError,
    ShutdownError,
    TransportError,
    UnavailableError,
)
from herring._exchanges import alltoall, grouped_allreduce, grouped_allreduce_, reduce_scatter
from herring._group import Group, new_group, split
from herring._handle import Handle, to_seconds
from herring._membership import Callback, MembershipChange
from herring._membership import listeners as _listeners
from herring._version import __version__

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from herring._settings import Settings

__all__ = [
    "CancelledError",
    "CorruptedError",
    "Group",
    "Handle",
    "HerringError",
    "HerringTimeoutError",
    "InternalError",
    "InvalidArgumentError",
    "MembershipChange",
    "MismatchError",
    "MissingPackageError",
    "NotFiniteError",
    "PeerLostError",
    "ProtocolError",
    "ReduceOp",
    "ShutdownError",
    "TransportError",
    "UnavailableError",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "description",
    "empty",
    "empty_like",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "new_group",
    "on_membership_change",
    "rank",
    "reduce_scatter",
    "server_counters",
    "shutdown",
    "size",
    "split",
    "stats",
    "stragglers",
]


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    timeout: float | timedelta | None = None,
    **settings: Unpack[Settings],
) -> None:
    """Joins the job; returns when every process of it is here and connected.

    Args:
        rank, size: This worker's place; else as the launcher says (torchrun, herringrun, mpirun, srun, others:
            docs/launching.md), else a job of this one process.
        timeout: Seconds until an operation fails, else the setting timeout_s (600).
        settings: Any setting of docs/configuration.md, in lower case without HERRING_: servers=2, chunk_bytes="64KB".
            They win over the environment.

    Calling it again with the same values, or none, does nothing. Raises HerringTimeoutError naming who is missing,
    MismatchError where processes disagree about the job, InvalidArgumentError for a bad value.
    """
    seconds = to_seconds(timeout)
    if seconds is not None:
        settings.setdefault("timeout_s", seconds)
    _process.start(settings, rank=rank, size=size)


def shutdown() -> None:
    """Finishes what is pending and leaves the job. Runs at exit by itself; calling it twice does nothing."""
    _process.stop()


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return _process.session() is not None


def rank() -> int:
    """This worker's rank, 0 .. size()-1. In an elastic job it may change where size() does."""
    return _process.current().job.rank


def size() -> int:
    """Number of workers; in an elastic job, now."""
    return _process.current().job.size


def local_rank() -> int:
    """This worker's rank among those on its host."""
    return _process.current().local_rank


def local_size() -> int:
    """Number of workers on this host."""
    return _process.current().local_size


def on_membership_change(callback: Callback) -> Callback:
    """Calls `callback(MembershipChange)` each time an elastic job has lost or gained workers; also as a decorator.

    On a thread of its own, after rank() and size() have changed. docs/reliability.md, "Elastic jobs".
    """
    _listeners.add(callback)
    return callback


def description() -> str:
    """How data travels in this job: "shared memory", "tcp (libfabric 2.5, eth0) via 4 embedded servers"."""
    return _process.current().runtime.description()
