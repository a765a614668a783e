"""Buckets of one DistributedDataParallel in the memory of its process group.

torch's reducer asks a backend for this memory only where DDP_DISABLE_COMM_MEM=0 is set, which is for every DDP of the
process and every backend, NCCL included. Here it is one DDP, on its own thread, while the reducer makes its buckets.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from herring.torch._register import NAME

_CPU = torch.device("cpu")


def buckets_of(process_group: dist.ProcessGroup) -> contextlib.AbstractContextManager[Any]:
    """While this is entered, flat CPU tensors that the reducer makes lie in the group's memory, if it is Herring's."""
    # A forward that is being compiled: tracing cannot look into the group. Before, importing dynamo would take seconds.
    if "torch._dynamo" in sys.modules:
        return torch.compiler.disable(_buckets_of)(process_group)  # type: ignore[no-untyped-call, no-any-return]
    return _buckets_of(process_group)


def _buckets_of(process_group: dist.ProcessGroup) -> contextlib.AbstractContextManager[Any]:
    if dist.get_backend(process_group) != NAME:
        return contextlib.nullcontext()
    return _Allocation(process_group._get_backend(_CPU))


class _Allocation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, backend: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend = backend

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and len(args) == 1 and len(args[0]) == 1 and args[0][0] > 0:
            device, dtype = options.get("device") or _CPU, options.get("dtype") or torch.get_default_dtype()
            if torch.device(device) == _CPU and options.get("layout") in (None, torch.strided):
                return self._backend.allocate_tensor(args[0][0], dtype=dtype, device=_CPU)
        return func(*args, **options)
