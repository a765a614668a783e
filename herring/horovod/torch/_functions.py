"""Parameters, optimizer state and objects of one rank for all.

Objects are pickled (with cloudpickle where it is installed), under a seal that only the job's ranks can make: what is
unpickled comes from the training script of another rank, or a ProtocolError names the rank that it seemed to come from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from herring._composed import DTYPES
from herring._errors import InvalidArgumentError
from herring.horovod._engine import objects
from herring.horovod._engine.engine import home
from herring.horovod._engine.process_sets import ProcessSet, global_process_set
from herring.horovod.torch import _operations as operations
from herring.horovod.torch._device import is_served


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Writes rank `root_rank`'s parameters into those of the others.

    Args:
        params: model.state_dict(), model.named_parameters() or model.parameters(), or lists of such.
    """
    if isinstance(params, Mapping):
        pairs = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise InvalidArgumentError(f"invalid params of type: {type(params)}")
    started = [
        operations.broadcast(tensor, tensor, root_rank, name, process_set)
        for name, tensor in pairs
        if tensor is not None
    ]
    for each in started:
        each.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives the others rank `root_rank`'s optimizer state and options (learning rates). `model` says nothing here.

    As with Horovod, parameters that have no gradient have zeros afterwards, where the optimizer has not stepped yet.
    """
    if not optimizer.state_dict()["state"]:
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    state = broadcast_with_tensors(optimizer.state_dict(), root_rank, "optimizer_state", process_set)
    if home.current().rank != root_rank:
        optimizer.load_state_dict(state)


def broadcast_with_tensors(value: Any, root_rank: int, name: str, process_set: ProcessSet = global_process_set) -> Any:
    """Rank `root_rank`'s `value`, on every rank; there the very one. Dense tensors in its dicts, lists and tuples
    travel as tensors, into memory of their own: on this rank's current GPU where they were on one; what is left is
    pickled."""
    is_root = home.current().rank == root_rank
    tensors: list[torch.Tensor] = []
    skeleton = _without_tensors(value, tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank, name, process_set)
    if not is_root:
        value = _with_empty_tensors(skeleton, tensors)
    started = [
        operations.broadcast(each, each, root_rank, f"{name}.{number}", process_set)
        for number, each in enumerate(tensors)
    ]
    for each in started:
        each.wait()
    return value


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: str  # its kind


def _travels(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and (tensor.is_cpu or is_served(tensor)) and not tensor.is_quantized
    return is_dense and tensor.is_leaf and str(tensor.dtype).removeprefix("torch.") in DTYPES


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The same structure, its dense tensors in `tensors`."""
    if type(value) is torch.Tensor and _travels(value):
        tensors.append(value.detach())
        return _Place(tuple(value.shape), value.dtype, value.requires_grad, value.device.type)
    if type(value) in (dict, OrderedDict):
        return {key: _without_tensors(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(each, tensors) for each in value)
    return value


def _with_empty_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The other way round; the tensors made are in `tensors`, in the same order."""
    if isinstance(value, _Place):
        device = value.device if value.device != "cuda" or torch.cuda.is_available() else "cpu"
        tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
        tensors.append(tensor.detach())
        return tensor.requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {key: _with_empty_tensors(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_empty_tensors(each, tensors) for each in value)
    return value


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Rank `root_rank`'s object, on every rank; there the very one."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The ranks' objects, in order of rank."""
    return objects.allgather_object(obj, name, process_set)
