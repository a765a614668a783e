"""Gradients of float32 that cross the wire in 16 bits.

Every rank rounds its gradient to the wire's type once; the servers add in float32, divide, and round the average once.
A ring in the same type rounds after each of its n-1 additions.
"""

# No `from __future__ import annotations`: torch compares a hook's annotations with its types, not with their names.

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from herring.torch._register import NAME
from herring.torch.parallel._average import average

__all__ = ["WireDtype", "wire_dtype_hook"]

_WIRE_DTYPES = (torch.bfloat16, torch.float16)


class WireDtype:
    """State of `wire_dtype_hook`: one for each DDP model.

    `dtype` is torch.bfloat16 or torch.float16 (whose largest number is 65504: a gradient beyond it arrives as inf).
    `process_group` is the model's; none: the default group. Raises ValueError for another dtype or backend.
    """

    def __init__(self, dtype: torch.dtype, process_group: Any = None) -> None:
        if dtype not in _WIRE_DTYPES:
            raise ValueError(f"wire_dtype is {dtype!r}; it must be torch.bfloat16 or torch.float16")
        self.dtype = dtype
        self.group: Any = process_group if process_group is not None else dist.group.WORLD
        if dist.get_backend(self.group) != NAME:
            raise ValueError(
                f"wire_dtype needs a process group on backend {NAME!r}, got {dist.get_backend(self.group)!r}, which "
                "would round after each addition"
            )
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """As DDP itself, a pickle knows the default group only."""
        if self.group is not dist.group.WORLD:
            raise ValueError("DDP with wire_dtype pickles on the default process group only")
        return {"dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["dtype"])  # type: ignore[misc]

    def buffer(self, index: int, size: int, device: torch.device | None = None) -> torch.Tensor:
        """The memory that bucket `index` crosses the wire from; kept, as every step sends the same buckets."""
        found = self._buffers.get((index, size))
        if found is None:
            device = torch.device("cpu") if device is None else device
            if device.type == "cpu":
                found = self.group._get_backend(device).allocate_tensor(size, dtype=self.dtype, device=device)
            else:  # Where the gradient is: the cast is a kernel there, and half as much is copied to the host.
                found = torch.empty(size, dtype=self.dtype, device=device)
            self._buffers = {key: kept for key, kept in self._buffers.items() if key[0] != index}  # Rebuilt buckets.
            self._buffers[index, size] = found
        return found


def wire_dtype_hook(state: WireDtype, bucket: GradBucket) -> Future[torch.Tensor]:
    """Communication hook: averages the bucket in `state.dtype` on the wire, in float32 on the servers.

    Buckets that are not float32 are averaged as they are. Register with `model.register_comm_hook(WireDtype(...),
    wire_dtype_hook)`, or pass `wire_dtype` to herring.torch.parallel.DistributedDataParallel.
    """
    gradient = bucket.buffer()
    is_narrowed = gradient.dtype == torch.float32
    wire = gradient
    if is_narrowed:
        wire = state.buffer(bucket.index(), gradient.numel(), gradient.device)
        wire.copy_(gradient)

    def widen(done: Future[torch.Tensor]) -> torch.Tensor:
        mean = done.value()
        return gradient.copy_(mean) if is_narrowed else mean

    future: Future[torch.Tensor] = average(wire, state.group).then(widen)
    return future
