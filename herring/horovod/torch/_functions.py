"""Parameters, optimizer state and objects of one rank for all.

Objects are pickled (with cloudpickle where it is installed), under a seal that only the job's ranks can make: what is
unpickled comes from the training script of another rank, or a ProtocolError names the rank that it seemed to come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from herring._errors import InvalidArgumentError
from herring.horovod._engine import objects
from herring.horovod._engine.engine import home
from herring.horovod._engine.process_sets import ProcessSet, global_process_set
from herring.horovod.torch import _operations as operations


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
    is_root = home.current().rank == root_rank
    tensors: list[torch.Tensor] = []
    skeleton = _without_tensors(optimizer.state_dict(), tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank, "optimizer_state", process_set)
    state = optimizer.state_dict() if is_root else _with_empty_tensors(skeleton, tensors)
    started = [
        operations.broadcast(each, each, root_rank, f"optimizer_state.{number}", process_set)
        for number, each in enumerate(tensors)
    ]
    for each in started:
        each.wait()
    if not is_root:
        optimizer.load_state_dict(state)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The same structure, its dense CPU tensors in `tensors`."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu":
        tensors.append(value)
        return _Place(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _without_tensors(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(each, tensors) for each in value)
    return value


def _with_empty_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The other way round; the tensors made are in `tensors`, in the same order."""
    if isinstance(value, _Place):
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]
    if isinstance(value, dict):
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
