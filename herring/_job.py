"""Joining a job: what workers and servers do before they have a runtime.

`join_as_worker` and `join_as_server` are the only two ways in: of herring.init(), herring.torch and `herring server`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from herring import _core
from herring._detect import Detected, Master, detect
from herring._errors import (
    HerringError,
    HerringTimeoutError,
    InvalidArgumentError,
    MismatchError,
    UnavailableError,
    text_of,
)
from herring._fabric import fabric_search
from herring._placement import Placement, find_placement, launch_id
from herring._rendezvous import (
    Meeting,
    Store,
    from_hub_setting,
    from_master,
    from_port,
    listening_address,
    meeting_address,
    published_address,
    read_store,
    store_key,
)
from herring._start_line import counted

_Connected = TypeVar("_Connected")

_HUB_GRACE_S = 2.0
# Longer than the pause between two rounds of who looks for a hub (csrc/control/connect.cc).
_START_DELAY_S = 0.3


@dataclass
class WorkerJob:
    """A worker that has joined.

    `hub` is None except in worker 0's process. `deadline` (time.monotonic()) is that of the start as a whole.
    """

    config: _core.Config
    placement: Placement
    hub: _core.Hub | None
    client: _core.HubClient
    deadline: float

    @property
    def rank(self) -> int:
        """This worker's rank, 0 .. size-1."""
        return self.placement.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.placement.size

    def start_runtime(self) -> _core.Runtime:
        """Connects the data plane; every worker and server of the job does this at the same time."""
        return _connect(_core.Runtime, self)

    def close(self) -> None:
        """Says goodbye; in worker 0's process also ends the hub. Shut the runtime down first. Idempotent."""
        self.client.leave()
        if self.hub is not None:
            self.hub.close()
            self.hub = None


def _connect(create: Callable[..., _Connected], job: WorkerJob | ServerJob) -> _Connected:
    """The process's part of the data plane. The others wait for it; where it fails, they learn why."""
    try:
        return create(
            config=job.config,
            hub=job.client,
            rank=job.rank,
            fabric_search=fabric_search(),
            timeout=max(job.deadline - time.monotonic(), 0.0),
        )
    except BaseException as error:
        with contextlib.suppress(HerringError):
            job.client.report_failure(text_of(error))
        raise


@dataclass
class ServerJob:
    """A server process that has joined."""

    config: _core.Config
    rank: int
    client: _core.HubClient
    deadline: float

    def start(self) -> _core.ServerProcess:
        """Connects the data plane; then call run()."""
        return _connect(_core.ServerProcess, self)

    def close(self) -> None:
        """Says goodbye. Idempotent."""
        self.client.leave()


class _ElasticClient:
    """What others ask of a job's hub client, in an elastic job."""

    def __init__(self, runtime: _core.ElasticRuntime) -> None:
        self._runtime = runtime

    @property
    def job_id(self) -> int:
        """Of the present generation."""
        return self._runtime.job_id

    @property
    def workers(self) -> list[_core.Member]:
        """Of the present generation, by rank."""
        return self._runtime.workers

    @property
    def servers(self) -> list[_core.Member]:
        """Of the present generation, by rank."""
        return self._runtime.server_processes

    def report_failure(self, reason: str) -> None:
        """The runtime's abort says it."""

    def leave(self) -> None:
        """The runtime's shutdown does."""


@dataclass
class ElasticJob:
    """A worker of a job that has a rendezvous: others may come and go (csrc/elastic)."""

    config: _core.Config
    placement: Placement
    runtime: _core.ElasticRuntime

    @property
    def client(self) -> _ElasticClient:
        """Who else is here."""
        return _ElasticClient(self.runtime)

    @property
    def rank(self) -> int:
        """This worker's rank now."""
        return self.runtime.rank

    @property
    def size(self) -> int:
        """Number of workers now."""
        return self.runtime.size

    def start_runtime(self) -> _core.Runtime:
        """It runs already."""
        return self.runtime

    def close(self) -> None:
        """Nothing beyond the runtime's shutdown."""


def read_settings(settings: Mapping[str, object]) -> _core.Config:
    """HERRING_* and the API's settings, which win: `chunk_bytes="64KB"` is HERRING_CHUNK_BYTES=64KB.

    True and False read "on" and "off"; None is as if not given. Raises InvalidArgumentError naming a bad setting.
    """
    overrides = {}
    for name, value in settings.items():
        if value is None:
            continue
        text = ("on" if value else "off") if isinstance(value, bool) else str(value)
        overrides["HERRING_" + name.upper()] = text
    return _core.read_config(overrides)


def is_elastic(config: _core.Config) -> bool:
    """Whether this process finds its job through a rendezvous. Raises where it would need one and has none."""
    if config.elastic == "on" and not config.rendezvous:
        raise InvalidArgumentError(
            "an elastic job needs a rendezvous: start it with `herringrun --elastic`, or run `herring rendezvous` and "
            "set HERRING_RENDEZVOUS=host:port for every process"
        )
    return bool(config.rendezvous)


def join_elastic(
    config: _core.Config, *, rank: int | None = None, size: int | None = None, store: Store | None = None
) -> ElasticJob:
    """Enters the rendezvous and waits to be let into the job, at most HERRING_JOIN_TIMEOUT_S."""
    placement = find_placement(rank, size, os.environ, *_giver(store))
    meeting = from_hub_setting(config.rendezvous, config.secret, "HERRING_RENDEZVOUS")
    runtime = _core.ElasticRuntime(
        config=config,
        host=meeting.host,
        port=meeting.ports[0],
        rank=placement.rank,
        fabric_search=fabric_search(),
        timeout=config.join_timeout_s,
        workers=placement.size,
    )
    return ElasticJob(config, placement, runtime)


def elastic_server_entrance(rank: int, config: _core.Config) -> Callable[[], _core.ElasticServer]:
    """Joins when called; here raises InvalidArgumentError for what is wrong whatever the rendezvous says."""
    meeting = from_hub_setting(config.rendezvous, config.secret, "HERRING_RENDEZVOUS")
    return lambda: _core.ElasticServer(
        config=config,
        host=meeting.host,
        port=meeting.ports[0],
        rank=rank,
        fabric_search=fabric_search(),
        timeout=config.join_timeout_s,
    )


def join_elastic_as_server(rank: int, config: _core.Config) -> _core.ElasticServer:
    """As join_elastic, for a server. The servers' ranks follow from the order of these where they start together."""
    return elastic_server_entrance(rank, config)()


def _giver(store: Store | None) -> tuple[str, ...]:
    """Who gave rank and size as arguments: with a store of torch's its process group, not the script."""
    return () if store is None else ("torch.distributed",)


def join_as_worker(
    config: _core.Config | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    store: Store | None = None,
    generation: int = 0,
    environment: Mapping[str, str] | None = None,
) -> WorkerJob:
    """Finds this worker's place and the others, and waits until all workers and servers are there.

    Args:
        config: Settings; read from the environment where not given.
        rank, size: This worker's place; else the launcher's variables (herring._placement).
        store: A torch Store, or anything with its set(key, text) and get(key): carries the hub's address.
        generation: Distinguishes successive joins over one store; the same on every rank.
        environment: Instead of os.environ, for the launcher's variables.

    Raises HerringTimeoutError past HERRING_JOIN_TIMEOUT_S, naming who is missing; MismatchError where processes
    disagree about the job's size; InvalidArgumentError for bad settings and a wrong secret.
    """
    env = os.environ if environment is None else environment
    config = _core.read_config() if config is None else config
    deadline = time.monotonic() + config.join_timeout_s
    placement = find_placement(rank, size, env, *_giver(store))
    fixed = _fixed_meeting(config, placement, store, env)
    if placement.rank == 0:
        return _lead(config, placement, store if fixed is None else None, generation, fixed, env, deadline)
    if fixed is None and store is not None:
        fixed = read_store(store, generation, deadline)
    elif fixed is None:
        fixed = Meeting.from_text(_mpi_broadcast("", placement.size, deadline))
    config = config.with_secret(fixed.secret)
    launch = _launch(fixed, config, placement, env)
    return WorkerJob(
        config,
        placement,
        None,
        _join(config, "worker", placement.rank, placement.size, fixed, deadline, launch),
        deadline,
    )


def join_as_server(
    rank: int | None = None,
    config: _core.Config | None = None,
    *,
    workers: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerJob:
    """Joins as server `rank` of HERRING_SERVERS, where not given as the scheduler counts.

    Where neither `workers` nor WORLD_SIZE nor the scheduler says how many workers there are, the hub does. Finds the
    hub through HERRING_HUB, else MASTER_ADDR and MASTER_PORT, else through the scheduler. Raises as join_as_worker.
    """
    return server_entrance(rank, config, workers=workers, environment=environment)()


def server_entrance(
    rank: int | None = None,
    config: _core.Config | None = None,
    *,
    workers: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Callable[[], ServerJob]:
    """As join_as_server, which it does when called; here raises InvalidArgumentError for what no hub can mend."""
    env = os.environ if environment is None else environment
    settings = _core.read_config() if config is None else config
    if settings.servers == 0:
        raise InvalidArgumentError("HERRING_SERVERS is 0: set it to the number of servers, here and for the workers")
    found = detect(env, "server")
    place = _server_rank(found, settings.servers) if rank is None else rank
    if not 0 <= place < settings.servers:
        raise InvalidArgumentError(
            f"server rank {place} is not from 0 to {settings.servers - 1} (HERRING_SERVERS={settings.servers})"
        )
    _refuse_one_world(found, settings.servers)
    size = (found.size if workers is None else workers) or 0
    meeting = (
        from_hub_setting(settings.hub, settings.secret) if settings.hub else _scheduled(found.hub, env, settings.secret)
    )
    if meeting is None:
        raise InvalidArgumentError(
            "a server finds its job through MASTER_ADDR and MASTER_PORT, or HERRING_HUB: set one"
        )
    return lambda: _enter_as_server(place, settings.with_secret(meeting.secret), size, meeting)


def _enter_as_server(rank: int, config: _core.Config, workers: int, meeting: Meeting) -> ServerJob:
    deadline = time.monotonic() + config.join_timeout_s
    return ServerJob(config, rank, _join(config, "server", rank, workers, meeting, deadline), deadline)


def find_server_rank(config: _core.Config, environment: Mapping[str, str] | None = None) -> int:
    """The rank of this server as the scheduler counts (`herring server --rank auto`). Raises InvalidArgumentError."""
    found = detect(os.environ if environment is None else environment, "server")
    return _server_rank(found, None if config.rendezvous else config.servers)


def _refuse_one_world(found: Detected, servers: int) -> None:
    """One MPI world of more processes than servers, and nothing that says how many are workers: ranks count both."""
    if "PMI_RANK" in found.source and found.size is None and found.peers is not None and found.peers > servers:
        raise InvalidArgumentError(_one_world(found, servers))


def _one_world(found: Detected, servers: int) -> str:
    return (
        f"HERRING_SERVERS is {servers}, but {found.peers} processes were started together with this server (from "
        f"{found.source}): start exactly {counted(servers, 'server')}, separately from the workers"
    )


def _server_rank(found: Detected, servers: int | None) -> int:
    """`servers` is None where a rendezvous knows how many there are."""
    if found.rank is None:
        raise InvalidArgumentError(
            "no variable says which server this is (srun's SLURM_PROCID, a pod's JOB_COMPLETION_INDEX or "
            "VC_TASK_INDEX, mpirun's variables, SageMaker's hosts): give --rank, 0 to HERRING_SERVERS - 1"
        )
    if servers is not None and found.peers not in (None, servers):
        raise InvalidArgumentError(_one_world(found, servers))
    return found.rank


def _scheduled(hub: Master | None, env: Mapping[str, str], secret: str) -> Meeting | None:
    """MASTER_ADDR and MASTER_PORT, else what the scheduler says in their place."""
    meeting = from_master(env, secret)
    return from_port(hub.host, hub.port, secret) if meeting is None and hub is not None else meeting


def _fixed_meeting(
    config: _core.Config, placement: Placement, store: Store | None, env: Mapping[str, str]
) -> Meeting | None:
    """The place that every process can work out by itself; None where worker 0 has to tell the others (or is alone)."""
    if config.hub:
        return from_hub_setting(config.hub, config.secret)
    if config.servers == 0 and (store is not None or placement.size == 1):
        return None
    meeting = _scheduled(placement.hub, env, config.secret)
    if meeting is not None:
        return meeting
    if placement.no_hub:
        raise InvalidArgumentError(f"worker {placement.rank} of {placement.size}: {placement.no_hub}")
    if config.servers > 0:
        raise InvalidArgumentError(
            f"HERRING_SERVERS is {config.servers}, but server processes could not find the workers: "
            "set MASTER_ADDR and MASTER_PORT (or HERRING_HUB) for all of them"
            + (f". {placement.note}" if placement.note else "")
        )
    if not placement.is_mpi:
        raise InvalidArgumentError(
            f"worker {placement.rank} of {placement.size} does not know where worker 0 is: set MASTER_ADDR and "
            "MASTER_PORT (torchrun and herringrun do), or HERRING_HUB=host:port, or launch with mpirun"
        )
    return None


def _lead(
    config: _core.Config,
    placement: Placement,
    store: Store | None,
    generation: int,
    fixed: Meeting | None,
    env: Mapping[str, str],
    deadline: float,
) -> WorkerJob:
    """Worker 0: starts the hub, tells the others where it is, and joins it like everybody."""
    is_all_local = config.servers == 0 and placement.local_size == placement.size
    if fixed is not None:
        config = config.with_secret(fixed.secret)
    elif not config.secret:
        config = config.with_secret(secrets.token_hex(32))
    listen_host = listening_address(is_all_local, config.interface, fixed.host if fixed is not None else None)
    hub = _core.Hub(
        listen_host=listen_host,
        ports=list(fixed.ports) if fixed is not None else [],
        workers=placement.size,
        job_id=secrets.randbits(63) + 1,
        config=config,
        meet_host=meeting_address(listen_host, fixed.host) if fixed is not None else "",
        master_port=fixed.master_port if fixed is not None else 0,
        # A process of this job that has not come by then never comes: worker 0 would have given up.
        doubt_for=config.join_timeout_s,
        start_delay=_START_DELAY_S if fixed is not None and fixed.is_derived else 0.0,
        launch=_launch(fixed, config, placement, env),
    )
    try:
        if fixed is None and placement.size > 1:
            host = published_address(is_all_local, config.interface, env.get("MASTER_ADDR"))
            text = Meeting(host, (hub.port,), config.secret).to_text()
            if store is not None:
                store.set(store_key(generation), text)
            else:
                _mpi_broadcast(text, placement.size, deadline)
        here = Meeting(listen_host or "127.0.0.1", (hub.port,), config.secret)
        client = _join(config, "worker", 0, placement.size, here, deadline, _launch(fixed, config, placement, env))
        return WorkerJob(config, placement, hub, client, deadline)
    except (HerringTimeoutError, MismatchError):
        # The others learn from the hub who is missing, at their own deadline, which may be a little later than ours; or
        # that another job came.
        time.sleep(_HUB_GRACE_S)
        hub.close()
        raise
    except BaseException:
        hub.close()
        raise


def _launch(fixed: Meeting | None, config: _core.Config, placement: Placement, env: Mapping[str, str]) -> str:
    """Tells jobs apart where no secret does. One job may have workers of several launches; it has a secret then."""
    has_secret = config.secret and not (fixed is not None and fixed.is_derived)
    return "" if has_secret else launch_id(placement, env)


def _join(
    config: _core.Config,
    role: str,
    rank: int,
    workers: int,
    meeting: Meeting,
    deadline: float,
    launch: str = "",
) -> _core.HubClient:
    return _core.HubClient(
        host=meeting.host,
        ports=list(meeting.ports),
        role="server" if role == "server" else "worker",
        rank=rank,
        workers=workers,
        config=config,
        timeout=max(deadline - time.monotonic(), 0.0),
        master_port=meeting.master_port,
        launch=launch,
    )


def _mpi_broadcast(text: str, size: int, deadline: float) -> str:
    from herring._mpi import broadcast_text

    try:
        return broadcast_text(text, size, deadline)
    except UnavailableError as error:
        raise UnavailableError(f"{error}; or set MASTER_ADDR and MASTER_PORT for every process") from error
