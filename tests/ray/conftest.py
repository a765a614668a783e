"""One Ray cluster of this machine for each file, and what may be left of it."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
CPUS = 5


@pytest.fixture(scope="module", autouse=True)
def cluster():
    import ray

    # Ray's own 15 lets its workers starve beside anything else that runs.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        num_cpus=CPUS,
        include_dashboard=False,
        object_store_memory=80 << 20,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"HERRING_JOIN_TIMEOUT_S": "60"}},
    )
    yield
    ray.shutdown()


def processes_of(actor: str) -> list[str]:
    """Titles of this cluster's processes of such an actor."""
    titles = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            title = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        # Only a process under this cluster: another one may run on this machine.
        if re.match(f"ray::{actor}", title) and _descends(int(pid), os.getpid()):
            titles.append(title)
    return titles


def _descends(pid: int, from_pid: int) -> bool:
    while pid > 1:
        if pid == from_pid:
            return True
        try:
            pid = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def places_held() -> list[str]:
    """States of the servers' placement groups that are not given back."""
    import ray

    groups = ray.util.placement_group_table().values()
    return [each["state"] for each in groups if each["name"] == "herring-servers" and each["state"] != "REMOVED"]


def assert_nothing_is_left() -> None:
    """No server, no rendezvous, and what was reserved for servers is given back."""
    deadline = time.monotonic() + 30
    while left := [*processes_of("Herring"), *places_held()]:
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.2)
