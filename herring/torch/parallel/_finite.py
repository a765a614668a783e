"""Which parameter's gradient is not finite: what HERRING_CHECK_FINITE says of a bucket's element, said of the module.

Servers and shared memory know a bucket as numbers. Its parameters lie in it one after the other, in the same order on
all ranks, so an element of it names one of them.
"""

# No `from __future__ import annotations`: torch compares a hook's annotations with its types, not with their names.

import re
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

__all__ = ["ParameterNames", "named_hook"]

_WHO = re.compile(r"(rank \d+) \(first seen at element (\d+)\)")
_PART = re.compile(r"begins at element (\d+)")


class ParameterNames:
    """State of `named_hook`: one for each DDP model. `is_view`: its gradients are views of the buckets."""

    def __init__(self, module: torch.nn.Module, group: Any, is_view: bool) -> None:
        self.group = group
        self.is_view = is_view
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def name_of(self, bucket: GradBucket, element: int) -> str:
        """`last.weight[2, 7]`: the parameter that the bucket's element belongs to, and the place in it."""
        for parameter in bucket.parameters():
            if element < parameter.numel():
                place = [int(index) for index in torch.unravel_index(torch.tensor(element), parameter.shape)]
                name = self._names.get(id(parameter), "a parameter that the module does not name")
                return f"{name}{place}" if place else name
            element -= parameter.numel()
        return "no parameter"

    def explain(self, bucket: GradBucket, text: str) -> str:
        """What the error means in the module's terms; empty for other errors."""
        begin = int(part[1]) if (part := _PART.search(text)) else 0
        found = [f"{self.name_of(bucket, begin + int(element))} on {who}" for who, element in _WHO.findall(text)]
        return "; the gradient of " + ", ".join(found) if "not finite" in text and found else ""


def named_hook(state: ParameterNames, bucket: GradBucket) -> Future[torch.Tensor]:
    """Communication hook: averages as DDP does without one, and names the parameter in an error."""
    gradient = bucket.buffer()
    size = dist.get_world_size(state.group)
    if state.is_view:
        gradient.div_(size)
    else:
        gradient.mul_(1.0 / size)
    work = dist.all_reduce(gradient, group=state.group, async_op=True)

    def name(done: Future[list[torch.Tensor]]) -> torch.Tensor:
        try:
            return done.value()[0]
        except RuntimeError as error:
            explained = state.explain(bucket, str(error))
            if not explained:
                raise
            raise type(error)(f"{error}{explained}") from None

    future: Future[torch.Tensor] = work.get_future().then(name)
    return future
