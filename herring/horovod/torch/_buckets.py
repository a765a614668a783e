"""The gradients of an optimizer in a few buckets, each of which is one operation.

In an optimizer's first step each gradient goes by its name, so that what does not match between ranks is reported by
name. Then the ranks agree once, in one small reduction, on which gradients go in buckets and in what order. From then
on a rank fills the same buckets as the others, whatever its own gradients are like: on a GPU, not contiguous, or not
computed (zeros).
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from herring.horovod.torch import _operations as operations
from herring.horovod.torch._device import is_served, moment

# Of each gradient within its bucket: a cache line, and enough for any vector instruction.
_ALIGNMENT_BYTES = 64
# Each time, the whole bucket gets other memory: from then on the gradient alone stays in its own.
_KEPT_OFTEN = 3
_HASHES = 3
_HASH_LIMIT = 1 << 22  # A square of one, times 2^15 ranks, fits an int64.
_HEAD = 2 + 2 * _HASHES  # numbers of an agreement before those of each gradient


@dataclass(frozen=True)
class Kind:
    """What ranks must have in common of a gradient."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # of the gradient in its bucket
    dtype: torch.dtype  # on its way

    @property
    def count(self) -> int:
        """Elements, those that fill up the alignment too; never none."""
        step = _ALIGNMENT_BYTES // self.dtype.itemsize
        return -(-max(1, math.prod(self.shape)) // step) * step


def kind_of(parameter: torch.Tensor, name: str, dtype: torch.dtype) -> Kind:
    """Its gradient lies in memory as the parameter does, where that has no gaps."""
    stride = torch.empty_like(parameter, device="meta").stride()
    return Kind(name, tuple(parameter.shape), stride, dtype)


def agree(
    kinds: Sequence[Kind],
    fitting: Sequence[bool],
    came: Sequence[int],
    bucket_bytes: int,
    ranks: int,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> list[list[int]] | None:
    """The buckets, the same on all ranks: indices into `kinds`. None: some ranks have joined, or their step has failed.

    Args:
        fitting: Whether this rank can have each gradient in a bucket; the others go by their names on all ranks.
        came: When each gradient came on this rank. Buckets are filled in the order in which they come on average.
        bucket_bytes: How large one is at most, if it holds more than one gradient; 0 from all ranks but one.
        ranks: How many there are.
        add_up: Sums int64 numbers over the ranks.
    """
    digest = hashlib.sha256(repr(list(kinds)).encode()).digest()
    hashes = [int.from_bytes(digest[4 * i : 4 * i + 4], "little") % _HASH_LIMIT for i in range(_HASHES)]
    told = add_up(
        torch.tensor([1, *hashes, *(each**2 for each in hashes), bucket_bytes, *map(int, fitting), *came])
    ).tolist()
    if told[0] < ranks:
        return None
    sums, squares, counts = told[1 : 1 + _HASHES], told[1 + _HASHES : 1 + 2 * _HASHES], told[_HEAD : _HEAD + len(kinds)]
    # The mean of squares is the square of the mean only where all are equal; and each rank sees the same numbers.
    if any(ranks * square != total * total for total, square in zip(sums, squares, strict=True)):
        return []
    places = told[_HEAD + len(kinds) :]
    order = sorted((index for index, count in enumerate(counts) if count == ranks), key=lambda i: (places[i], i))
    return _split(order, kinds, told[_HEAD - 1])


def refuse(count: int) -> torch.Tensor:
    """What a rank that cannot say agrees with, for so many gradients."""
    return torch.zeros(_HEAD + 2 * count, dtype=torch.int64)


def _split(order: Sequence[int], kinds: Sequence[Kind], bucket_bytes: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    open_of: dict[torch.dtype, tuple[list[int], int]] = {}
    for index in order:
        kind = kinds[index]
        size = kind.count * kind.dtype.itemsize
        bucket, filled = open_of.get(kind.dtype, ([], bucket_bytes))
        if filled + size > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_of[kind.dtype] = bucket, filled + size
    return buckets


class Place:
    """Of one parameter's gradient in its bucket."""

    __slots__ = ("bucket", "is_apart", "kept", "kind", "parameter", "stays", "view")

    def __init__(self, bucket: Bucket, parameter: torch.Tensor, kind: Kind) -> None:
        self.bucket = bucket
        self.parameter = parameter
        self.kind = kind
        self.view: torch.Tensor = parameter  # until there is memory
        # .grad is not this memory: it is copied in and out. On a GPU, where nobody can tell who holds it (below), too.
        self.stays = kind.dtype != parameter.dtype or not parameter.is_cpu
        self.is_apart = False  # in this step
        self.kept = 0  # in how many steps somebody had kept the gradient of the step before


class Bucket:
    """Gradients that are one operation once all of them are in."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], kinds: Sequence[Kind], reduce: Callable[[torch.Tensor, str], Any]
    ) -> None:
        """`reduce` starts the reduction of a tensor in place, by a name."""
        self.places = [Place(self, *each) for each in zip(parameters, kinds, strict=True)]
        self._reduce = reduce
        others = len(kinds) - 1
        self._name = kinds[0].name + (f" and {others} more" if others else "")
        self._dtype = kinds[0].dtype
        self._device = parameters[0].device
        self._memory: torch.Tensor | None = None
        self._storage_holders = self._view_holders = 0  # where nobody else has any
        self._missing = len(self.places)
        self._made: list[Any] = []  # on a GPU: when each copy was made, on its stream
        self._operation: Any = None

    def put(self, place: Place) -> None:
        """Takes the gradient as it is now; starts the reduction with the last one. Call without gradient tracking."""
        if self._missing == len(self.places) and (self._memory is None or self._is_kept()):
            self._make_room()
        self._missing -= 1
        parameter, view = place.parameter, place.view
        gradient = parameter.grad
        place.is_apart = place.stays
        if gradient is None:
            if place.stays:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad = view.zero_()
        elif gradient is not view and not place.is_apart and _is_plain(gradient):
            parameter.grad = view.copy_(gradient)
        elif gradient is not view:
            place.is_apart = True
        if not view.is_cpu:
            self._made.append(moment(view.device))
        if self._missing == 0:
            self._copy_in()
            assert self._memory is not None
            self._operation = self._reduce(self._memory, self._name)

    def _copy_in(self) -> None:
        """What is apart, in one call: for a GPU, in one kernel."""
        for made in self._made:
            made.block_current_stream()
        self._made.clear()
        apart = [each for each in self.places if each.is_apart]
        if apart:
            torch._foreach_copy_([each.view for each in apart], [_dense(each.parameter) for each in apart])

    def finish(self, keep: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Waits for the reduction. `keep` copies a result to the gradient of a parameter, where that is none of an
        ordinary kind."""
        operation, self._operation, self._missing = self._operation, None, len(self.places)
        if operation is None:
            return
        operation.wait()
        gradients, results = [], []
        for place in self.places:
            if not place.is_apart:
                continue
            gradient = place.parameter.grad
            if gradient is not None and _is_plain(gradient):
                gradients.append(gradient)
                results.append(place.view)
            else:
                keep(place.parameter, place.view)
        if gradients:
            torch._foreach_copy_(gradients, results)

    def drop(self) -> None:
        """What is in it counts for nothing. What is on its way arrives first."""
        operation, self._operation, self._missing = self._operation, None, len(self.places)
        self._made.clear()
        if operation is not None:
            operation.wait()

    def _is_kept(self) -> bool:
        """Whether somebody else has a gradient of the step before, or a part of it: it must not change."""
        # Where .grad is still the memory, torch itself adds to it in place.
        moved = [each for each in self.places if not each.stays and each.parameter.grad is not each.view]
        kept = [each for each in moved if sys.getrefcount(each.view) != self._view_holders]
        if not kept and moved and _holders(moved[0].view) != self._storage_holders:
            kept = moved  # A part of one of them: nobody knows of which.
        for each in kept:
            each.kept += 1
            each.stays = each.kept >= _KEPT_OFTEN
        return bool(kept)

    def _make_room(self) -> None:
        size = sum(each.kind.count for each in self.places)
        memory = self._memory = operations.memory_for(size, self._dtype, self._device).zero_()
        if memory.is_cpu:
            # A storage of their own: operations have that of the memory for a while after they have ended.
            memory = torch.frombuffer(memory.view(torch.uint8).numpy(), dtype=self._dtype)
        storage, offset = memory.untyped_storage(), memory.storage_offset()
        del memory
        for each in self.places:
            # No view of another tensor, which some calls of torch refuse.
            empty = torch.empty(0, dtype=self._dtype, device=self._device)
            each.view = empty.set_(storage, offset, each.kind.shape, each.kind.stride)
            offset += each.kind.count
        del empty, storage
        self._view_holders = sys.getrefcount(self.places[0].view)
        self._storage_holders = _holders(self.places[0].view)


def _is_plain(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and not gradient.requires_grad and gradient.layout is torch.strided


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _holders(tensor: torch.Tensor) -> int:
    """Of its storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def fits(parameter: torch.Tensor, gradient: torch.Tensor | None, device: torch.device) -> bool:
    """Whether the gradient of a step by name can be in a bucket, of parameters on that device. None: not computed."""
    if parameter.device != device or not operations.is_dtype_served(parameter.dtype):
        return False
    if not parameter.is_cpu and not is_served(parameter):
        return False
    return gradient is None or (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.device == device
        and gradient.dtype == parameter.dtype
    )
