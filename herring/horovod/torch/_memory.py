"""Tensors that are reduced where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from herring import _row
from herring.horovod._engine.engine import home
from herring.horovod._engine.process_sets import ProcessSet, global_process_set, members_of


def empty_like(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    process_set: ProcessSet = global_process_set,
) -> dict[str, torch.Tensor]:
    """Uninitialised tensors like these, by name, one after the other in memory that ranks share; not in Horovod.

    ``allreduce_async_(tensor, name=name)`` of them, with the name that each has here, copies nothing on this side: what
    lies side by side and is ready on all ranks is one operation, whatever its size. Other tensors may be passed by
    these names, and ranks may ask for other memory, or for none: what does not lie in place is copied, as without it.

    >>> memory = hvd.empty_like(model.named_parameters())
    >>> for name, parameter in model.named_parameters():
    ...     parameter.grad = memory[name].zero_()      # and optimizer.zero_grad(set_to_none=False)

    ``named_tensors``: CPU tensors, of any shapes and dtypes; for those on a GPU ordinary tensors come back. Raises
    ValueError where a name comes twice.
    """
    engine, members = home.current(), members_of(process_set)
    return _row.empty_like(named_tensors, lambda names, sizes: engine.fusions.place(members.set_id, names, sizes))
