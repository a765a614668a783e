"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from herring.horovod._engine import info
from herring.horovod._engine.process_sets import global_process_set
from herring.horovod._engine.reduce_ops import Sum
from herring.horovod.torch import _operations as operations


class SyncBatchNorm(_BatchNorm):
    """torch.nn.BatchNorm1d, 2d or 3d in one, with statistics over all ranks' batches (which may differ in size).

    In training every rank calls forward and backward the same number of times, in the same order.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 (torch's name)
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or info.size() == 1:
            return super().forward(input)
        mean, variance, count, output = _Normalize.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:  # The mean over all batches so far.
            factor = 1.0 / float(self.num_batches_tracked or 1)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalize(Function):
    """Gives (mean, variance, count, output); gradients go through the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> Any:
        dims = [0, *range(2, x.dim())]
        wide = x.double()
        count = x.numel() // x.shape[1]
        own_mean = wide.mean(dims) if count else wide.new_zeros(x.shape[1])
        spread = (wide - _per_channel(own_mean, x)).square().sum(dims)
        row = torch.cat([own_mean.new_tensor([count]), own_mean, spread])
        rows = operations.all_gather([row[None]], None, global_process_set, waits=True).wait()[0]
        counts, (means, spreads) = rows[:, :1], rows[:, 1:].chunk(2, dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        # Around the common mean: each rank's own spread, and that of its mean (Chan et al. 1979).
        variance = (spreads + counts * (means - mean).square()).sum(0) / total
        scale = (variance + eps).rsqrt()
        normal = (wide - _per_channel(mean, x)) * _per_channel(scale, x)
        output = normal if weight is None else normal * _per_channel(weight.double(), x)
        output = output if bias is None else output + _per_channel(bias.double(), x)
        ctx.save_for_backward(normal.to(x.dtype), weight, scale, total)
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, variance, total)
        return mean, variance, total, output.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, _mean: Any, _variance: Any, _total: Any, gradient: Any) -> Any:
        normal, weight, scale, total = ctx.saved_tensors
        dims = [0, *range(2, gradient.dim())]
        wide = gradient.double()
        of_bias, of_weight = wide.sum(dims), (wide * normal).sum(dims)
        sums = torch.cat([of_bias, of_weight])
        sums = operations.all_reduce([sums], None, None, Sum, 1.0, 1.0, global_process_set, waits=True).wait()[0]
        all_bias, all_weight = (sums / total).chunk(2)
        factor = scale if weight is None else scale * weight.double()
        inner = wide - _per_channel(all_bias, wide) - normal * _per_channel(all_weight, wide)
        of_input = (inner * _per_channel(factor, wide)).to(gradient.dtype)
        return (
            of_input,
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(weight.dtype if weight is not None else gradient.dtype) if ctx.has_bias else None,
            None,
        )


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
