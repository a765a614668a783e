"""The gradients of an optimizer in a few buckets, each of which is one operation.

In an optimizer's first step each gradient goes by its name, so that what does not match between ranks is reported by
name. Then the ranks agree once, in one small reduction, on which gradients go in buckets and in what order. From then
on a rank fills the same buckets as the others, whatever its own gradients are like: on a GPU, not contiguous, or not
computed (zeros).
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from herring._operation import Operation
from herring.horovod._engine.engine import Engine, home
from herring.horovod._engine.process_sets import ProcessSet, members_of
from herring.horovod.common.exceptions import HorovodInternalError
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
    stride = torch.empty_like(parameter, device="meta").stride() if _is_ordinary(parameter) else parameter.stride()
    return Kind(name, tuple(parameter.shape), stride, dtype)


def say(kinds: Sequence[Kind], fitting: Sequence[bool], came: Sequence[int], bucket_bytes: int) -> list[int]:
    """What a rank adds to the sum from which answer_of() makes the buckets.

    Args:
        fitting: Whether this rank can have each gradient in a bucket; the others go by their names on all ranks.
        came: When each gradient came on this rank. Buckets are filled in the order in which they come on average.
        bucket_bytes: How large one is at most, if it holds more than one gradient; 0 from all ranks but one.
    """
    digest = hashlib.sha256(repr(list(kinds)).encode()).digest()
    hashes = [int.from_bytes(digest[4 * i : 4 * i + 4], "little") % _HASH_LIMIT for i in range(_HASHES)]
    return [1, *hashes, *(each**2 for each in hashes), bucket_bytes, *map(int, fitting), *came]


@dataclass(frozen=True)
class Answer:
    """What ranks have agreed on, the same on all of them."""

    buckets: list[list[int]]  # indices into the list of gradients; those in none go by name
    is_one_list: bool  # Else the ranks' lists differ (an order, a shape, a layout), and there are no buckets.


_BY_NAME = Answer([], is_one_list=False)


def answer_of(told: Sequence[int], kinds: Sequence[Kind], ranks: int) -> Answer | None:
    """None: some ranks have joined, and added nothing.

    Args:
        told: The sum of what all ranks say.
        ranks: How many there are.
    """
    if told[0] < ranks:
        return None
    sums, squares, counts = told[1 : 1 + _HASHES], told[1 + _HASHES : 1 + 2 * _HASHES], told[_HEAD : _HEAD + len(kinds)]
    # The mean of squares is the square of the mean only where all are equal; and each rank sees the same numbers.
    if any(ranks * square != total * total for total, square in zip(sums, squares, strict=True)):
        return _BY_NAME
    places = told[_HEAD + len(kinds) :]
    order = sorted((index for index, count in enumerate(counts) if count == ranks), key=lambda i: (places[i], i))
    return Answer(_split(order, kinds, told[_HEAD - 1]), is_one_list=True)


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


Kinds = tuple[Kind, ...]


class Agreements:
    """On the buckets of gradients with these names, in one job. They count for every optimizer with the same list: one
    rank may make its optimizer anew."""

    def __init__(self, names: Sequence[str], process_set: ProcessSet) -> None:
        """`names`: in one order on all ranks."""
        self._lock = threading.Lock()
        digest = hashlib.sha256(repr(list(names)).encode()).hexdigest()
        self._name = f"buckets of {names[0]} and {len(names) - 1} more ({digest[:8]})"
        self._process_set = process_set
        self._ranks = len(members_of(process_set).ranks)
        self._asked: list[tuple[int, Kinds]] = []  # with how often all ranks had joined
        self._operations: dict[Kinds, Operation] = {}
        self._answers: dict[Kinds, Answer] = {}
        # By name from then on: lists differed, or ranks did not come; or there is nobody to agree with.
        self._is_over = self._ranks == 1

    def ask(self, kinds: Kinds, numbers: Callable[[], list[int]]) -> None:
        """All ranks do so, after a step by name; never blocks. `numbers`: of say().

        Not twice: what makes it ask is the same on all ranks, also where one has made its optimizer anew.
        """
        epoch = home.current().joins.epoch
        with self._lock:
            if self._is_over or (epoch, kinds) in self._asked:
                return
            self._asked.append((epoch, kinds))
            name = f"{self._name} {epoch}.{sum(each == epoch for each, _ in self._asked)}"
            said = torch.tensor(numbers(), device="cpu")
            self._operations[kinds] = operations.add_up(said, name, self._process_set)

    def answer(self, kinds: Kinds) -> Answer | None:
        """Waits for what all ranks have said. None: to be asked, or to be asked again when all have joined."""
        with self._lock:
            for asked, operation in self._operations.items():
                try:
                    found = answer_of(operation.wait()[0].tolist(), asked, self._ranks)
                except HorovodInternalError:  # On all ranks.
                    found = _BY_NAME
                if found is not None:
                    self._answers[asked] = found
                    self._is_over = self._is_over or not found.is_one_list
            self._operations.clear()
            return self._answers.get(kinds, _BY_NAME if self._is_over else None)


_agreements: WeakKeyDictionary[Engine, dict[tuple[int | None, tuple[str, ...]], Agreements]] = WeakKeyDictionary()
_agreements_lock = threading.Lock()


def agreements_on(names: Sequence[str], process_set: ProcessSet) -> Agreements:
    """Those of the job that there is now."""
    # The order of parameters may be another one on each rank.
    key = (process_set.process_set_id, tuple(sorted(names)))
    with _agreements_lock:
        known = _agreements.setdefault(home.current(), {})
        if key not in known:
            known[key] = Agreements(key[1], process_set)
        return known[key]


class Place:
    """Of one parameter's gradient in its bucket."""

    __slots__ = ("alone", "bucket", "kept", "kind", "parameter", "slot", "stays", "view", "waiting")

    def __init__(self, bucket: Bucket, parameter: torch.Tensor, kind: Kind) -> None:
        self.bucket = bucket
        self.parameter = parameter
        self.kind = kind
        # In the bucket's memory: what nobody else has, and what .grad is.
        self.slot = self.view = parameter
        self.alone = (0, 0, 0)  # holders of the view, where nobody else has it
        # .grad is never the view: it is copied in and out. On a GPU nobody can tell who keeps it.
        self.stays = kind.dtype != parameter.dtype or not parameter.is_cpu
        self.kept = 0  # in how many steps somebody had kept the gradient of the step before
        self.waiting: torch.Tensor | None = None  # a gradient to be copied in

    def make_room(self, memory: torch.Tensor, offset: int) -> None:
        """`memory` holds the slot from element `offset` on."""
        kind = self.kind
        self.slot = memory.as_strided(kind.shape, kind.stride, offset)
        if self.stays or self.slot.numel() == 0:
            self.view = torch.empty(0, dtype=kind.dtype, device="cpu")
            self.stays = True
            return
        # A storage of its own: so it is seen who holds it, and a copy of it is no copy of the bucket. No view of
        # another tensor, which some calls of torch refuse.
        bytes_of_it = memory[offset : offset + self.slot.numel()].view(torch.uint8).numpy()
        storage = torch.frombuffer(bytes_of_it, dtype=kind.dtype).untyped_storage()
        self.view = torch.empty(0, dtype=kind.dtype, device="cpu").set_(storage, 0, kind.shape, kind.stride)
        del storage
        self.alone = _holders(self.view)

    @property
    def is_intact(self) -> bool:
        """Whether the view is the bucket's memory; not after an assignment to its .data."""
        return self.view.data_ptr() == self.slot.data_ptr()

    def is_home(self, gradient: torch.Tensor) -> bool:
        """Whether .grad is the bucket's memory."""
        return gradient is self.view and self.is_intact

    def can_move(self) -> bool:
        """Whether the view may become .grad: nobody has the gradient but the parameter and the caller."""
        return not self.stays and _holders_of_gradient(self.parameter) == _fresh_holders() and self.is_intact

    def is_kept(self) -> bool:
        """Whether somebody else has the gradient of the step before: it must not change."""
        # Where .grad is still the view, torch itself adds to it in place.
        if self.stays or self.parameter.grad is self.view:
            return False
        return _holders(self.view) != self.alone or not self.is_intact


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
        self._memory: torch.Tensor | None = None
        self._missing = len(self.places)
        self._made: list[Any] = []  # on a GPU: when each gradient was made, on its stream
        self._operation: Any = None

    def put(self, place: Place) -> None:
        """Takes the gradient as it is now; starts the reduction with the last one. Call without gradient tracking."""
        if self._missing == len(self.places):
            self._make_room()
        self._missing -= 1
        parameter = place.parameter
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter) if place.stays else place.view.zero_()
        if not parameter.is_cpu:
            self._made.append(moment(parameter.device))
            place.waiting = gradient
        elif not place.is_home(gradient):
            if _is_ordinary_gradient(gradient) and gradient.dtype == place.kind.dtype and place.can_move():
                parameter.grad = place.view.copy_(gradient)
            else:
                place.slot.copy_(_dense(gradient))
        if self._missing == 0:
            self._copy_in()
            assert self._memory is not None
            self._operation = self._reduce(self._memory, self._name)

    def _copy_in(self) -> None:
        """What is on a GPU: in one kernel."""
        for made in self._made:
            made.block_current_stream()
        self._made.clear()
        waiting = [each for each in self.places if each.waiting is not None]
        if waiting:
            gradients = [_dense(each.waiting) for each in waiting if each.waiting is not None]
            torch._foreach_copy_([each.slot for each in waiting], gradients)
        for each in waiting:
            each.waiting = None

    def finish(self, keep: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Waits for the reduction, once. Every .grad is its part of the result afterwards, whoever has replaced it
        meanwhile; `keep` copies it to one of no ordinary kind.

        Raises HorovodInternalError where it failed, or never started: an error came before all gradients were in.
        """
        operation = self._operation
        if operation is None:
            if self._missing != len(self.places):
                raise HorovodInternalError(f"allreduce.{self._name}: an error came before all its gradients were there")
            return
        operation.wait()
        self._operation, self._missing = None, len(self.places)
        gradients, results = [], []
        for place in self.places:
            gradient = place.parameter.grad
            if gradient is None:
                place.parameter.grad = place.slot.to(place.parameter.dtype, copy=True)
            elif place.is_home(gradient):
                continue
            elif _is_ordinary_gradient(gradient):
                gradients.append(gradient)
                results.append(place.slot)
            else:
                keep(place.parameter, place.slot)
        if gradients:
            torch._foreach_copy_(gradients, results)

    def drop(self) -> None:
        """What is in it counts for nothing. What is on its way arrives first."""
        operation, self._operation, self._missing = self._operation, None, len(self.places)
        self._made.clear()
        for place in self.places:
            place.waiting = None
        if operation is not None:
            operation.wait()

    def _make_room(self) -> None:
        """Once; and again where somebody has kept a gradient of the step before."""
        kept = [] if self._memory is None else [each for each in self.places if each.is_kept()]
        if self._memory is not None and not kept:
            return
        for each in kept:
            each.kept += 1
            each.stays = each.kept >= _KEPT_OFTEN
        first = self.places[0]
        size = sum(each.kind.count for each in self.places)
        memory = self._memory = operations.memory_for(size, first.kind.dtype, first.parameter.device).zero_()
        offset = 0
        for each in self.places:
            each.make_room(memory, offset)
            offset += each.kind.count


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Of the tensor and of its storage. Comparable where the caller's own are the same."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(tensor), sys.getrefcount(storage), int(torch._C._storage_Use_Count(storage._cdata))


def _holders_of_gradient(parameter: torch.Tensor) -> tuple[int, int, int]:
    gradient = parameter.grad
    assert gradient is not None
    return _holders(gradient)


@functools.cache
def _fresh_holders() -> tuple[int, int, int]:
    """Those of a gradient that nobody has but its parameter, and the caller."""
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    gradient = parameter.grad
    found = _holders_of_gradient(parameter)
    del gradient
    return found


def _is_ordinary(parameter: torch.Tensor) -> bool:
    return type(parameter) in (torch.Tensor, torch.nn.Parameter) and parameter.layout is torch.strided


def _is_ordinary_gradient(gradient: torch.Tensor) -> bool:
    return type(gradient) is torch.Tensor and not gradient.requires_grad and gradient.layout is torch.strided


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def fits(parameter: torch.Tensor, gradient: torch.Tensor | None, device: torch.device) -> bool:
    """Whether the gradient of a step by name can be in a bucket, of parameters on that device. None: not computed."""
    if not _is_ordinary(parameter) or parameter.device != device or not operations.is_dtype_served(parameter.dtype):
        return False
    if not parameter.is_cpu and not is_served(parameter):
        return False
    return gradient is None or (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and gradient.device == device
        and gradient.dtype == parameter.dtype
    )
