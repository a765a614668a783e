"""TF_CONFIG, the variable by which TensorFlow's launchers (Kubeflow's TFJob and others) say who a process is.

    {"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}, "task": {"type": "worker", "index": 1}}

Chief and workers are workers here, the chief (`master`, in older clusters) first. Parameter servers (`ps`) may run
`herring server`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from herring._errors import InvalidArgumentError

_WORKERS = ("chief", "master", "worker")
_SERVER = "ps"
_EVALUATOR = "evaluator"
_PORT = 2222  # Where an address has none: TFJob's.


@dataclass(frozen=True)
class Task:
    """A process's place in the cluster; `host` and `port` are those of worker 0."""

    is_server: bool
    rank: int  #: Among those of its role.
    peers: int  #: How many of its role there are.
    size: int  #: Number of workers.
    local_rank: int  #: Among those of its role on its host.
    local_size: int
    host: str
    port: int


def read(text: str) -> Task | None:
    """This process's place. None where it is in no cluster of several (an evaluator is in none).

    Raises InvalidArgumentError where the text cannot be understood or contradicts itself.
    """
    said = _parsed(text)
    cluster, task = said.get("cluster") or {}, said.get("task") or {}
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise _wrong(text, "its cluster and its task must be objects")
    workers = [_split(text, each) for kind in _WORKERS for each in _addresses(text, cluster, kind)]
    servers = [_split(text, each) for each in _addresses(text, cluster, _SERVER)]
    kind = task.get("type")
    if not workers or len(workers) + len(servers) < 2 or kind == _EVALUATOR:
        return None
    if kind not in (*_WORKERS, _SERVER):
        raise _wrong(text, f"task.type is {kind!r}; it must be {', '.join((*_WORKERS, _SERVER))} or {_EVALUATOR}")
    rank = _rank(text, cluster, kind, task.get("index"))
    peers = [host for host, _ in (servers if kind == _SERVER else workers)]
    own, (host, port) = peers[rank], workers[0]
    return Task(kind == _SERVER, rank, len(peers), len(workers), peers[:rank].count(own), peers.count(own), host, port)


def write(addresses: Sequence[str], rank: int) -> str:
    """The variable for worker `rank` of those at host:port."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": rank}})


def _parsed(text: str) -> dict[str, Any]:
    try:
        said = json.loads(text or "{}")
    except ValueError as error:
        raise _wrong(text, f"it must be JSON ({error})") from None
    if not isinstance(said, dict):
        raise _wrong(text, "it must be an object in JSON")
    return said


def _addresses(text: str, cluster: dict[str, Any], kind: str) -> list[str]:
    """A cluster lists addresses, or names each by its index."""
    said = cluster.get(kind) or []
    if isinstance(said, dict):
        said = [said[index] for index in sorted(said, key=str)]
    if not isinstance(said, list) or not all(isinstance(each, str) and each for each in said):
        raise _wrong(text, f"cluster.{kind} must be a list of addresses")
    return said


def _rank(text: str, cluster: dict[str, Any], kind: str, index: Any) -> int:
    count = len(_addresses(text, cluster, kind))
    number = int(index) if isinstance(index, str) and index.isdecimal() else index
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        raise _wrong(text, f"task.index is {index!r}, but cluster.{kind} has {count} addresses")
    before = _WORKERS[: _WORKERS.index(kind)] if kind in _WORKERS else ()
    return number + sum(len(_addresses(text, cluster, each)) for each in before)


def _split(text: str, address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return address.strip("[]"), _PORT
    if not port.isdecimal() or not host:
        raise _wrong(text, f"{address!r} is no host:port")
    return host.strip("[]"), int(port)


def _wrong(text: str, why: str) -> InvalidArgumentError:
    shown = text if len(text) <= 300 else text[:300] + "..."
    return InvalidArgumentError(f"TF_CONFIG is {shown!r}: {why}; unset it if this job does not use it")
