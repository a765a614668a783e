"""herringrun in a Slurm allocation: which nodes, how srun is called. Jobs of a real Slurm are in tests/slurm."""

from __future__ import annotations

import pytest

from herring import HerringError
from herring._launch._allocation import srun_of, task_of, without_task
from herring._launch._options import parse
from herring._launch._rsh import why_not
from herring._launch._where import where
from herring._slurm import allocation

BATCH = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "w[0-2]",
    "SLURM_TASKS_PER_NODE": "3,1(x2)",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURMD_NODENAME": "w0",
}
HET = {
    "SLURM_JOB_ID": "12",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "w[0-1]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "s[0-1]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1(x2)",
    "SLURM_JOB_NODELIST": "w[0-1]",
    "SLURM_PROCID": "0",
}


def found(env, *options: str):
    return where(parse([*options, "true"]), env)


def test_an_allocation_is_its_nodes_and_their_tasks():
    assert [(each.nodes, each.tasks) for each in allocation(BATCH)] == [(["w0", "w1", "w2"], [3, 1, 1])]
    assert [(each.nodes, each.tasks) for each in allocation(HET)] == [(["w0", "w1"], [2, 2]), (["s0", "s1"], [1, 1])]
    assert allocation({}) == []
    assert allocation({"SLURM_JOB_NODELIST": "w0"}) == []


def test_workers_are_the_jobs_tasks():
    here = found(BATCH)
    assert [(host.address, host.slots) for host in here.hosts] == [("w0", 3), ("w1", 1), ("w2", 1)]
    assert here.workers == [0, 0, 0, 1, 2]
    assert here.servers == []
    assert here.by_srun == {"w0": 0, "w1": 0, "w2": 0}
    assert found(BATCH, "-np", "2").workers == [0, 0]
    assert found(BATCH, "--slots-per-host", "2").workers == [0, 0, 1, 1, 2, 2]
    assert found(BATCH, "-np", "2", "--slots-per-host", "1").workers == [0, 1]
    with pytest.raises(HerringError, match=r"-np 6: the hosts have 5 slots \(w0:3, w1:1, w2:1\); ask Slurm for more"):
        found(BATCH, "-np", "6")
    with pytest.raises(HerringError, match=r"-np 6: the hosts have 2 slots \(w1:2\); name more hosts"):
        found(BATCH, "-np", "6", "-H", "w1:2")


def test_one_node_takes_any_number():
    alone = {**BATCH, "SLURM_JOB_NODELIST": "w0", "SLURM_TASKS_PER_NODE": "1"}
    assert found(alone, "-np", "4").workers == [0, 0, 0, 0]
    assert found(alone).workers == [0]


def test_servers_are_on_the_other_components_or_where_they_are_named():
    both = found(HET)
    assert ([host.address for host in both.hosts], both.workers, both.servers) == (
        ["w0", "w1", "s0", "s1"],
        [0, 0, 1, 1],
        [2, 3],
    )
    assert both.by_srun == {"w0": 0, "w1": 0, "s0": 1, "s1": 1}
    assert found(HET, "--servers", "1").servers == [2]
    named = found(BATCH, "--server-hosts", "w0,w2:2")
    assert ([host.address for host in named.hosts], named.workers, named.servers) == (
        ["w1", "w0", "w2"],
        [0],
        [1, 2, 2],
    )
    with pytest.raises(HerringError, match=r"c9 is not in this Slurm allocation \(w0, w1, w2\)"):
        found(BATCH, "--server-hosts", "c9")
    with pytest.raises(HerringError, match="no node of the Slurm allocation is left for workers"):
        found(BATCH, "--server-hosts", "w0,w1,w2")


def test_hosts_of_elsewhere_and_rsh_go_another_way():
    assert found(BATCH, "-H", "w1:2").by_srun == {"w0": 0, "w1": 0, "w2": 0}
    assert found(BATCH, "-H", "w1:2,elsewhere").by_srun == {}
    assert found(BATCH, "-H", "w1:2", "--rsh", "ssh").by_srun == {}
    assert found(BATCH, "-np", "2", "--rsh", "ssh") is None
    assert found({}, "-np", "2") is None


def test_herringrun_is_started_once():
    """Each of several would start the whole job."""
    step = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "w[0-2]"}
    with pytest.raises(HerringError, match=r"srun has started herringrun 5 times: start it once"):
        found(step)
    assert found(step, "-np", "2") is None
    assert found({**step, "SLURM_STEP_NUM_TASKS": "1"}).workers == [0, 0, 0, 1, 2]


def test_srun_gets_its_options_from_herringrun_alone():
    """SLURM_NTASKS and its like would be options; the secret is nobody's but the processes'."""
    env = {
        **HET,
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_NTASKS": "4",
        "SRUN_CPUS_PER_TASK": "2",
        "SLURM_MEM_PER_CPU": "10",
        "HERRING_SECRET": "abc",
    }
    shell = srun_of(found(HET).by_srun, env)
    kept = set(shell.environment)
    assert {"PATH", "SLURM_CONF", "SLURM_JOB_ID", "SLURM_HET_SIZE"} <= kept
    assert not kept & {"SLURM_NTASKS", "SRUN_CPUS_PER_TASK", "SLURM_MEM_PER_CPU", "HERRING_SECRET", "SLURM_PROCID"}
    line = shell.command_line("s1", "exec agent")
    assert line[0] == shell.name == "srun"
    assert line[-5:] == ["--het-group=1", "--nodelist=s1", "sh", "-c", "exec agent"]
    assert not any("het-group" in word for word in srun_of({"w0": 0}, BATCH).command_line("w0", "x"))


def test_a_rank_finds_itself_as_a_task():
    env = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "12", "A": "b"}
    assert without_task(env, {}) == {"SLURM_JOB_ID": "12", "A": "b"}
    assert without_task(env, {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == "0"
    assert task_of(3, 8, 1, 2)["SLURM_PROCID"] == "3"
    assert task_of(3, 8, 1, 2)["SLURM_NTASKS"] == "8"


def test_what_srun_says_where_nothing_is_wrong_is_not_shown():
    """A cluster without task/affinity has this line for each node of each job; it would hide what matters."""
    line = "srun: cluster configuration lacks support for cpu binding"
    shell = srun_of({"w0": 0}, BATCH)
    assert line in shell.noise
    assert why_not("w0", shell, "/py", 1, f"srun: error: no such node\n{line}\n").endswith(
        "(srun: error: no such node)"
    )
