"""Parameters, optimizer state and objects of one rank for all.

Objects are pickled (with cloudpickle where it is installed): what a rank of the job sends, the others execute, as they
execute its training script.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from herring._errors import InvalidArgumentError
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
    is_root = home.current().rank == root_rank
    data = _to_bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    name = "object" if name is None else name
    operations.broadcast(size, size, root_rank, f"{name}.size", process_set, waits=True).wait()
    if not is_root:
        data = torch.empty(int(size), dtype=torch.uint8)
    operations.broadcast(data, data, root_rank, f"{name}.data", process_set, waits=True).wait()
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The ranks' objects, in order of rank."""
    data = _to_bytes(obj)
    name = "object" if name is None else name
    both = operations.all_gather([data, torch.tensor([data.numel()])], name, process_set, waits=True)
    joined, sizes = both.wait()
    return [pickle.loads(part.numpy().tobytes()) for part in joined.split(sizes.tolist())]


def _to_bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(_pickler().dumps(obj)), dtype=torch.uint8)


def _pickler() -> ModuleType:
    try:
        import cloudpickle
    except ImportError:
        return pickle
    module: ModuleType = cloudpickle
    return module
