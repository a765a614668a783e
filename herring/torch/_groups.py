"""Process groups of the backend: one runtime for the process, started by the first group, ended with the last.

Who is worker k of the job: the first group decides. Usually that is the default group, and everybody's rank is the
global one. Where only a sub-group uses Herring, its members are the job; every later group must lie within it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import GroupMember

from herring import _core
from herring._context import Session, process
from herring._errors import HerringTimeoutError, InvalidArgumentError, UnavailableError
from herring._job import read_settings
from herring.torch import _binding
from herring.torch._settle import settle

# Other users of the runtime's group ids count from 1.
_FIRST_GROUP_ID = 1 << 30
_LAST_GROUP_ID = (1 << 31) - 1


@dataclass(frozen=True)
class _Agreement:
    """What the members of a new group settled on: its id, and each member's worker rank, in group order."""

    group_id: int
    job_ranks: list[int]
    is_new_job: bool
    mark: str = ""  #: Of this run alone, over a store that may have seen others.


class Groups:
    """All living groups of this process. There is one, `groups` below, as there is one runtime."""

    def __init__(self) -> None:
        os.register_at_fork(after_in_child=self._start_anew)
        self._start_anew()

    def _start_anew(self) -> None:
        """As if nothing was created yet. The parent's groups, which torch keeps in a forked child, refuse calls."""
        self._lock = threading.RLock()
        self._backends: dict[int, Any] = {}
        self._native: Any = None
        self._session: Session | None = None
        self._owns_session = False
        self._next_id = _FIRST_GROUP_ID
        self._created: dict[str, int] = {}
        self._ids: dict[str, tuple[int, float]] = {}

    def create(self, options: Any) -> Any:
        """A Backend for c10d's DistributedBackendOptions; every member calls this. Raises HerringError."""
        process.refuse_in_child()
        binding = _binding.load()
        with self._lock:
            name = str(options.group_id)
            generation = self._created.get(name, 0)
            self._created[name] = generation + 1
            agreement = self._agree(options, name, generation)
            self._connect(options, agreement, generation, binding)
            group_id = agreement.group_id
            backend = binding.create_backend(
                self._native,
                group_id,
                name,
                options.group_rank,
                agreement.job_ranks,
                _milliseconds(options.timeout),
                GroupMember.WORLD is None,  # torch sets it when its default group is there.
                lambda: self._release(group_id),
            )
            self._backends[group_id] = backend
            self._ids[name] = group_id, options.timeout.total_seconds()
            return backend

    def find(self, process_group: Any) -> tuple[int, float]:
        """The runtime's id of a living process group, and the timeout in seconds that it was created with."""
        with self._lock:
            found = self._ids.get(process_group.group_name)
            if found is None or found[0] not in self._backends:
                raise InvalidArgumentError(f"process group '{process_group.group_name}' is not one of Herring's")
            return found

    def close(self) -> None:
        """Ends all groups; runs at exit, while threads may still take the interpreter's lock."""
        for backend in list(self._backends.values()):
            backend.shutdown()

    def _connect(self, options: Any, agreement: _Agreement, generation: int, binding: _binding.Binding) -> None:
        session = process.session()
        if session is None:
            _require_gpus_where_asked()
            session = process.start(
                {},
                rank=options.group_rank,
                size=options.group_size,
                store=PrefixStore(f"herring/run/{agreement.mark}", _own_store(options.store)),
                generation=generation,
            )
            self._owns_session = True
            # After the session's own exit handler, so before it: the last registered runs first.
            atexit.unregister(self.close)
            atexit.register(self.close)
        elif session is not self._session:
            self._owns_session = False
        if session is not self._session:
            self._session = session
            self._native = _process(binding, session)
        self._next_id = agreement.group_id + 1

    def _release(self, group_id: int) -> None:
        with self._lock:
            self._backends.pop(group_id, None)
            if self._backends:
                return
            native, self._native = self._native, None
            session, self._session = self._session, None
            owned, self._owns_session = self._owns_session, False
        if native is not None:
            # Its thread takes the interpreter's lock, so it ends before the interpreter does: torch may keep what
            # holds it for longer. Without our lock, which its callbacks may want.
            native.stop()
        with self._lock:
            if self._session is session:  # A group was created meanwhile.
                self._owns_session = owned
            elif owned and process.session() is session:
                process.stop()

    def _agree(self, options: Any, name: str, generation: int) -> _Agreement:
        """Settles id and worker ranks over the store: members say where they are, the first one decides for all."""
        session = process.session()
        mine = {
            "job": None if session is None else str(session.job.client.job_id),
            "rank": None if session is None else session.job.rank,
            "next": self._next_id,
            "gpus": _gpu_settings(read_settings({}) if session is None else session.config),
        }
        store = _own_store(options.store)
        if options.group_size == 1:
            return _decide([mine], name, store)
        limit_s = min(_core.read_config().join_timeout_s, options.timeout.total_seconds())
        try:
            verdict = settle(
                store, f"herring/group/{generation}/", options.group_rank, options.group_size, mine,
                lambda said: _verdict(said, name, store), time.monotonic() + limit_s,
            )  # fmt: skip
        except TimeoutError as error:
            missing = error.args[0]
            who = f"group rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise HerringTimeoutError(
                f"process group '{name}': waited {limit_s:.3g} s for {who} to create it (the group's timeout, "
                "HERRING_JOIN_TIMEOUT_S at most)"
            ) from error
        if "error" in verdict:
            raise InvalidArgumentError(verdict["error"])
        return _Agreement(verdict["id"], verdict["ranks"], verdict["new"], verdict["mark"])


def _process(binding: _binding.Binding, session: Session) -> Any:
    config = session.config
    return binding.Process(
        session.runtime.capsule(),
        config.cuda != "off",
        # Sums on GPUs are not checked.
        "host" if config.check_finite == "on" else config.on_host,
        config.device_memory_bytes,
        config.device_blocks,
        config.nccl,
        config.gpudirect,
        config.eager_bytes,
    )


def _verdict(said: list[dict[str, Any]], name: str, store: Any) -> dict[str, Any]:
    try:
        agreement = _decide(said, name, store)
    except InvalidArgumentError as error:
        return {"error": str(error)}
    return {"id": agreement.group_id, "ranks": agreement.job_ranks, "new": agreement.is_new_job}


def _own_store(store: Any) -> Any:
    """torchrun's agent lends one store to all rounds of a job that it starts again: each has keys of its own."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if attempt == "0" else PrefixStore(f"herring/attempt/{attempt}", store)


def _decide(said: list[dict[str, Any]], name: str, store: Any) -> _Agreement:
    jobs = {each["job"] for each in said}
    if len(jobs) > 1:
        inside = [rank for rank, each in enumerate(said) if each["job"] is not None]
        raise InvalidArgumentError(
            f"process group '{name}' has {len(said)} members, of which group ranks {inside} are in a Herring job "
            "already (or in several) and the others are not: create the widest group first, best the default group "
            '(init_process_group("herring")), and narrower ones within it'
        )
    is_new_job = jobs == {None}
    _refuse_where_they_differ([each["gpus"] for each in said], name)
    ranks = list(range(len(said))) if is_new_job else [int(each["rank"]) for each in said]
    return _Agreement(_new_group_id(store, max(int(each["next"]) for each in said)), ranks, is_new_job)


def _gpu_settings(config: _core.Config) -> str:
    """What decides which way tensors on GPUs go, and in which pieces."""
    if config.on_host == "host":
        return "HERRING_ON_HOST=host"
    settings = f"HERRING_ON_HOST={config.on_host} HERRING_DEVICE_MEMORY_BYTES={config.device_memory_bytes}"
    # NCCL's ranks have as many channels each as these allow.
    return f"{settings} HERRING_DEVICE_BLOCKS={config.device_blocks}" if config.on_host == "nccl" else settings


def _refuse_where_they_differ(settings: list[str], name: str) -> None:
    other = next((rank for rank, each in enumerate(settings) if each != settings[0]), None)
    if other is not None:
        raise InvalidArgumentError(
            f"process group '{name}': the settings differ: group rank 0 has {settings[0]}, group rank {other} has "
            f"{settings[other]}; set them to the same values in every process"
        )


def _new_group_id(store: Any, at_least: int) -> int:
    """Unique in the job: counted in the store that all groups share, above what any member has used before."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    offset = int(store.add("herring/groups", 1))
    # The first is 0, as torch names it: messages say "process group 0".
    first = _FIRST_GROUP_ID - 1
    if first + offset < at_least:
        offset = int(store.add("herring/groups", at_least - first - offset))
    if first + offset > _LAST_GROUP_ID:
        raise InvalidArgumentError(f"more than {_LAST_GROUP_ID - first} process groups in one job")
    return first + offset


def _require_gpus_where_asked() -> None:
    """Raises UnavailableError where HERRING_CUDA=on and no GPU can be used."""
    if read_settings({}).cuda != "on":
        return
    problem = _core.survey_cuda()["problem"]
    if problem:
        raise UnavailableError(f"HERRING_CUDA=on, but no GPU can be used here: {problem.removeprefix('cuda: ')}")


def _milliseconds(timeout: timedelta) -> int:
    return max(int(timeout.total_seconds() * 1000), 1)


groups = Groups()


def create_group(options: Any, _group_options: Any) -> Any:
    """What torch.distributed calls for each new group on backend herring."""
    return groups.create(options)
