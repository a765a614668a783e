"""examples/skypilot/train.yaml: SkyPilot's own schema takes it, and its lines start one job on two nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TASK = yaml.safe_load((ROOT / "examples" / "skypilot" / "train.yaml").read_text())


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def test_two_nodes_that_run_its_lines_are_one_job():
    """Every node runs the same lines; SkyPilot's variables say which one it is."""
    pytest.importorskip("torch", reason="torch is not installed")
    hub, master = free_ports(2)
    lines = TASK["run"].rstrip().replace(":29400", f":{hub}").replace("29500", str(master)) + " --steps 5"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HERRING_", "SKYPILOT_"))}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    kept.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HERRING_SECRET="of this test")
    told = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    nodes = [
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", lines],
            cwd=ROOT,
            env={**kept, **told, "SKYPILOT_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [node.communicate(timeout=200)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "rank 0 of 2 workers" in said[0]
