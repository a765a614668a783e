"""Ray Train with Herring (docs/ray.md): torch's backend `herring` in the workers, and K server processes as Ray actors.

from herring.ray import HerringConfig
TorchTrainer(train, torch_config=HerringConfig(servers=2), scaling_config=ScalingConfig(num_workers=4)).fit()

With elastic=True, Ray replaces a lost worker alone and the others go on; `train` then uses herring.elastic.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from herring import _core
from herring._errors import InvalidArgumentError, UnavailableError, missing_package
from herring._job import is_elastic, join_as_server, join_elastic_as_server, read_settings
from herring._launch._options import most_servers

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.train._internal.utils import get_address_and_port
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import _TorchBackend
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise missing_package(__name__, "'ray[train]' torch", error) from error

__all__ = ["HerringConfig"]

_GROUP = "herring-servers"  # The placement group's name, as Ray shows it.
_log = logging.getLogger("herring.ray")
_OTHER_RENDEZVOUS = (
    "HERRING_RENDEZVOUS is set, but HerringConfig(elastic=True) starts a rendezvous of its own, and without elastic "
    "there is none: unset it"
)
_GOODBYE_S = 5.0  # Servers end with the last worker; one that has not by then is killed.


@dataclass
class HerringConfig(TorchConfig):  # type: ignore[misc]  # Ray is not here where types are checked.
    """What TorchTrainer(torch_config=...) takes, for torch's backend `herring`.

    Parameters:
        backend, init_method, timeout_s: As in Ray's TorchConfig. The backend may also be a list that has herring in
            it, as "cpu:gloo,cuda:herring".
        servers: Number of server processes, each a Ray actor. 0: the servers are inside the workers.
        server_resources: What one server reserves, as `resources_per_worker` in ScalingConfig. None: {"CPU": 1}.
        server_timeout_s: How long to wait for a place for the servers, and then for their processes, in seconds.
        elastic: A lost worker is replaced while the others go on. The training function calls herring.init() and uses
            herring.elastic or herring.horovod.torch; there is no process group of torch.
        min_workers: With elastic: the job fails with fewer workers than this. Ray then starts all of them again.

    Raises InvalidArgumentError for a value that cannot be.
    """

    backend: str | None = "herring"
    servers: int = 0
    server_resources: dict[str, float] | None = None
    server_timeout_s: float = 60
    elastic: bool = False
    min_workers: int = 1

    def __post_init__(self) -> None:
        if "herring" not in (self.backend or ""):
            raise InvalidArgumentError(
                f"HerringConfig(backend={self.backend!r}): it must be herring or contain it, such as cpu:herring"
            )
        count, most = self.servers, most_servers() or math.inf
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= most:
            raise InvalidArgumentError(f"HerringConfig(servers={count!r}): it must be a whole number, 0 to {most}")
        resources = self.server_resources
        if resources is not None and (not resources or not all(map(_is_amount, resources.values()))):
            raise InvalidArgumentError(
                f"HerringConfig(server_resources={resources!r}): it must name resources and amounts above 0, as in "
                '{"CPU": 8}'
            )
        if not _is_amount(self.server_timeout_s):
            raise InvalidArgumentError(
                f"HerringConfig(server_timeout_s={self.server_timeout_s!r}): it must be above 0 seconds"
            )
        self._check_elastic()

    def _check_elastic(self) -> None:
        least = self.min_workers
        if not isinstance(self.elastic, bool):
            raise InvalidArgumentError(f"HerringConfig(elastic={self.elastic!r}): it must be True or False")
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise InvalidArgumentError(f"HerringConfig(min_workers={least!r}): it must be a whole number above 0")
        if least > 1 and not self.elastic:
            raise InvalidArgumentError(f"HerringConfig(min_workers={least}): it has a meaning with elastic=True only")
        if self.elastic and not hasattr(Backend, "has_replica_groups"):
            raise UnavailableError(
                f"HerringConfig(elastic=True): Ray {ray.__version__} cannot replace one worker: pip install 'ray>=2.60'"
            )

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray calls when workers start and end."""
        return _ElasticBackend if self.elastic else _Backend

    def to_dict(self) -> dict[str, Any]:
        """What Ray shows of it."""
        own = {"servers": self.servers, "server_resources": self.server_resources, "elastic": self.elastic}
        return {**super().to_dict(), **own}


class HerringServer:
    """A server process: a Ray actor that serves until the job ends."""

    def prepare(self, settings: Mapping[str, object]) -> None:
        """Reads HERRING_* and these settings. Raises InvalidArgumentError for bad ones."""
        self._config = read_settings(settings)
        if is_elastic(self._config) and "rendezvous" not in settings:
            raise InvalidArgumentError(_OTHER_RENDEZVOUS)

    def serve(self, rank: int) -> None:
        """Until the last worker has left. Raises as `herring server` does."""
        if is_elastic(self._config):
            server = join_elastic_as_server(rank, self._config)
            try:
                server.run()
            finally:
                server.close()
            return
        job = join_as_server(rank, self._config)
        try:
            process = job.start()
            try:
                process.run()
            finally:
                process.close()
        finally:
            job.close()


class _Servers:
    """The actors of one start of the workers, and the places that they hold."""

    def __init__(self, config: HerringConfig, settings: Mapping[str, str]) -> None:
        """Reserves the places and starts the actors; returns when all are ready to join with these settings."""
        self._resources = config.server_resources or {"CPU": 1}
        self._settings = dict(settings)
        self._actors: list[Any] = []
        self._ends: list[Any] = []
        places = [dict(self._resources) for _ in range(config.servers)]
        self._group: PlacementGroup = placement_group(places, strategy="SPREAD", name=_GROUP)
        try:
            self._start(config)
        except BaseException:
            self.stop(0)
            raise

    def _start(self, config: HerringConfig) -> None:
        count, limit = config.servers, config.server_timeout_s
        if not self._group.wait(math.ceil(limit)):
            raise UnavailableError(
                f"Ray found no place for {count} Herring servers with {self._resources} each within {limit:g} s; free "
                f"in the cluster, with the workers running: {_free(self._resources)}. Reduce servers, workers or "
                "server_resources, add nodes, or raise server_timeout_s in HerringConfig"
            )
        for index in range(count):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            options = _actor_options(self._resources)
            self._actors.append(ray.remote(HerringServer).options(scheduling_strategy=place, **options).remote())
        ready = [actor.prepare.remote(self._settings) for actor in self._actors]
        for rank, each in enumerate(ready):
            try:
                ray.get(each, timeout=limit)
            except GetTimeoutError as error:
                raise UnavailableError(
                    f"Herring server {rank} of {count} has not started within {limit:g} s: raise server_timeout_s in "
                    "HerringConfig, or look at its log in Ray"
                ) from error
            except RayError as error:
                raise UnavailableError(f"Herring server {rank} of {count} could not be started: {error}") from error
        self._ends = [actor.serve.remote(rank) for rank, actor in enumerate(self._actors)]

    def failure(self) -> str:
        """What the first server that has failed says; empty where none has."""
        ended, _ = ray.wait(self._ends, num_returns=len(self._ends), timeout=0)
        for rank, end in enumerate(self._ends):
            if end in ended:
                try:
                    ray.get(end)
                except RayError as error:
                    return f"Herring server {rank} of {len(self._ends)}: {error}"
        return ""

    def stop(self, limit_s: float = _GOODBYE_S) -> None:
        """Waits for them at most so long, ends those that are left, and gives their places back."""
        if self._ends and limit_s > 0:
            ray.wait(self._ends, num_returns=len(self._ends), timeout=limit_s)
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._ends = [], []
        remove_placement_group(self._group)


class _HasServers:
    """What both backends below have: the servers of one start of the workers, if there are any."""

    _servers: _Servers | None = None

    def _stop(self, limit_s: float) -> None:
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.stop(limit_s)


class _Backend(_HasServers, _TorchBackend):  # type: ignore[misc]
    """Ray keeps one of these for a training run, and starts it again where workers are started again."""

    def on_start(self, worker_group: Any, backend_config: HerringConfig) -> None:
        """Servers first, then torch's process group in the workers: both wait for one another."""
        self._stop(0)  # Ray does not say that workers have ended where it aborts them.
        environment: dict[str, str] = {}
        if backend_config.servers > 0:
            place = _place(*worker_group.execute_single(0, get_address_and_port))
            settings = {"hub": place, "servers": str(backend_config.servers), "secret": secrets.token_hex(16)}
            self._servers = _Servers(backend_config, settings)
            environment = _as_environment(settings)
        try:
            worker_group.execute(_enter, environment)
            super().on_start(worker_group, backend_config)
        except BaseException as error:
            reason = self._servers.failure() if self._servers is not None else ""
            self._stop(0)
            if reason:
                raise UnavailableError(f"the workers have not started ({error}); {reason}") from error
            raise

    def on_shutdown(self, worker_group: Any, backend_config: HerringConfig) -> None:
        """Also after a failure; raises then, where a worker cannot be reached."""
        try:
            super().on_shutdown(worker_group, backend_config)
        finally:
            self._stop(_GOODBYE_S)


class _ElasticBackend(_HasServers, Backend):  # type: ignore[misc]
    """Each worker is a replica group of Ray's: what is lost is replaced alone, and the others keep their process.

    Ray's own use of that is torchft (ray/train/v2/torch/torchft_config.py, the model for this).
    """

    has_replica_groups = True
    share_cuda_visible_devices = True

    def __init__(self) -> None:
        super().__init__()
        self._rendezvous: _core.Rendezvous | None = None
        self._environment: dict[str, str] = {}

    def on_start(self, worker_group: Any, backend_config: HerringConfig) -> None:
        """For all workers: a new job. For a replica group: a worker more for the job that runs."""
        if not _is_replica_group(worker_group):
            self._stop(0)
            try:
                self._open(len(worker_group), backend_config)
            except BaseException:
                self._stop(0)
                raise
        worker_group.execute(_enter_elastic, self._environment)

    def _open(self, workers: int, config: HerringConfig) -> None:
        if config.min_workers > workers:
            raise InvalidArgumentError(
                f"HerringConfig(min_workers={config.min_workers}), but ScalingConfig has num_workers={workers}"
            )
        settings = {"secret": secrets.token_hex(16)}
        read = read_settings(settings)
        if is_elastic(read):
            raise InvalidArgumentError(_OTHER_RENDEZVOUS)
        # In Ray Train's controller, where this runs: without it there is nobody to replace a worker.
        host = ray.util.get_node_ip_address()
        self._rendezvous = _core.Rendezvous(
            config=read,
            listen_host=host,
            port=0,
            workers=workers,
            servers=config.servers,
            min_workers=config.min_workers,
        )
        settings["rendezvous"] = _place(host, self._rendezvous.port)
        if config.servers > 0:
            self._servers = _Servers(config, settings)
        self._environment = _as_environment({**settings, "elastic": "on"})

    def on_shutdown(self, worker_group: Any, backend_config: HerringConfig) -> None:
        """A replica group is lost already, or has failed: Ray ends its process, and the others see that."""
        if _is_replica_group(worker_group):
            return
        try:
            ray.get(worker_group.execute_async(_leave), timeout=_GOODBYE_S)
        except GetTimeoutError:
            _log.warning("Herring's workers have not left their job within %g s; Ray ends them now", _GOODBYE_S)
        finally:
            self._stop(_GOODBYE_S)

    def _stop(self, limit_s: float) -> None:
        super()._stop(limit_s)
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.close()


def _is_replica_group(worker_group: Any) -> bool:
    from ray.train.v2._internal.execution.worker_group import ReplicaGroup

    return isinstance(worker_group, ReplicaGroup)


def _enter_elastic(environment: Mapping[str, str]) -> None:
    """In a worker, before the training function. Ray's rank is the first one here; herring.rank() may change."""
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), **environment})


def _leave() -> None:
    """In a worker whose training function has ended, and has not called herring.shutdown()."""
    import herring

    herring.shutdown()


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _as_environment(settings: Mapping[str, str]) -> dict[str, str]:
    return {f"HERRING_{name.upper()}": value for name, value in settings.items()}


def _enter(environment: Mapping[str, str]) -> None:
    """In a worker, before its process group is made."""
    os.environ.update(environment)
    import herring.torch  # noqa: F401  # Registers the backend also with TORCH_DEVICE_BACKEND_AUTOLOAD=0.


def _actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """As Ray names them for an actor."""
    rest = dict(resources)
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options.update({names[name]: rest.pop(name) for name in names if name in rest})
    return {**options, "resources": rest}


def _free(resources: Mapping[str, float]) -> dict[str, float]:
    free = ray.available_resources()
    return {name: float(free.get(name, 0)) for name in resources}


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
