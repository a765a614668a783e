"""Collectives that gradients go through, backwards by the collective that mirrors them, as Horovod defines it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from herring.horovod._engine.process_sets import ProcessSet
from herring.horovod._engine.reduce_ops import Average, Sum
from herring.horovod.torch import _operations as operations

Tensors = Sequence[torch.Tensor]


def all_reduce(
    tensors: Tensors, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Backwards: the same reduction of the gradients."""
    return list(_AllReduce.apply(name, op, prescale, postscale, process_set, *tensors))  # type: ignore[no-untyped-call]


def all_gather(tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[torch.Tensor]:
    """Backwards: this rank's rows of the gradients' average."""
    return list(_AllGather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """Backwards: the gradients' average on the root, zero elsewhere."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return, no-untyped-call]


def all_to_all(tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    """Backwards: the way back."""
    result, received = _AllToAll.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return result if splits is None else (result, received)


def reduce_scatter(
    tensors: Tensors, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Backwards: the gathered gradients; for a sum times the number of ranks, as Horovod has it."""
    results = _ReduceScatter.apply(name, op, prescale, postscale, process_set, *tensors)  # type: ignore[no-untyped-call]
    return list(results)


class _AllReduce(Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet, *tensors: Any
    ) -> Any:
        ctx.arguments = (op, prescale, postscale, process_set)
        started = operations.all_reduce(tensors, None, name, op, prescale, postscale, process_set, waits=True)
        return tuple(started.wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None,) * 5 + tuple(all_reduce(gradients, None, *ctx.arguments))


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Any) -> Any:
        ctx.process_set = process_set
        ctx.shapes = [each.shape for each in tensors]
        return tuple(operations.all_gather(tensors, name, process_set, waits=True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        averages = all_reduce(gradients, None, Average, 1.0, 1.0, ctx.process_set)
        mine = [torch.tensor([shape[0] if shape else 1]) for shape in ctx.shapes]
        counts = all_gather(mine, None, ctx.process_set)
        index = ctx.process_set.rank()
        rows = []
        for average, count, shape in zip(averages, counts, ctx.shapes, strict=True):
            start = int(count[:index].sum())
            rows.append(average.narrow(0, start, int(count[index])).reshape(shape))
        return (None, None, *rows)


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        output = tensor.new_empty(tensor.shape)
        return operations.broadcast(tensor, output, root_rank, name, process_set, waits=True).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        average = all_reduce([gradient], None, Average, 1.0, 1.0, ctx.process_set)[0]
        is_root = ctx.process_set.ranks[ctx.process_set.rank()] == ctx.root_rank
        return average if is_root else torch.zeros_like(average), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        result, received = operations.all_to_all(tensor, splits, name, process_set, waits=True).wait()
        ctx.received, ctx.process_set = received, process_set
        ctx.unsent = 0 if splits is None else len(tensor) - int(sum(torch.as_tensor(splits).tolist()))
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, gradient: Any, _received: Any) -> Any:
        back, _ = all_to_all(gradient, ctx.received, None, ctx.process_set)
        if ctx.unsent:  # Rows that went nowhere.
            back = torch.cat([back, back.new_zeros(ctx.unsent, *back.shape[1:])])
        return back, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet, *tensors: Any
    ) -> Any:
        ctx.process_set = process_set
        ctx.factor = prescale * postscale * ((process_set.size() or 1) if op == Sum else 1)
        started = operations.reduce_scatter(tensors, name, op, prescale, postscale, process_set, waits=True)
        return tuple(started.wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        scaled = [each if ctx.factor == 1.0 else each * ctx.factor for each in gradients]
        return (None,) * 5 + tuple(all_gather(scaled, None, ctx.process_set))
