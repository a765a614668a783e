"""Small tensors on GPUs that are reduced by name: copied to host memory in batches, one copy for all of one, and
reduced there as CPU tensors are, each when it is ready on all ranks (docs/gpu.md)."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from herring import _core
from herring._errors import HerringError, InternalError, InvalidArgumentError
from herring._operation import Operation
from herring.horovod._engine.engine import Engine
from herring.horovod.common.exceptions import HorovodInternalError
from herring.horovod.torch._device import door


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is to become of a tensor. Numbers are those of csrc/core/types.h."""

    name: str
    dtype: int
    op: int
    shape: tuple[int, ...]
    prescale: float
    postscale: float


class Batch:
    """Tensors of calls that followed each other, of one process set and one GPU."""

    def __init__(self, fusion: _core.Fusion, key: tuple[Engine, int, torch.device]) -> None:
        self._engine, _, device = self._key = key
        self._fusion = fusion
        self._copies = door.batch(self._engine, device, "allreduce")
        self._reductions: list[Reduction] = []  # guarded by _lock of this module, as long as the batch is open
        self._ends: list[int | Operation | Exception] = []  # ticket, what goes by itself, or why there is neither
        self._has_begun = threading.Event()
        self._write_lock = threading.Lock()
        self._written: set[int] = set()  # guarded by _write_lock

    def add(self, source: torch.Tensor, target: torch.Tensor, reduction: Reduction) -> int | None:
        """Its place; None where it takes no more. Call with this module's lock."""
        index: int | None = self._copies.add(source, target)
        if index is not None:
            self._reductions.append(reduction)
        return index

    def watch(self) -> None:
        """Once, after the first add(); without locks."""
        self._copies.on_read(self._begin)

    def _begin(self) -> None:
        """They have been copied. On the thread that looks after copies, or in watch()."""
        with _lock:
            reductions = self._reductions
            if _open.get(self._key) is self:
                del _open[self._key]
        failure = self._copies.failure()
        try:
            if failure:
                self._ends += [HorovodInternalError(f"allreduce.{each.name}: {failure[0]}") for each in reductions]
            else:
                self._start_all(reductions)
        finally:
            self._has_begun.set()

    def _start_all(self, reductions: list[Reduction]) -> None:
        for what, host in zip(reductions, self._copies.hosts(), strict=True):
            try:
                self._ends.append(self._start(what, host))
            except Exception as error:  # Belongs to whoever waits.
                self._ends.append(_explained(what.name, error))

    def _start(self, what: Reduction, host: torch.Tensor) -> int | Operation:
        fusions, address = self._engine.fusions, host.data_ptr()
        ticket = self._fusion.submit(
            what.name, address, address, what.dtype, what.op, what.shape, what.prescale, what.postscale, host, host
        )
        if not ticket:
            assert fusions.start_alone is not None
            return fusions.start_alone(host, host, what.name, what.op, what.prescale, what.postscale, self._key[1])
        if self._engine.timeline is not None:
            fusions.watch(self._fusion, ticket, what.name)
        return ticket

    def poll(self, index: int) -> bool:
        """Whether it has ended, well or not, and the target is as it will be; where it had to go by itself, finish()
        copies that."""
        self._copies.close()
        if not self._has_begun.is_set():
            return False
        # Where there is none, finish() says why.
        end = self._ends[index] if index < len(self._ends) else None
        if isinstance(end, Operation):
            return end.is_done()
        if isinstance(end, int):
            if not self._engine.fusions.is_done(self._fusion, end):
                return False
            if not self._ended_well([index]):
                return True
            self._write_back(index)
            return bool(self._copies.is_written(index))
        return True

    def finish(self, index: int) -> None:
        """Waits for its end; the current stream goes on when the target is as it will be. Raises why it is not."""
        self._copies.close()
        if not self._has_begun.wait(self._engine.fusions.longest_s) or index >= len(self._ends):
            raise InternalError("a copy did not end at its deadline: this is a bug in Herring, please report it")
        end = self._ends[index]
        if isinstance(end, Exception):
            raise end
        if isinstance(end, Operation):
            end.wait()
        else:
            self._engine.fusions.finish(end)
        self._write_back(index)
        self._copies.block_current_stream(index)

    def _write_back(self, index: int) -> None:
        """Starts the copies back of all that have ended by now."""
        with self._write_lock:
            if index in self._written:
                return
            others = [each for each in range(len(self._ends)) if each != index and each not in self._written]
            ended = sorted([index, *self._ended_well(others)])
            self._copies.write_back(ended)
            self._written.update(ended)

    def _ended_well(self, indices: list[int]) -> list[int]:
        tickets = {each: end for each in indices if isinstance(end := self._ends[each], int)}
        well = self._fusion.ended_well(list(tickets.values()))
        return [index for index, is_well in zip(tickets, well, strict=True) if is_well]


class InBatch:
    """An operation on a small tensor of a GPU, as Operation is one on the host."""

    __slots__ = ("_batch", "_index", "_place", "_target")

    def __init__(self, batch: Batch, index: int, target: torch.Tensor, place: tuple[Engine, int, str]) -> None:
        self._batch, self._index, self._target, self._place = batch, index, target, place

    def poll(self) -> bool:
        """Whether it has ended, well or not, and the tensor is as it will be."""
        if not self._batch.poll(self._index):
            return False
        _names.discard(self._place)
        return True

    def wait(self) -> Any:
        """The result, for the current stream of this thread, as OnDevice.wait() has it."""
        try:
            self._batch.finish(self._index)
        finally:
            _names.discard(self._place)
        return self._target


_lock = threading.Lock()
# Where the next tensor may go, by process set and GPU. Guarded by _lock.
_open: dict[tuple[Engine, int, torch.device], Batch] = {}
# Those that somebody has not seen the end of: engine, process set and name. Guarded by _lock, but for discard().
_names: set[tuple[Engine, int, str]] = set()
_known: set[Engine] = set()  # those that tell when they go; guarded by _lock


def add(
    engine: Engine,
    fusion: _core.Fusion,
    set_id: int,
    source: torch.Tensor,
    target: torch.Tensor,
    reduction: Reduction,
) -> InBatch:
    """Starts it. Both tensors are as door.takes() wants them.

    Raises InvalidArgumentError where the name is in flight, RuntimeError while a graph is captured.
    """
    place = (engine, set_id, reduction.name)
    key = (engine, set_id, source.device)
    with _lock:
        if place in _names:
            raise InvalidArgumentError(
                f"an operation named allreduce.{reduction.name} is in flight already (duplicate name); synchronize it "
                "first, or choose another name"
            )
        batch = _open.get(key)
        index = None if batch is None else batch.add(source, target, reduction)
        if batch is None or index is None:
            if engine not in _known:
                _known.add(engine)
                engine.closing.append(lambda: _forget(engine))
            batch = Batch(fusion, key)
            index = batch.add(source, target, reduction)
            assert index is not None
            _open[key] = batch
        _names.add(place)
    if index == 0:
        batch.watch()
    return InBatch(batch, index, target, place)


def _forget(engine: Engine) -> None:
    with _lock:
        for key in [key for key in _open if key[0] is engine]:
            del _open[key]
        _known.discard(engine)
        _names.difference_update([place for place in _names if place[0] is engine])


def _explained(name: str, error: Exception) -> Exception:
    if isinstance(error, InvalidArgumentError) or not isinstance(error, HerringError):
        return error
    failure = HorovodInternalError(f"allreduce.{name}: {error}")
    failure.__cause__ = error
    return failure
