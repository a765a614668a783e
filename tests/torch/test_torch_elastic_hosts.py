"""Elastic jobs with two ranks on each of two hosts: groups are left and given up and a worker dies while all work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import HERE, clean_environment

sys.path.insert(0, str(HERE.parent / "python"))

import emulated
import script_elastic_groups as script

pytestmark = pytest.mark.root
RANKS = 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[emulated.Hosts]:
    yield from emulated.made(2, tmp_path_factory.mktemp("hosts"))


def kinds_of(seed: int) -> list[str]:
    return [event.kind for event in script.events_of(seed, RANKS)]


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        pytest.param(12, [], id="embedded_servers"),
        pytest.param(2, ["--servers", "2"], id="server_processes"),
        pytest.param(5, ["-x", "HERRING_INTRA_NODE=off"], id="network_alone"),
    ],
)
def test_groups_end_alone_and_the_job_goes_on(hosts: emulated.Hosts, seed: int, options: list[str]) -> None:
    assert {"kill", "abort"} <= set(kinds_of(seed)), "a seed whose events are worth a test"
    settings = ["-x", "HERRING_INTERFACE=eth0", "-x", "HERRING_DEAD_AFTER_S=2", *options]
    environment = clean_environment()
    launch = ["--rsh", str(hosts.rsh), "-H", hosts.names(2, 2), "--elastic", "-x", "PYTHONPATH", *settings]
    program = [sys.executable, str(Path(script.__file__)), str(seed)]
    command = [sys.executable, "-m", "herring._launch", *launch, "--", *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    report = f"{script.events_of(seed, RANKS)}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, report
    assert done.stdout.count(f"all {script.STEPS} steps of seed {seed}") == RANKS - kinds_of(seed).count("kill"), report
