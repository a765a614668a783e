"""torch's DistributedDataParallel, with its gradient buckets in Herring's memory."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as _TorchDDP

from herring._context import process
from herring.torch._launch import prepare_environment
from herring.torch._register import NAME
from herring.torch._start import ensure_initialized
from herring.torch.parallel._average import average_hook, has_backup
from herring.torch.parallel._buckets import buckets_of
from herring.torch.parallel._finite import ParameterNames, named_hook
from herring.torch.parallel.compression import WireDtype, wire_dtype_hook
from herring.torch.parallel.hooks import calls_in_callbacks, in_order

__all__ = ["DistributedDataParallel"]

_NCCL_ONLY_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")
_SIGNATURE = inspect.signature(_TorchDDP.__init__)
# Of a bucket on the CPU, in MB. torch's 25 leave the link idle when a backward pass begins, and most of a bucket to
# wait for when it ends (docs/tuning.md).
_BUCKET_CAP_MB = 5


class DistributedDataParallel(_TorchDDP):
    """Drop-in for torch.nn.parallel.DistributedDataParallel: same arguments, same methods, and it is one.

    Where no process group exists yet it creates the default one on backend herring from the launcher's variables. The
    buckets that gradients are reduced in lie in memory that Herring's processes share and that the network reads from,
    so with gradient_as_bucket_view=True nothing is copied between autograd and the wire.

    SageMaker's order of arguments is understood as well: device_ids, output_device, broadcast_buffers, process_group,
    bucket_cap_mb.

    `wire_dtype` (torch.bfloat16 or torch.float16; Herring's own argument) sends float32 gradients in 16 bits; servers
    add them in float32 and round once. It is a communication hook: no other one can be registered beside it.

    In an elastic job (herringrun --elastic) gradients are averaged over the workers that are left; that, too, is a
    communication hook.

    With backup workers (HERRING_BACKUP_WORKERS) a bucket's average does not wait for the last ranks: it is over those
    who came in time, the same on all; a communication hook as well. Buffers are broadcast from rank 0 as ever: with
    broadcast_buffers=False nobody waits for a late rank 0.

    With HERRING_CHECK_FINITE=on the error says which parameter's gradient is not finite, on which rank; so does a
    communication hook, which takes the place that no other one has by the first forward().

    Without bucket_cap_mb, buckets of a module on the CPU are of 5 MB; with parameters elsewhere they are torch's.

    An argument that this torch does not know is refused by name, unless its value means "as before" (None, False).
    """

    def __init__(
        self, module: torch.nn.Module, *args: Any, wire_dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        args, kwargs = _in_torchs_order(args, kwargs)
        ensure_initialized()
        prepare_environment()
        for name in [name for name in kwargs if name not in _SIGNATURE.parameters]:
            if kwargs[name] is not None and kwargs[name] is not False:
                raise TypeError(f"torch {torch.__version__}'s DistributedDataParallel has no argument {name!r}")
            del kwargs[name]
        args = _with_bucket_size(module, args, kwargs)
        super().__init__(module, *args, **kwargs)
        self._wire_dtype = wire_dtype
        self._register_wire_dtype()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle holds no hooks: this one is registered again."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        own = (wire_dtype_hook, average_hook, named_hook)
        self._comm_hooks = [each for each in self._comm_hooks if each[0] not in own]
        self._register_wire_dtype()

    def _register_wire_dtype(self) -> None:
        session = process.session()
        if self._wire_dtype is not None:
            self.register_comm_hook(WireDtype(self._wire_dtype, self.process_group), wire_dtype_hook)
            return
        is_elastic = session is not None and session.elastic is not None
        if (is_elastic and dist.get_backend(self.process_group) == NAME) or has_backup(self.process_group):
            self.register_comm_hook(self.process_group, average_hook)

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        """torch's, which makes the reducer."""
        with buckets_of(self.process_group):
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """torch's, which lets the reducer make its buckets anew, once, in the order in which gradients came."""
        is_settled = self._has_rebuilt_buckets or (self.find_unused_parameters and not self.static_graph)
        with contextlib.nullcontext() if is_settled else buckets_of(self.process_group):
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._comm_hooks:
            self._register_names()
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _register_names(self) -> None:
        """Not earlier: a hook of the user's own takes its place."""
        session = process.session()
        checks = session is not None and session.config.check_finite == "on"
        if checks and dist.get_backend(self.process_group) == NAME:
            state = ParameterNames(self.module, self.process_group, self.gradient_as_bucket_view)
            self.register_comm_hook(state, named_hook)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's. Hooks that compress to bfloat16, which torch refuses without NCCL, work: Herring sums it. Hooks
        of torch that call collectives in callbacks (PowerSGD, quantization) take one bucket after the other."""
        if dist.get_backend(self.process_group) == NAME:
            if calls_in_callbacks(hook):
                hook = in_order(hook)
            elif getattr(hook, "__name__", "") in _NCCL_ONLY_HOOKS:
                hook = _under_another_name(hook)
        super().register_comm_hook(state, hook)


def _with_bucket_size(module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments by position. Adds ours to them, or to `kwargs`, where the caller gives none."""
    names = list(_SIGNATURE.parameters)[2:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    is_given = given.get("bucket_cap_mb") is not None or given.get("bucket_cap_mb_list") is not None
    if is_given or len(args) > len(names) or not isinstance(module, torch.nn.Module):
        return args  # torch says what is wrong.
    if not all(each.is_cpu for each in module.parameters()):
        return args
    place = names.index("bucket_cap_mb")
    if len(args) > place:
        return (*args[:place], _BUCKET_CAP_MB, *args[place + 1 :])
    kwargs["bucket_cap_mb"] = _BUCKET_CAP_MB
    return args


def _in_torchs_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The third argument after the module is torch's `dim`, a number, or SageMaker's `broadcast_buffers`, a bool."""
    if len(args) < 3 or not isinstance(args[2], bool):
        return args, kwargs
    named = ("broadcast_buffers", "process_group", "bucket_cap_mb")
    if len(args) > 2 + len(named):
        raise TypeError(
            f"DistributedDataParallel takes at most {3 + len(named)} positional arguments in SageMaker's order "
            f"({', '.join(['module', 'device_ids', 'output_device', *named])}), got {1 + len(args)}"
        )
    given = dict(zip(named, args[2:], strict=False))
    twice = sorted(given.keys() & kwargs.keys())
    if twice:
        raise TypeError(f"DistributedDataParallel got {', '.join(twice)} by position and by name")
    return args[:2], {**given, **kwargs}


def _under_another_name(hook: Callable[..., Any]) -> Callable[..., Any]:
    """torch recognises the hooks that it refuses by their names."""

    @functools.wraps(hook)
    def herring_hook(state: object, bucket: Any) -> Any:
        return hook(state, bucket)

    herring_hook.__name__ = f"herring_{hook.__name__}"
    return herring_hook


DistributedDataParallel.__init__.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
    parameters=[
        *_SIGNATURE.parameters.values(),
        inspect.Parameter("wire_dtype", inspect.Parameter.KEYWORD_ONLY, default=None),
    ]
)
