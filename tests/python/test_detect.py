"""Each launcher's environment, as it was recorded, says who this process is; none of them is a silent job of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from herring import InvalidArgumentError
from herring._detect import Detected, Master, detect
from herring._slurm import first_host, hosts_of, tasks_on

FOLDER = Path(__file__).with_name("environments")


def recorded(name: str, **changes: str | None) -> dict[str, str]:
    lines = (FOLDER / f"{name}.env").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    for key, value in changes.items():
        env.pop(key, None)
        if value is not None:
            env[key] = value
    return env


def place(found: Detected) -> tuple[int | None, ...]:
    return found.rank, found.size, found.local_rank, found.local_size


@pytest.mark.parametrize(
    ("name", "expected", "hub"),
    [
        ("torchrun", (1, 2, 1, 2), Master("localhost", 37643)),
        ("herringrun", (1, 2, 1, 2), Master("127.0.0.1", 43065)),
        ("openmpi", (1, 2, 1, 2), None),
        ("mpich", (1, 2, 1, 2), None),
        ("srun", (3, 4, 0, 1), Master("w0", 20001)),
        ("srun_pmi2", (1, 2, 0, 1), Master("w0", 20003)),
        ("srun_het_workers", (3, 4, 0, 1), Master("w0", 20006)),
        ("srun_one", (0, 1, 0, 1), Master("w0", 20006)),
        ("pytorchjob", (2, 4, None, None), Master("train-master-0", 23456)),
        ("kubeflow_trainer", (3, 4, 0, 1), Master("train-node-0-0.train", 29400)),
        ("jobset", (2, 4, None, None), Master("train-workers-0-0.train", 29500)),
        ("ray", (2, 4, 0, 2), Master("10.0.0.1", 41235)),
        ("sagemaker", (9, 11, 0, 1), Master("algo-1", 29500)),
        ("sagemaker_groups", (1, 2, 0, 1), Master("algo-3", 29500)),
        ("tfjob", (2, 3, 0, 1), Master("train-chief-0.ns.svc", 2222)),
        ("by_hand", (1, 2, 0, 1), Master("10.0.0.1", 29500)),
        ("nothing", (0, 1, 0, 1), None),
        ("sbatch", (0, 1, 0, 1), None),
        ("salloc", (0, 1, 0, 1), None),
        ("sbatch_in_step", (0, 1, 0, 1), None),
    ],
)
def test_a_workers_place(name: str, expected: tuple[int | None, ...], hub: Master | None) -> None:
    found = detect(recorded(name))
    assert found.role == "worker"
    assert place(found) == expected
    assert found.hub == hub


@pytest.mark.parametrize(
    ("name", "rank", "workers", "peers", "hub"),
    [
        ("srun_het_servers", 1, 4, 2, Master("w0", 20006)),
        ("kubeflow_trainer_server", 1, 4, None, Master("train-node-0-0.train", 29400)),
        ("volcano_server", 1, 4, None, Master("train-master-0.train", 23456)),
        ("sagemaker_groups_server", 1, None, 2, Master("algo-3", 29500)),  # A host may have several workers.
        ("tfjob_server", 1, 2, 2, Master("train-worker-0.ns.svc", 2222)),
        ("by_hand_server", None, 2, None, Master("10.0.0.1", 29500)),
        ("openmpi", 1, None, 2, None),
        ("mpich", 1, None, 2, None),
        ("srun", 3, None, 4, None),
        ("nothing", None, None, None, None),
    ],
)
def test_a_servers_place(name: str, rank: int, workers: int, peers: int, hub: Master | None) -> None:
    found = detect(recorded(name), "server")
    assert (found.role, found.rank, found.size, found.peers, found.hub) == ("server", rank, workers, peers, hub)


def test_workers_and_servers_of_a_heterogeneous_job_meet_at_one_place() -> None:
    """Two steps: their numbers differ, and the servers' own hosts are others."""
    assert detect(recorded("srun_het_workers")).hub == detect(recorded("srun_het_servers"), "server").hub


def test_two_steps_of_one_allocation_meet_at_two_places() -> None:
    one, other = (detect(recorded("srun", SLURM_STEP_ID=step)).hub for step in ("0", "1"))
    assert one != other


def test_tasks_of_one_host_need_no_name_of_it() -> None:
    env = recorded("srun", SLURM_STEP_NODELIST="w0", SLURM_STEP_TASKS_PER_NODE="4", SLURM_NODEID="0", SLURM_LOCALID="3")
    assert detect(env).hub == Master("127.0.0.1", 20001)


@pytest.mark.parametrize("name", ["sbatch", "salloc"])
def test_a_batch_script_itself_is_a_job_of_one_and_says_so(name: str) -> None:
    found = detect(recorded(name))
    assert not found.is_launched
    assert "4 tasks" in found.note
    assert "start with srun" in found.note


@pytest.mark.parametrize("tasks", ["1", "4"])
def test_a_batch_script_does_not_take_its_submitters_step_for_its_own(tasks: str) -> None:
    """It inherits SLURM_STEP_*: it would wait for three tasks that are none of its job."""
    assert not detect(recorded("sbatch_in_step", SLURM_NTASKS=tasks)).is_launched


def test_a_pods_index_alone_is_a_job_of_one_and_says_so() -> None:
    """Indexed jobs are also used for many trainings that have nothing to do with each other."""
    assert "set WORLD_SIZE" in detect({"JOB_COMPLETION_INDEX": "3"}).note


def test_nothing_in_sight_has_nothing_to_say() -> None:
    assert detect({}).note == ""
    assert detect(recorded("srun_one")).note == ""


def test_a_batch_scripts_variables_do_not_hide_torchrun_in_it() -> None:
    found = detect({**recorded("sbatch"), **recorded("torchrun")})
    assert place(found) == (1, 2, 1, 2)


@pytest.mark.parametrize("name", ["torchrun", "herringrun", "openmpi", "mpich"])
def test_a_launcher_under_srun_counts_and_not_srun(name: str) -> None:
    """mpirun and torchrun start their helpers by srun: the tasks that it counts are these."""
    found = detect({**recorded("srun"), **recorded(name)})
    assert place(found) == (1, 2, 1, 2)
    assert "SLURM" not in found.source


def test_slurm_counts_where_its_pmi_is_on() -> None:
    """Under srun --mpi=pmix or pmi2 the MPI library may understand neither: every task would be alone."""
    assert "SLURM" in detect(recorded("srun_pmi2")).source
    assert "SLURM" in detect(recorded("srun", PMIX_RANK="3")).source


def test_pmix_alone_leaves_the_size_to_mpi() -> None:
    found = detect({"PMIX_RANK": "1"})
    assert (found.rank, found.size, found.is_mpi) == (1, None, True)


def tf_config(kind: str | None, index: object, **cluster: object) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_tensorflows_cluster_on_one_host_and_others() -> None:
    workers = ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.1:2223", "[::1]:2222"]
    found = detect(tf_config("worker", 2, worker=workers))
    assert (place(found), found.source) == ((2, 4, 1, 2), "TF_CONFIG")
    assert place(detect(tf_config("worker", 3, worker=workers))) == (3, 4, 0, 1)
    assert place(detect(tf_config("worker", 0, worker=["b:1"], chief=["a:1"]))) == (1, 2, 0, 1)
    assert detect(tf_config("chief", 0, worker=["b:1"], chief=["[::1]:7"])).hub == Master("::1", 7)
    assert detect(tf_config("master", "0", worker={"0": "b"}, master={"0": "a"})).hub == Master("a", 2222)


@pytest.mark.parametrize(
    "env",
    [
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"environment": "cloud"}'},
        tf_config("chief", 0, chief=["a:1"]),
        tf_config("evaluator", 0, chief=["a:1"], worker=["b:1"]),
    ],
)
def test_tensorflows_job_of_one(env: dict[str, str]) -> None:
    assert not detect(env).is_launched


def test_other_launchers_count_before_tf_config() -> None:
    config = tf_config("worker", 0, worker=["a:1", "b:1", "c:1"])
    for name in ("torchrun", "openmpi", "mpich"):
        assert place(detect({**recorded(name), **config})) == (1, 2, 1, 2)


@pytest.mark.parametrize("name", ["srun_het_both", "srun_colon"])
def test_a_step_of_several_components_says_what_to_do(name: str) -> None:
    """Its list of hosts is sorted by name: s0 would be taken for task 0's host, which is w0."""
    found = detect(recorded(name))
    assert found.hub is None
    assert found.local_size is None
    assert "--het-group" in found.no_hub
    assert "MASTER_ADDR" in found.no_hub
    told = detect(recorded(name, MASTER_ADDR="w0", MASTER_PORT="29500"))
    assert (told.hub, told.no_hub) == (Master("w0", 29500), "")


@pytest.mark.parametrize("change", [{"SLURM_DISTRIBUTION": "arbitrary"}, {"SLURM_PROCID": "0"}])
def test_where_task_0_may_be_elsewhere_the_first_host_is_not_taken(change: dict[str, str]) -> None:
    """Recorded on w1: were it task 0, the list's first host would be wrong."""
    found = detect(recorded("srun", **change))
    assert found.hub is None
    assert "MASTER_ADDR" in found.no_hub


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (recorded("srun_pty"), ["--pty", "RANK=0 WORLD_SIZE=1"]),
        (recorded("srun", WORLD_SIZE="8"), ["WORLD_SIZE is 8", "4 workers", "set RANK"]),
        (recorded("openmpi", WORLD_SIZE="8"), ["WORLD_SIZE is 8", "2 workers"]),
        (recorded("srun", SLURM_STEP_NUM_TASKS=None, SLURM_NTASKS=None), ["SLURM_NTASKS", "srun"]),
        (recorded("srun", SLURM_STEP_NODELIST="w[0-"), ["w[0-"]),
        (recorded("srun", SLURM_PROCID="one"), ["SLURM_PROCID is 'one'"]),
        (recorded("srun", SLURM_PROCID="9"), ["rank is 9 of 4"]),
        (recorded("kubeflow_trainer", PET_NPROC_PER_NODE="8"), ["torchrun"]),
        (recorded("kubeflow_trainer", PET_NPROC_PER_NODE="auto"), ["torchrun"]),
        (recorded("kubeflow_trainer", PET_NNODES="1:4"), ["torchrun"]),
        (recorded("sagemaker", SM_HOSTS="algo-1"), ["SM_HOSTS", "JSON"]),
        (recorded("sagemaker", SM_CURRENT_HOST="algo-12"), ["algo-12"]),
        ({"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}, ["SKYPILOT_NUM_NODES is 2", "torchrun"]),
        ({"JOB_COMPLETION_INDEX": "4", "WORLD_SIZE": "4"}, ["rank is 4 of 4"]),
        ({"WORLD_SIZE": "4"}, ["RANK is not set"]),
        ({"TF_CONFIG": "worker 1"}, ["TF_CONFIG is 'worker 1'", "JSON", "unset it"]),
        ({"TF_CONFIG": "[]"}, ["TF_CONFIG is '[]'", "object"]),
        ({"TF_CONFIG": '{"cluster": [1]}'}, ["must be objects"]),
        (tf_config("worker", 2, worker=["a:1", "b:1"]), ["task.index is 2", "2 addresses"]),
        (tf_config("worker", True, worker=["a:1", "b:1"]), ["task.index is True"]),
        (tf_config("worker", None, worker=["a:1", "b:1"]), ["task.index is None"]),
        (tf_config("gardener", 0, worker=["a:1", "b:1"]), ["'gardener'", "chief"]),
        (tf_config(None, 0, worker=["a:1", "b:1"]), ["task.type is None"]),
        (tf_config("worker", 0, worker="a:1"), ["cluster.worker", "list"]),
        (tf_config("worker", 0, worker=["a:1", 7]), ["cluster.worker", "list"]),
        (tf_config("worker", 0, worker=["a:x", "b:1"]), ["'a:x' is no host:port"]),
        (tf_config("ps", 0, worker=["a:1"], ps=["b:1"]), ["parameter server", "herring server"]),
        ({**tf_config("worker", 0, worker=["a:1", "b:1"]), "WORLD_SIZE": "4"}, ["WORLD_SIZE is 4", "2 workers"]),
    ],
)
def test_what_cannot_be_says_what_to_do(env: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        detect(env)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_server_in_one_mpi_world_with_workers_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="a separate mpirun"):
        detect(recorded("openmpi_two_programs"), "server")


def test_a_third_group_of_hosts_is_refused() -> None:
    env = recorded("sagemaker_groups")
    more = '{"instance_group_name": "others", "hosts": ["algo-5"]}, {"instance_group_name": "workers"'
    env["SM_RESOURCE_CONFIG"] = env["SM_RESOURCE_CONFIG"].replace('{"instance_group_name": "workers"', more)
    with pytest.raises(InvalidArgumentError, match="3 instance groups"):
        detect(env)


def test_detect_reads_what_it_is_given_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert place(detect({})) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("w0", ["w0"]),
        ("w[0-1]", ["w0", "w1"]),
        ("s[0-1],w[0-1]", ["s0", "s1", "w0", "w1"]),
        ("n[08-10,3]-ib,x", ["n08-ib", "n09-ib", "n10-ib", "n3-ib", "x"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("gpu-a.example,gpu-b.example", ["gpu-a.example", "gpu-b.example"]),
        ("", []),
    ],
)
def test_a_hostlist_in_its_order(text: str, hosts: list[str]) -> None:
    assert hosts_of(text) == hosts


@pytest.mark.parametrize("text", ["w[0-", "w]0", "w[2-1]", "w[0-99999999999]", "w[a-b]", "w[]", "w[0,,1]"])
def test_a_bad_hostlist_is_an_error(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        hosts_of(text)


def test_an_empty_hostlist_has_no_first_host() -> None:
    with pytest.raises(InvalidArgumentError, match="names no host"):
        first_host("")


@pytest.mark.parametrize(
    ("node", "text", "tasks"),
    [(0, "3,1", 3), (1, "3,1", 1), (3, "1(x4)", 1), (2, "2(x2),5", 5), (4, "1(x4)", None), (0, "?", None)],
)
def test_the_tasks_of_a_host(node: int, text: str, tasks: int | None) -> None:
    assert tasks_on(node, text) == tasks
