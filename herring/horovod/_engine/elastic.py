"""Elastic training: states that can be saved, restored and sent around, and the loop around training.

In an elastic job (herringrun --elastic) a lost process costs no collective that the others can do; at the next commit()
all ranks begin again with the size that there is then. In other jobs a lost process ends the job.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from herring._errors import UnavailableError
from herring.horovod._engine.engine import home
from herring.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

ResultT = TypeVar("ResultT")


class State:
    """What a training process has to keep, in steps: commit() saves it, restore() goes back to what was saved."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Functions to call when the job's size has changed, in this order."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls reset() and the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """save(), then check_host_updates()."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on all ranks, where processes have gone or wait to come in. Collective."""
        if home.current().has_changed():
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keeps a copy of everything."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives every rank what rank 0 has. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """What has to be made anew when the job's size has changed."""


class ObjectState(State):
    """Python objects, each an attribute by the name it is given under."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = copy.deepcopy(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        if self._saved_state:
            current = {name: getattr(self, name) for name in self._saved_state}
            self._saved_state = self._bcast_object(current)
            self.restore()


def run_fn(func: Callable[..., ResultT], reset: Callable[[], None]) -> Callable[..., ResultT]:
    """The loop of elastic training: func(state, ...) with the state the same on all ranks.

    Where processes have come or gone, `reset` begins again with those that are there, and the state is sent around from
    rank 0. Where a collective fails, the state goes back to its last commit before that; in a job that is not elastic
    UnavailableError says that it cannot go on.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> ResultT:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                state.restore()
                if home.current().session.elastic is None:
                    raise UnavailableError(
                        f"a collective failed ({error}); the state is back at its last commit, but only an elastic job "
                        "(herringrun --elastic) goes on with fewer processes: save a checkpoint and start it again"
                    ) from error
                skip_sync = False
                home.restart(failed=True)
                state.on_reset()
                continue
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper
