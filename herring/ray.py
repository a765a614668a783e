"""Ray Train with Herring (docs/ray.md): torch's backend `herring` in the workers, and K server processes as Ray actors.

from herring.ray import HerringConfig
TorchTrainer(train, torch_config=HerringConfig(servers=2), scaling_config=ScalingConfig(num_workers=4)).fit()
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from herring._errors import InvalidArgumentError, UnavailableError
from herring._job import is_elastic, join_as_server, read_settings
from herring._launch._options import most_servers

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.train._internal.utils import get_address_and_port
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import _TorchBackend
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise UnavailableError(
        f"herring.ray needs Ray Train and torch (pip install 'ray[train]' torch): {error}"
    ) from error

__all__ = ["HerringConfig"]

_GROUP = "herring-servers"  # The placement group's name, as Ray shows it.
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

    Raises InvalidArgumentError for a value that cannot be.
    """

    backend: str | None = "herring"
    servers: int = 0
    server_resources: dict[str, float] | None = None
    server_timeout_s: float = 60

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

    @property
    def backend_cls(self) -> type[_Backend]:
        """What Ray calls when workers start and end."""
        return _Backend

    def to_dict(self) -> dict[str, Any]:
        """What Ray shows of it."""
        own = {"servers": self.servers, "server_resources": self.server_resources}
        return {**super().to_dict(), **own}


class HerringServer:
    """A server process: a Ray actor that serves until the job ends."""

    def prepare(self, settings: Mapping[str, object]) -> None:
        """Reads HERRING_* and these settings. Raises InvalidArgumentError for bad ones."""
        self._config = read_settings(settings)
        if is_elastic(self._config):
            raise InvalidArgumentError(
                "HERRING_RENDEZVOUS is set: elastic jobs have no servers as Ray actors; unset it"
            )

    def serve(self, rank: int) -> None:
        """Until the last worker has left. Raises as `herring server` does."""
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

    def __init__(self, config: HerringConfig, hub: str) -> None:
        """Reserves the places and starts the actors; returns when all are ready to join."""
        self._resources = config.server_resources or {"CPU": 1}
        self.settings = {"HUB": hub, "SERVERS": str(config.servers), "SECRET": secrets.token_hex(16)}
        self._actors: list[Any] = []
        self._ends: list[Any] = []
        places = [dict(self._resources) for _ in range(config.servers)]
        self._group: PlacementGroup = placement_group(places, strategy="SPREAD", name=_GROUP)
        try:
            self._start(config)
        except BaseException:
            self.stop(0)
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What the workers have to know."""
        return {f"HERRING_{name}": value for name, value in self.settings.items()}

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
        settings = {name.lower(): value for name, value in self.settings.items()}
        ready = [actor.prepare.remote(settings) for actor in self._actors]
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


class _Backend(_TorchBackend):  # type: ignore[misc]
    """Ray keeps one of these for a training run, and starts it again where workers are started again."""

    def __init__(self) -> None:
        super().__init__()
        self._servers: _Servers | None = None

    def on_start(self, worker_group: Any, backend_config: HerringConfig) -> None:
        """Servers first, then torch's process group in the workers: both wait for one another."""
        self._stop(0)  # Ray does not say that workers have ended where it aborts them.
        environment: dict[str, str] = {}
        if backend_config.servers > 0:
            host, port = worker_group.execute_single(0, get_address_and_port)
            place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._servers = _Servers(backend_config, place)
            environment = self._servers.environment
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

    def _stop(self, limit_s: float) -> None:
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.stop(limit_s)


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
