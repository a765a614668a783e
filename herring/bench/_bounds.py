"""What times are held against: bus bandwidth as nccl-tests defines it, and the lower bound t*."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from herring._errors import InvalidArgumentError

# What benchmarks/emulate_cluster.py tells the processes that it starts. (Not HERRING_*: those are settings.)
CLUSTER_VARIABLE = "EMULATED_CLUSTER"


@dataclass(frozen=True)
class Links:
    """Who is joined by what: `worker_hosts` and, apart from them, `server_hosts`, each linked with `rate` bits/s in all
    both ways; `rate` is None where nobody said. `burst_bytes` pass at once after a pause (a token bucket's)."""

    worker_hosts: int
    server_hosts: int
    rate: float | None
    burst_bytes: int = 0


def algbw(size_bytes: int, seconds: float) -> float:
    """Bytes per second: S/t."""
    return size_bytes / seconds


def busbw(size_bytes: int, seconds: float, ranks: int) -> float:
    """Bytes per second: S/t x 2(n-1)/n, of an allreduce over n ranks (nccl-tests, doc/PERFORMANCE.md)."""
    return algbw(size_bytes, seconds) * 2 * (ranks - 1) / ranks


def link_share(worker_hosts: int, server_hosts: int) -> float:
    """Bytes that the busiest link must carry one way for an allreduce of one byte: t* B/S.

    n worker hosts and k dedicated server hosts: 2n(n-1)/(n^2 + kn - 2k), never below 1 where n > 1, because every
    worker host has to send and receive everything once (BytePS, OSDI'20; reached at k = n). 0 for a single host
    without servers: nothing has to leave it.
    """
    n, k = worker_hosts, min(server_hosts, worker_hosts)
    if n < 1 or k < 0:
        raise InvalidArgumentError(f"{n} worker hosts and {k} server hosts: at least 1 and 0 are needed")
    if n == 1:
        return 0.0
    return 2 * n * (n - 1) / (n * n + k * n - 2 * k)


def lower_bound(size_bytes: int, links: Links) -> float | None:
    """t* in seconds: what no allreduce of `size_bytes` per host can beat on these links. None where there is no rate,
    no link is used, or a link lets all of it pass in one burst."""
    share = link_share(links.worker_hosts, links.server_hosts)
    if links.rate is None or share == 0 or share * size_bytes <= links.burst_bytes:
        return None
    return share * size_bytes * 8 / links.rate


def emulated_cluster(environment: Mapping[str, str]) -> dict[str, object]:
    """What the emulated cluster says of itself; empty outside of one. Raises InvalidArgumentError for garbage."""
    text = environment.get(CLUSTER_VARIABLE, "")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{CLUSTER_VARIABLE} is not JSON ({error}): it is emulate_cluster.py's") from None
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"{CLUSTER_VARIABLE} is {text!r}; it must be a JSON object")
    return found
