"""SageMaker's names (smdistributed.dataparallel.torch.distributed) for torch.distributed on backend herring.

And `monitored_barrier`, which torch's own function opens for gloo alone.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as _dist
from torch.distributed import ReduceOp as _TorchReduceOp
from torch.distributed import (
    all_gather,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    get_rank,
    get_world_size,
    is_initialized,
)
from torch.distributed import monitored_barrier as _torch_monitored_barrier

from herring.torch._register import NAME as _NAME
from herring.torch._start import ensure_initialized as init_process_group
from herring.torch._start import is_launched as is_available
from herring.torch._start import local_rank as get_local_rank

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_available",
    "is_initialized",
    "monitored_barrier",
]


class ReduceOp:
    """How all_reduce combines the ranks' tensors."""

    AVERAGE = _TorchReduceOp.AVG
    SUM = _TorchReduceOp.SUM
    MIN = _TorchReduceOp.MIN
    MAX = _TorchReduceOp.MAX


def monitored_barrier(
    group: _dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """torch.distributed.monitored_barrier, for groups of backend herring too; of any other, torch's own is called.

    Args:
        timeout: A timedelta, or seconds; None: the group's own.
        wait_all_ranks: Whether rank 0 names all ranks that did not come, or the first.

    Raises RuntimeError that names them; on the other ranks, that says what rank 0 said.
    """
    outside: object = _dist.GroupMember.NON_GROUP_MEMBER
    if group == outside or _dist.get_backend(group) != _NAME:
        _torch_monitored_barrier(group, timeout, wait_all_ranks)
        return
    if timeout is None:
        timeout = timedelta(milliseconds=-1)
    elif not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    which = _dist.group.WORLD if group is None else group
    which.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)  # type: ignore[union-attr]
