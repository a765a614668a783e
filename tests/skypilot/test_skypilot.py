"""examples/skypilot/train.yaml: SkyPilot's own schema takes it, and its lines start one job on two nodes."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TASK = yaml.safe_load((ROOT / "examples" / "skypilot" / "train.yaml").read_text())


def free_ports(count: int) -> list[int]:
    """Below those that the system gives to connections: such a port could be taken before the job listens on it."""
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.sample(range(20_000, 32_000), 1000):
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")


def test_two_nodes_that_run_its_lines_are_one_job(tmp_path):
    """Every node runs the same lines; SkyPilot's variables say which one it is."""
    pytest.importorskip("torch", reason="torch is not installed")
    hub, master = free_ports(2)
    lines = TASK["run"].rstrip().replace(":29400", f":{hub}").replace("29500", str(master)) + " --steps 5"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HERRING_", "SKYPILOT_"))}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    kept.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HERRING_SECRET="of this test")
    told = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    outputs = [tmp_path / f"node{rank}" for rank in range(2)]
    nodes = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            command = ["bash", "-euo", "pipefail", "-c", lines]
            env = {**kept, **told, "SKYPILOT_NODE_RANK": str(rank)}
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + 200
    try:
        for node in nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(timeout=max(deadline - time.monotonic(), 0.1))
    finally:
        codes = [node.poll() for node in nodes]
        for node in nodes:
            node.kill()
            node.wait()
    said = [output.read_text() for output in outputs]
    assert codes == [0, 0], said
    assert "rank 0 of 2 workers" in said[0]
