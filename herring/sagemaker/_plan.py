"""What each host of a SageMaker training job runs: pure functions of its environment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from herring._detect import by_number, number
from herring._errors import InvalidArgumentError

__all__ = ["Cluster", "Options", "Start", "plan", "read_cluster", "read_options", "worker_command"]

_HUB_PORT, _TORCH_PORT = 29400, 29500
_GROUP_KEYS = ("instance_group_name", "instance_type", "hosts")
# Instance types whose EFA SageMaker's own drivers switch on, as families; with RDMA, and without.
_EFA_RDMA = re.compile(r"ml\.(p4d|p4de|p5|p5e|p5en|p6-\w+|trn1|trn1n|trn2)\..*")
_EFA = re.compile(r"ml\.(g4dn\.(8|12)xlarge|g5\.48xlarge|p3dn\.24xlarge)")


@dataclass(frozen=True)
class Options:
    """What was given to herring.sagemaker.Herring."""

    server_group: str | None = None
    process_count_per_node: int | None = None
    secret_arn: str | None = None


@dataclass(frozen=True)
class Cluster:
    """The job's hosts, in the order of their numbers."""

    here: str
    workers: list[str]
    servers: list[str]
    worker_groups: int  #: Instance groups that train.
    instance_type: str  #: Of this host; empty where nothing says.
    interface: str  #: Likewise.

    @property
    def is_server(self) -> bool:
        """This host serves."""
        return self.here in self.servers


@dataclass(frozen=True)
class Start:
    """One process of this host: name, command line, and the variables that it gets beside all others."""

    name: str
    arguments: list[str]
    environment: dict[str, str]


def read_options(env: Mapping[str, str]) -> Options:
    """What the SDK has written down of the Herring object. Raises InvalidArgumentError."""
    said = _object(env.get("SM_DISTRIBUTED_CONFIG") or "{}", "SM_DISTRIBUTED_CONFIG")
    count = said.get("process_count_per_node")
    return Options(said.get("server_group"), None if count is None else int(count), said.get("secret_arn"))


def worker_command(env: Mapping[str, str], python: str) -> list[str]:
    """The entry script with the hyperparameters as arguments, as SageMaker's own drivers start it."""
    script = env.get("SM_ENTRY_SCRIPT", "")
    if not script.endswith((".py", ".sh")):
        raise InvalidArgumentError(
            f"SM_ENTRY_SCRIPT is {script!r}: give SourceCode(entry_script=...) a .py or .sh file, not a command"
        )
    given = _object(env.get("SM_HPS") or "{}", "SM_HPS")
    pairs = ((f"--{name}", value if isinstance(value, str) else json.dumps(value)) for name, value in given.items())
    return [python if script.endswith(".py") else "/bin/bash", script, *(word for pair in pairs for word in pair)]


def read_cluster(env: Mapping[str, str], resource_config: str, server_group: str | None) -> Cluster:
    """Who is there. `resource_config`: the text of resourceconfig.json; SM_RESOURCE_CONFIG comes before it.

    SM_MASTER_ADDR is not looked at: it is always algo-1, be that a server. Raises InvalidArgumentError.
    """
    text = env.get("SM_RESOURCE_CONFIG") or resource_config
    said = _object(text or "{}", "SageMaker's resource configuration")
    here = said.get("current_host") or env.get("SM_CURRENT_HOST", "")
    hosts = said.get("hosts") or _list(env.get("SM_HOSTS") or "[]", "SM_HOSTS")
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise InvalidArgumentError(f"SageMaker's hosts are {hosts}; it must be a list of names")
    if here and hosts and here not in hosts:
        raise InvalidArgumentError(
            f"this host is {here!r} of {', '.join(hosts)}: SM_CURRENT_HOST must be one of the job's hosts"
        )
    if not here or not hosts:
        missing = " and ".join(["this host"] * (not here) + ["the job's hosts"] * (not hosts))
        raise InvalidArgumentError(
            f"nothing names {missing} (resourceconfig.json in /opt/ml/input/config, SM_RESOURCE_CONFIG, or "
            "SM_CURRENT_HOST and SM_HOSTS). Is this a SageMaker training job?"
        )
    groups = _groups(said)
    servers, trains = _split(groups, hosts, server_group)
    kind = said.get("current_instance_type") or env.get("SM_CURRENT_INSTANCE_TYPE", "")
    interface = said.get("network_interface_name") or env.get("SM_NETWORK_INTERFACE_NAME", "")
    workers = [host for host in hosts if host not in servers]
    return Cluster(here, sorted(workers, key=by_number), sorted(servers, key=by_number), trains, kind, interface)


def _groups(said: Mapping[str, Any]) -> dict[str, list[str]]:
    try:
        return {
            str(each["instance_group_name"]): list(map(str, each["hosts"]))
            for each in said.get("instance_groups") or []
        }
    except (KeyError, TypeError):
        raise InvalidArgumentError(
            f"SageMaker's instance_groups are {said['instance_groups']!r}; each needs {', '.join(_GROUP_KEYS)}"
        ) from None


def _split(groups: Mapping[str, list[str]], hosts: Sequence[str], server_group: str | None) -> tuple[list[str], int]:
    """The servers' hosts, and how many groups train."""
    if server_group is None:
        return [], max(1, len(groups))
    if server_group not in groups:
        raise InvalidArgumentError(
            f"server_group is {server_group!r}, but the job's instance groups are: {', '.join(groups) or 'none'}"
        )
    servers = groups[server_group]
    if set(servers) >= set(hosts):
        raise InvalidArgumentError(f"server_group {server_group!r} has all hosts of the job: no host is left to train")
    return servers, len(groups) - 1


def plan(
    env: Mapping[str, str], cluster: Cluster, options: Options, secret: str, python: str, command: Sequence[str]
) -> list[Start]:
    """What this host runs. Raises InvalidArgumentError."""
    shared = {"HERRING_SERVERS": str(len(cluster.servers)), **_network(env, cluster)}
    if secret:
        shared["HERRING_SECRET"] = secret
    if len(cluster.workers) + len(cluster.servers) > 1:
        shared["HERRING_HUB"] = f"{cluster.workers[0]}:{_HUB_PORT}"
    if cluster.is_server:
        rank = cluster.servers.index(cluster.here)
        arguments = [python, "-m", "herring", "server", "--rank", str(rank)]
        return [Start(f"server {rank}", arguments, {"OMP_NUM_THREADS": "1", **shared})]
    count = _processes(env, cluster, options)
    first = cluster.workers.index(cluster.here) * count
    shared.update(
        MASTER_ADDR=cluster.workers[0],
        MASTER_PORT=str(_TORCH_PORT),
        WORLD_SIZE=str(len(cluster.workers) * count),
        LOCAL_WORLD_SIZE=str(count),
        PYTHONUNBUFFERED=env.get("PYTHONUNBUFFERED", "1"),
    )
    places = [{"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(count)]
    return [Start(f"rank {place['RANK']}", list(command), {**shared, **place}) for place in places]


def _processes(env: Mapping[str, str], cluster: Cluster, options: Options) -> int:
    told = options.process_count_per_node
    if told is not None and told < 1:
        raise InvalidArgumentError(f"process_count_per_node is {told}; it must be at least 1")
    if told is None and cluster.worker_groups > 1:
        raise InvalidArgumentError(
            f"{cluster.worker_groups} instance groups train, and each host knows only its own number of GPUs: set "
            "process_count_per_node, or server_group if one of them runs servers"
        )
    if (gpus := number(env, "SM_NUM_GPUS")) is not None and gpus < 0:
        raise InvalidArgumentError(f"SM_NUM_GPUS is '{gpus}'; it must be at least 0")
    return told or gpus or number(env, "SM_NUM_NEURONS") or 1


def _network(env: Mapping[str, str], cluster: Cluster) -> dict[str, str]:
    """As SageMaker's own drivers do, for NCCL and libfabric. What is set stays.

    HERRING_INTERFACE is not set: it would shut out the EFA of types that are not listed here (c6in, c7gn).
    """
    kind, wanted = cluster.instance_type, {}
    has_rdma = _EFA_RDMA.fullmatch(kind) is not None
    if has_rdma:
        wanted = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}
    elif _EFA.fullmatch(kind):
        wanted = {"FI_PROVIDER": "efa"}
    if cluster.interface:
        wanted["NCCL_SOCKET_IFNAME"] = cluster.interface
    return {name: value for name, value in wanted.items() if name not in env}


def _object(text: str, what: str) -> dict[str, Any]:
    said = _json(text, what)
    if not isinstance(said, dict):
        raise InvalidArgumentError(f"{what} is {text!r}; it must be an object in JSON")
    return said


def _list(text: str, what: str) -> list[str]:
    said = _json(text, what)
    if not isinstance(said, list):
        raise InvalidArgumentError(f"{what} is {text!r}; it must be a list in JSON")
    return [str(each) for each in said]


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidArgumentError(f"{what} is {text!r}, which is not JSON") from None
