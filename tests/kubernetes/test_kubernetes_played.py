"""The manifests played: every pod's command, with exactly its environment, on an emulated host. Real jobs end well.

What is real: the commands, the environment, names that are known late, processes, network, training. What is not: the
controllers, scheduling, the network of a cluster (tests/kubernetes/player.py).
"""

from __future__ import annotations

import re

import pytest
from player import ROOT, SUMS, operations_of_servers, sums_of

pytestmark = pytest.mark.root

DIGITS = ["python", str(ROOT / "examples" / "train_digits.py"), "--backend", "herring", "--steps", "30"]


def test_a_jobset_trains_a_model_though_names_are_known_late(played):
    """Three workers and two servers. The first pods ask for worker 0's name before it is there."""
    stage = played("jobset", "--workers", "3", "--servers", "2", command=DIGITS, late=True)
    stage.until(lambda: "cannot be retrieved (gai error" in stage.text("workers"), 60)  # torch has asked.
    stage.publish()
    stage.wait({"workers", "servers"}, 150)
    said = stage.text("workers")
    assert re.search(r"rank 0 of 3 workers on 3 hosts \(.*\), 2 server processes: .* 5 servers \(3 embedded", said), (
        said
    )
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


def test_without_servers_nothing_else_runs(played):
    stage = played("jobset", "--workers", "2", command=["python", "-c", SUMS])
    assert {pod.role for pod in stage.pods} == {"workers"}
    stage.wait({"workers"}, 60)
    assert len(sums_of(stage.text("workers"))) == 2
