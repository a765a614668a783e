"""Memory of CPU tensors that this host's ranks share."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from herring.horovod._engine.engine import home


class SharedMemory:
    """Memory that this host's ranks share and the network can reach, so that nothing is copied on its way: for each
    dtype a row of tensors, one after the other."""

    def __init__(self, row_bytes: Mapping[torch.dtype, int]) -> None:
        """Tensors of so many bytes in all are expected of each dtype; who wants more gets memory apart."""
        session = home.current().session
        self._runtime = None if session.elastic is not None or session.job.size == 1 else session.runtime
        self._rows = {dtype: self._allocate(size) for dtype, size in row_bytes.items()}

    def tensor_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Uninitialised. None where there is no such memory."""
        if not is_plain(tensor) or tensor.nbytes == 0:
            return None
        row, size = self._rows.get(tensor.dtype), tensor.nbytes
        if row is not None and size <= len(row):
            memory, self._rows[tensor.dtype] = row[:size], row[size:]
        else:
            found = self._allocate(size)
            if found is None:
                return None
            memory = found
        # No view of another tensor, which some calls of torch refuse, and a storage of its own.
        bytes_of_it = torch.frombuffer(memory, dtype=torch.uint8)
        return torch.empty(0, dtype=tensor.dtype).set_(bytes_of_it.untyped_storage(), 0, tensor.shape, tensor.stride())

    def _allocate(self, size: int) -> memoryview | None:
        memory = None if self._runtime is None or size == 0 else self._runtime.allocate(size)
        return None if memory is None else memoryview(memory)


def holders_of(tensor: torch.Tensor) -> tuple[int, int]:
    """How many references there are to it, and to its storage. Comparable where the caller's own are the same."""
    return sys.getrefcount(tensor), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_plain(tensor: torch.Tensor) -> bool:
    """Its memory holds it as it is, one element after the other."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()
