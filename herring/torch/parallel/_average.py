"""The average of a bucket over those who contribute: all ranks, or (backup workers) those who came in time."""

# No `from __future__ import annotations`: torch compares a hook's annotations with its types, not with their names.

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from herring import _core
from herring._context import process
from herring.torch._groups import groups
from herring.torch._register import NAME

__all__ = ["average", "average_hook", "has_backup"]


def has_backup(group: Any) -> bool:
    """Whether reductions of this process group may go on without late ranks (HERRING_BACKUP_WORKERS)."""
    session = process.session()
    return session is not None and session.config.backup_workers > 0 and dist.get_backend(group) == NAME


def average(tensor: torch.Tensor, group: Any) -> Future[torch.Tensor]:
    """Averages in place over those who contribute. All ranks get the same bits, also those that came too late."""
    if has_backup(group):
        return _average_with_backup(tensor, group)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group, async_op=True)
    future: Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def average_hook(group: Any, bucket: GradBucket) -> Future[torch.Tensor]:
    """Communication hook: the average over those who contribute, where DDP itself divides by the group's first size.

    In an elastic job they are fewer when a worker is lost; with backup workers, when one is late. `group` is the
    model's process group.
    """
    return average(bucket.buffer(), group)


def _average_with_backup(tensor: torch.Tensor, group: Any) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    # c10d has no word for it, so the runtime is asked directly: its operations of the group count in the same order.
    group_id, timeout = groups.find(group)
    work: _core.Work = process.current().runtime.submit(
        "all_reduce", None, tensor, op="average", group=group_id, timeout=timeout, backup=True
    )

    def finish() -> None:
        try:
            work.check()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(tensor)

    work.on_done(finish)
    return future
