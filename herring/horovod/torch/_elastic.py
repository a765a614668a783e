"""Elastic training's names for torch: what is kept of models, optimizers and samplers."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from herring.horovod._engine import info
from herring.horovod._engine.elastic import ObjectState, run_fn
from herring.horovod._engine.engine import home
from herring.horovod.torch._calls import shutdown
from herring.horovod.torch._functions import broadcast_optimizer_state, broadcast_parameters, broadcast_with_tensors

ResultT = TypeVar("ResultT")


def run(func: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Decorates func(state, ...): the state is the same on all ranks when it begins. See _engine.elastic.run_fn."""
    return run_fn(func, _rejoin)


def _rejoin() -> None:
    if home.current().session.elastic is not None:
        home.restart(failed=False)
        return
    shutdown()
    info.init()


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a dataset's indices among the ranks; those that record_batch() has counted are not given out again in
    this epoch, also not after load_state_dict() in a job of another size.

    Call record_batch() after each batch, and set_epoch() at the end of each epoch.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.remaining_indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, in another order where `shuffle` is set."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch of every rank as done."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Where the epoch is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Goes on from there."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides what is left of the epoch among the ranks there are now."""
        self.num_replicas, self.rank = info.size(), info.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        # As many for each rank: some come twice where they do not come out even.
        padded = [left[i % len(left)] for i in range(self.total_size)] if left else []
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


def copied_into(old: Any, value: Any) -> Any:
    """A deep copy of `value`, which takes the tensors of `old` (an earlier copy of its like) where they fit."""
    if isinstance(value, torch.Tensor):
        fits = (
            isinstance(old, torch.Tensor)
            and (type(old), old.shape, old.dtype, old.device) == (type(value), value.shape, value.dtype, value.device)
            and old.layout == value.layout == torch.strided
            and old.requires_grad == value.requires_grad
        )
        if not fits:
            return copy.deepcopy(value)
        old.detach().copy_(value.detach())
        return old
    if type(value) in (dict, OrderedDict):
        known = old if isinstance(old, dict) else {}
        result = type(value)((key, copied_into(known.get(key), each)) for key, each in value.items())
        # state_dict() of a module has an attribute, its versions.
        if hasattr(value, "__dict__"):
            result.__dict__.update(copy.deepcopy(value.__dict__))
        return result
    if type(value) in (list, tuple):
        pairs = zip(value, old, strict=True) if type(old) is type(value) and len(old) == len(value) else None
        return type(value)(copied_into(was, each) for each, was in pairs or ((each, None) for each in value))
    return copy.deepcopy(value)


class StateHandler:
    """Keeps a copy of one object's state."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved: Any = None
        self.save()

    def save(self) -> None:
        """Keeps a copy: in the memory of the last one, where that fits, so that there is never a second one."""
        self._saved = copied_into(self._saved, self.value.state_dict())

    def restore(self) -> None:
        """Goes back to the copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Gives every rank what rank 0 has."""
        name = f"state.{type(self.value).__name__}"
        self.value.load_state_dict(broadcast_with_tensors(self.value.state_dict(), 0, name))
        self.save()

    def set_value(self, value: Any) -> None:
        """Another object in its place."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Of a model."""

    def restore(self) -> None:
        # Tensors are copied into the model's own; what else there is (extra state) the model may keep.
        others = {key: each for key, each in self._saved.items() if not isinstance(each, torch.Tensor)}
        saved = copy.copy(self._saved)
        saved.__dict__.update(self._saved.__dict__)
        saved.update(copy.deepcopy(others))
        self.value.load_state_dict(saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """Of an optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """Of an ElasticSampler."""


_Registry = list[tuple[type, type[StateHandler]]]


class _Handlers:
    def __init__(self) -> None:
        self.registry: _Registry = [
            (torch.nn.Module, ModelStateHandler),
            (torch.optim.Optimizer, OptimizerStateHandler),
            (ElasticSampler, SamplerStateHandler),
        ]

    def of(self, value: Any) -> StateHandler | None:
        """A handler, where there is one for this type."""
        for kind, handler in self.registry:
            if isinstance(value, kind):
                return handler(value)
        return None


_handlers = _Handlers()


def get_handler_registry() -> _Registry:
    """(type, handler) pairs; the first that fits is taken."""
    return _handlers.registry


def set_handler_registry(registry: _Registry) -> None:
    """Others instead."""
    _handlers.registry = registry


def _broadcast_attributes(attributes: Any) -> Any:
    return broadcast_with_tensors(attributes, 0, "state.attributes")


class TorchState(ObjectState):
    """Models, optimizers, samplers and other objects of a training process, each an attribute by its name.

    sync() gives every rank what rank 0 has; commit() keeps a copy of all, restore() goes back to it.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        everything = {"model": model, "optimizer": optimizer, **kwargs}
        found = {name: _handlers.of(value) for name, value in everything.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name, handler in self._handlers.items():
            super().__setattr__(name, handler.value)
        others = {name: value for name, value in everything.items() if name not in self._handlers}
        super().__init__(bcast_object=_broadcast_attributes, get_rank=info.rank, **others)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        super().__setattr__(name, value)
