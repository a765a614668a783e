"""The manifests played: every pod's command, with exactly its environment, on an emulated host. Real jobs end well.

What is real: the commands, the environment, names that are known late, processes, network, training. What is not: the
controllers, scheduling, the network of a cluster (tests/kubernetes/player.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import emulated
import player
import pytest
import yaml

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ["python", str(ROOT / "examples" / "train_digits.py"), "--backend", "herring", "--steps", "30"]
SUMS = """
import numpy, herring
herring.init()
total = float(herring.allreduce(numpy.full(100_000, herring.rank() + 1.0, numpy.float32), op="sum")[-1])
print(f"{herring.rank()} of {herring.size()}: {total:g}", flush=True)
herring.shutdown()
"""
# Rank 1 stays away from the barrier.
WAITING = SUMS.replace("herring.shutdown()", "import time\nif herring.rank() == 1: time.sleep(300)\nherring.barrier()")


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


def sums_of(text: str) -> list[str]:
    return sorted(re.findall(r"^[0-9] of [0-9]: [0-9]+$", text, re.MULTILINE))


def operations_of_servers(stage: player.Stage, role: str) -> list[int]:
    """What each has worked off, as it says when it ends."""
    return [int(number) for number in re.findall(r"herring server [0-9]: ([0-9]+) operations", stage.text(role))]


def test_a_jobset_trains_a_model_though_names_are_known_late(played):
    """Three workers and two servers. The first pods ask for worker 0's name before it is there."""
    stage = played("jobset", "--workers", "3", "--servers", "2", command=DIGITS, late=True)
    stage.until(lambda: "cannot be retrieved (gai error" in stage.text("workers"), 60)  # torch has asked.
    stage.publish()
    stage.wait({"workers", "servers"}, 150)
    said = stage.text("workers")
    assert re.search(r"rank 0 of 3 workers on 3 hosts \(.*\), 2 server processes: .* through 2 servers", said), said
    accuracy = float(said.rpartition("accuracy ")[2].split()[0])
    assert accuracy > 0.6, said
    assert [operations > 30 for operations in operations_of_servers(stage, "servers")] == [True, True]
    assert stage.starts == [1] * 5


@pytest.mark.parametrize(
    ("kind", "workers", "servers", "source"),
    [
        ("kubeflow", "node", "servers", "PET_NODE_RANK and PET_NNODES"),
        ("volcano", "worker", "server", "VC_TASK_INDEX and WORLD_SIZE"),
        ("jobset", "workers", "servers", "JOB_COMPLETION_INDEX and WORLD_SIZE"),
    ],
)
def test_ranks_and_servers_of_each_kind(played, kind, workers, servers, source):
    stage = played(kind, "--workers", "3", "--servers", "2", command=["python", "-c", SUMS])
    stage.wait({workers, servers}, 90)
    assert sums_of(stage.text(workers)) == [f"{rank} of 3: 6" for rank in range(3)]
    assert f"({source}), 2 server processes" in stage.text(workers)
    assert [operations > 0 for operations in operations_of_servers(stage, servers)] == [True, True]


@pytest.mark.parametrize("kind", ["jobset", "kubeflow", "volcano"])
def test_several_processes_in_a_pod_are_started_by_torchrun(played, kind):
    stage = played(kind, "--workers", "2", "--processes", "2", "--servers", "1", command=["python", "-c", SUMS])
    stage.wait({pod.role for pod in stage.pods}, 120)
    said = "".join(stage.log(index).read_text() for index in range(2))
    assert sums_of(said) == [f"{rank} of 4: 10" for rank in range(4)]
    assert "rank 0 of 4 workers on 2 hosts" in said
    (operations,) = operations_of_servers(stage, stage.pods[2].role)
    assert operations > 0


def test_without_servers_nothing_else_runs(played):
    stage = played("jobset", "--workers", "2", command=["python", "-c", SUMS])
    assert {pod.role for pod in stage.pods} == {"workers"}
    stage.wait({"workers"}, 60)
    assert len(sums_of(stage.text("workers"))) == 2


def test_a_lost_worker_fails_the_others_and_the_server_comes_back(played):
    """JobSet then starts all pods again."""
    stage = played("jobset", "--workers", "2", "--servers", "1", command=["python", "-c", WAITING])
    stage.until(lambda: len(sums_of(stage.text("workers"))) == 2, 60)
    stage.kill(1)
    stage.until(lambda: stage.running[0] is None and stage.running[1] is None, 30)
    assert stage.codes[0] != 0
    assert "worker 1" in stage.log(0).read_text()
    stage.until(lambda: stage.starts[2] == 2, 30)


def test_an_elastic_jobset_goes_on_and_takes_the_lost_worker_back(played, tmp_path):
    """Rank 1 kills itself in step 40; its pod's container is started again and comes in at a step's end."""
    script = ["python", str(ROOT / "examples" / "elastic_train.py"), "--steps", "3000"]
    options = ["--workers", "3", "--servers", "1", "--elastic", "-x", f"TMPDIR={tmp_path}"]
    stage = played("jobset", *options, command=script)
    stage.wait({"workers", "rendezvous"}, 120)
    said = stage.text("workers")
    assert "now 2 workers" in said
    assert "now 3 workers" in said
    assert "with 3 workers" in said.rpartition("done: ")[2]
    assert sorted(stage.starts[:3]) == [1, 1, 2]
