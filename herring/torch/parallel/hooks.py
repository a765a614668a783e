"""Communication hooks that call collectives in the callbacks of others, as torch's PowerSGD does.

DDP calls a hook for one bucket after the other, in the same order on all ranks. But a callback runs when its collective
has ended, which may be before the next bucket on one rank and after it on another: what it calls then comes in another
order there, and ranks disagree. (NCCL's futures are complete as soon as the call returns: its callbacks run at once.)
"""

# No `from __future__ import annotations`: torch compares a hook's annotations with its types, not with their names.

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook, quantization_hooks
from torch.futures import Future

__all__ = ["in_order"]

_CALL_IN_CALLBACKS = (
    powerSGD_hook.powerSGD_hook,
    powerSGD_hook.batched_powerSGD_hook,
    quantization_hooks.quantization_pertensor_hook,
    quantization_hooks.quantization_perchannel_hook,
)


def calls_in_callbacks(hook: Callable[..., Any]) -> bool:
    """Whether it is one of torch's hooks that do, or one of torch's wrappers around one."""
    inside = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return any(each is known for each in (hook, *inside) for known in _CALL_IN_CALLBACKS)


def in_order(
    hook: Callable[[Any, GradBucket], Future[torch.Tensor]],
) -> Callable[[Any, GradBucket], Future[torch.Tensor]]:
    """A communication hook for DDP: `hook` for one bucket after the other, each when the one before has ended.

    For hooks that call collectives in callbacks (`future.then(...)`), which come in another order on each rank
    otherwise. Buckets are no longer reduced at the same time; the backward pass goes on meanwhile. Register the result
    with one model:

        model.register_comm_hook(state, in_order(my_hook))

    herring.torch.parallel.DistributedDataParallel does this by itself for torch's PowerSGD and quantization hooks.
    """
    last: Future[torch.Tensor] | None = None

    def herring_in_order(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        nonlocal last
        before = last
        if before is None or (bucket.index() == 0 and before.done()):
            last = hook(state, bucket)
            return last
        ready = _event(bucket.buffer().device)

        def go_on(done: Future[torch.Tensor]) -> torch.Tensor:
            if bucket.index() > 0:
                done.value()  # Its error ends the backward pass: the rest of that calls nothing any more.
            if ready is not None:
                ready.wait()  # The gradients are written on the stream of the backward pass; this is another one.
            return hook(state, bucket).wait()

        last = before.then(go_on)
        return last

    # torch looks at annotations and names: not at those of `hook`, which may be texts, or a name that it refuses.
    herring_in_order.__name__ = f"herring_{getattr(hook, '__name__', 'hook')}"
    return herring_in_order


def _event(device: torch.device) -> Any:
    """Of the current stream; None where there are no streams."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
