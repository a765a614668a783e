"""The helpers of tests/python serve here as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import emulated
import player


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    yield from emulated.made(5, tmp_path_factory.mktemp("hosts"))


@pytest.fixture
def played(hosts, tmp_path):
    """Starts what `herring kubernetes` prints; ends it after the test."""
    stages = []

    def start(kind: str, *options: str, command: list[str], late: bool = False) -> player.Stage:
        words = ["kubernetes", kind, "--name", "train", "--image", "image", *options, "--", *command]
        done = subprocess.run([sys.executable, "-m", "herring", *words], capture_output=True, text=True, check=True)
        pods = player.pods_of(list(yaml.safe_load_all(done.stdout)))
        assert len(pods) <= len(hosts.addresses)
        stage = player.Stage(pods, hosts, tmp_path)
        stages.append(stage)
        if not late:
            stage.publish()
        for index in range(len(pods)):
            stage.start(index)
        return stage

    yield start
    for stage in stages:
        stage.stop()
