"""What takes longer of the manifests played: `make test-kubernetes` runs it."""

from __future__ import annotations

import pytest
from player import ROOT, SUMS, operations_of_servers, sums_of

pytestmark = pytest.mark.root

# Rank 1 stays away from the barrier.
WAITING = SUMS.replace("herring.shutdown()", "import time\nif herring.rank() == 1: time.sleep(300)\nherring.barrier()")

STEPS = SUMS.replace(
    "total =",
    """import time
for step in range(200):
    herring.allreduce(numpy.ones(100_000, numpy.float32), op="sum")
    print(f"step {step}", flush=True)
    time.sleep(0.05)
total =""",
)


@pytest.mark.parametrize("kind", ["jobset", "kubeflow", "volcano"])
def test_several_processes_in_a_pod_are_started_by_torchrun(played, kind):
    stage = played(kind, "--workers", "2", "--processes", "2", "--servers", "1", command=["python", "-c", SUMS])
    stage.wait({pod.role for pod in stage.pods}, 120)
    said = "".join(stage.log(index).read_text() for index in range(2))
    assert sums_of(said) == [f"{rank} of 4: 10" for rank in range(4)]
    assert "rank 0 of 4 workers on 2 hosts" in said
    (operations,) = operations_of_servers(stage, stage.pods[2].role)
    assert operations > 0


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
    options = ["--workers", "3", "--servers", "1", "--elastic", "-x", f"TMPDIR={tmp_path}", "-x", "PYTHONUNBUFFERED=1"]
    stage = played("jobset", *options, command=script)
    stage.wait({"workers", "rendezvous"}, 120)
    said = stage.text("workers")
    assert "workers now: 2" in said
    assert "workers now: 3" in said
    assert "with 3 workers" in said.rpartition("done: ")[2]
    assert sorted(stage.starts[:3]) == [1, 1, 2]


def test_a_lost_server_of_an_elastic_jobset_is_used_again(played):
    """Its container is started again and joins; without --elastic it would wait until the job ends."""
    stage = played("jobset", "--workers", "2", "--servers", "2", "--elastic", command=["python", "-c", STEPS])
    stage.until(lambda: "step 20" in stage.text("workers"), 60)
    stage.kill(2)
    stage.wait({"workers", "servers", "rendezvous"}, 120)
    assert sums_of(stage.text("workers")) == ["0 of 2: 3", "1 of 2: 3"]
    assert stage.starts == [1, 1, 2, 1, 1]
    assert [operations > 50 for operations in operations_of_servers(stage, "servers")] == [True, True]
