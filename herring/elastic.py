"""Jobs whose workers may change: what a training script calls.

>>> state = herring.elastic.State(model=model, optimizer=optimizer, batch=0)
>>> state.sync()                                # a worker that comes later begins where rank 0 is
>>> while state.batch < batches:
...     train_on(state.batch, herring.rank(), herring.size())
...     state.batch += 1
...     state.commit()                          # here new workers come in

When a worker dies the others finish the step that runs, with the average of those that are left, and go on; nothing has
to be called for that. Start with ``herringrun --elastic``, see docs/launching.md.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from herring import _core
from herring._collectives import broadcast_
from herring._context import process
from herring._errors import InvalidArgumentError
from herring._handle import to_seconds
from herring._sealed import LENGTH_BYTES, pack, seal_of, unpack

__all__ = ["State", "broadcast_object", "generation", "is_elastic", "step", "waiting"]

_PURPOSE = "herring.elastic.broadcast_object"


def is_elastic() -> bool:
    """Whether this job may lose and gain workers."""
    return process.current().elastic is not None


def _runtime() -> _core.ElasticRuntime:
    runtime = process.current().elastic
    if runtime is None:
        raise InvalidArgumentError(
            "this job is not elastic: start it with `herringrun --elastic`, or with herring.init(elastic=True) and a "
            "`herring rendezvous` (docs/launching.md)"
        )
    return runtime


def generation() -> int:
    """How often the job has been put together: another number after each change."""
    return _runtime().generation


def waiting() -> int:
    """How many workers wait to come in, as far as this rank knows."""
    return _runtime().waiting


def step(timeout: float | timedelta | None = None) -> bool:
    """Says that a step has ended; collective. Where workers wait to come in, takes them in and returns True.

    Call it last in the loop: a new worker begins at the loop's beginning, and the others go on there. size() and rank()
    have changed then, and the new ones wait for the state: every rank calls State.sync() (or broadcasts its parameters
    from rank 0) next. Where something is under way, nobody comes in yet. In a job that is not elastic: False.

    Raises HerringTimeoutError where not all ranks come within `timeout` seconds, else the setting join_timeout_s.
    """
    session = process.current()
    if session.elastic is None:
        return False
    seconds = to_seconds(timeout)
    return session.elastic.let_in(session.config.join_timeout_s if seconds is None else seconds)


def broadcast_object(value: Any, root: int = 0) -> Any:
    """What rank `root` gave, on all ranks. Collective.

    Numbers in numpy arrays and torch's CPU tensors travel as they are, the rest pickled under a seal that only this
    job's ranks can make (docs/security.md). Raises ProtocolError, and unpickles nothing, where that is wrong.
    """
    import numpy as np

    session = process.current()
    seal, is_root = seal_of(session), session.job.rank == root
    if is_root:
        body, arrays = pack(value)
        sealed = seal.close(body, _PURPOSE, root)
        length = np.frombuffer(bytearray(seal.close_length(len(sealed), _PURPOSE, root)), np.uint8)
        data = np.frombuffer(bytearray(sealed), np.uint8)
        broadcast_(length, root)
        broadcast_(data, root)
        _broadcast_all(arrays, root)
        return value
    length = np.empty(LENGTH_BYTES, np.uint8)
    broadcast_(length, root)
    data = np.empty(seal.open_length(length.data, _PURPOSE, root), np.uint8)
    broadcast_(data, root)
    arrays, finish = unpack(seal.open(data.data, _PURPOSE, root))
    _broadcast_all(arrays, root)
    return finish()


def _broadcast_all(arrays: list[Any], root: int) -> None:
    for handle in [broadcast_(array, root, async_op=True) for array in arrays if array.size]:
        handle.wait()


class State:
    """What a worker that comes in later has to be given: each value an attribute by its name.

    Values that have state_dict() and load_state_dict() (torch's modules, optimizers, schedulers) are kept and loaded in
    place; arrays and other objects are replaced.
    """

    def __init__(self, **values: Any) -> None:
        self._names = tuple(values)
        for name, value in values.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Gives every rank what rank 0 has. Collective."""
        if process.current().job.size == 1:
            return
        own = {name: getattr(self, name) for name in self._names}
        is_first = process.current().job.rank == 0
        sent = {name: value.state_dict() if _has_state(value) else value for name, value in own.items()}
        received = broadcast_object(sent if is_first else None)
        if is_first:
            return
        for name, value in received.items():
            if _has_state(own[name]):
                own[name].load_state_dict(value)
            else:
                setattr(self, name, value)

    def commit(self, timeout: float | timedelta | None = None) -> bool:
        """step(), and sync() where workers have come in; True then."""
        has_changed = step(timeout)
        if has_changed:
            self.sync()
        return has_changed


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
