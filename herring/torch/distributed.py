"""SageMaker's names (smdistributed.dataparallel.torch.distributed) for torch.distributed on backend herring."""

from __future__ import annotations

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
]


class ReduceOp:
    """How all_reduce combines the ranks' tensors."""

    AVERAGE = _TorchReduceOp.AVG
    SUM = _TorchReduceOp.SUM
    MIN = _TorchReduceOp.MIN
    MAX = _TorchReduceOp.MAX
