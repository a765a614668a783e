"""What each host of a SageMaker training job runs, from recorded environments: pure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from surroundings import clean_environment
from test_detect import recorded

from herring import InvalidArgumentError, UnavailableError
from herring.sagemaker import _driver
from herring.sagemaker._plan import Options, plan, read_cluster, read_options, worker_command

GROUPS = Options(server_group="servers")


def planned(env, options, secret="s", command=("train",)):
    return plan(env, read_cluster(env, "", options.server_group), options, secret, "python", command)


def test_workers_are_counted_without_the_servers_though_algo_1_serves():
    (start,) = planned(recorded("sagemaker_groups"), GROUPS)
    assert (start.name, start.arguments) == ("rank 1", ["train"])
    assert {name: value for name, value in start.environment.items() if not name.startswith(("FI_", "RDMAV"))} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "algo-3",
        "MASTER_PORT": "29500",
        "HERRING_HUB": "algo-3:29400",
        "HERRING_SERVERS": "2",
        "HERRING_SECRET": "s",
        "PYTHONUNBUFFERED": "1",
    }


def test_a_host_of_the_server_group_serves():
    (start,) = planned(recorded("sagemaker_groups_server"), GROUPS)
    assert start.name == "server 1"
    assert start.arguments == ["python", "-m", "herring", "server", "--rank", "1"]
    assert (start.environment["HERRING_HUB"], start.environment["HERRING_SERVERS"]) == ("algo-3:29400", "2")
    assert "RANK" not in start.environment


def test_hosts_are_sorted_by_number_and_each_runs_its_processes():
    """As text algo-10 comes before algo-2."""
    starts = planned(recorded("sagemaker"), Options(process_count_per_node=2))
    assert [start.name for start in starts] == ["rank 18", "rank 19"]
    assert [start.environment["LOCAL_RANK"] for start in starts] == ["0", "1"]
    assert {start.environment["WORLD_SIZE"] for start in starts} == {"22"}
    assert {start.environment["HERRING_SERVERS"] for start in starts} == {"0"}


def test_as_many_processes_as_gpus_unless_it_is_said():
    assert len(planned(recorded("sagemaker", SM_NUM_GPUS="8"), Options())) == 8
    assert len(planned(recorded("sagemaker", SM_NUM_GPUS="0"), Options())) == 1
    assert len(planned(recorded("sagemaker", SM_NUM_GPUS="0", SM_NUM_NEURONS="4"), Options())) == 4


def test_bad_numbers_and_hosts_are_named():
    for value in ("-3", "many"):
        with pytest.raises(InvalidArgumentError, match=f"SM_NUM_GPUS is '{value}'"):
            planned(recorded("sagemaker", SM_NUM_GPUS=value), Options())
    with pytest.raises(InvalidArgumentError, match=r"this host is 'algo-2' of algo-1: SM_CURRENT_HOST must be"):
        read_cluster({"SM_CURRENT_HOST": "algo-2", "SM_HOSTS": '["algo-1"]'}, "", None)
    with pytest.raises(InvalidArgumentError, match="hosts are algo-12; it must be a list of names"):
        read_cluster({}, '{"current_host": "algo-1", "hosts": "algo-12"}', None)
    with pytest.raises(
        InvalidArgumentError,
        match=r"^nothing names this host and the job's hosts .*resourceconfig\.json.*SM_HOSTS.*training job",
    ):
        read_cluster({}, "", None)
    with pytest.raises(InvalidArgumentError, match=r"^nothing names the job's hosts .*training job"):
        read_cluster({"SM_CURRENT_HOST": "algo-1"}, "", None)


def test_the_file_serves_where_no_sdk_has_set_variables():
    text = recorded("sagemaker_groups")["SM_RESOURCE_CONFIG"]
    cluster = read_cluster({}, text, "servers")
    assert (cluster.here, cluster.workers, cluster.servers) == ("algo-4", ["algo-3", "algo-4"], ["algo-1", "algo-2"])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ml.p4d.24xlarge", {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}),
        ("ml.p5en.48xlarge", {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "RDMAV_FORK_SAFE": "1"}),
        ("ml.g5.48xlarge", {"FI_PROVIDER": "efa"}),
        ("ml.g5.2xlarge", {}),
        ("ml.c6in.32xlarge", {}),
    ],
)
def test_efa_is_switched_on_by_instance_type(kind, expected):
    config = json.dumps({"current_host": "algo-1", "hosts": ["algo-1"], "current_instance_type": kind})
    env = {"SM_RESOURCE_CONFIG": config, "SM_NETWORK_INTERFACE_NAME": "eth0"}
    (start,) = planned(env, Options())
    names = ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "RDMAV_FORK_SAFE", "HERRING_INTERFACE")
    assert {name: start.environment[name] for name in names if name in start.environment} == expected
    assert start.environment["NCCL_SOCKET_IFNAME"] == "eth0"


def test_what_the_user_has_set_stays():
    env = recorded("sagemaker_groups", FI_PROVIDER="tcp")
    (start,) = planned(env, GROUPS)
    assert "FI_PROVIDER" not in start.environment
    assert start.environment["FI_EFA_USE_DEVICE_RDMA"] == "1"


def test_hyperparameters_are_arguments_as_with_sagemakers_own_drivers():
    env = {"SM_ENTRY_SCRIPT": "train.py", "SM_HPS": '{"lr": 0.1, "name": "a b", "layers": [1, 2], "flag": true}'}
    arguments = ["--lr", "0.1", "--name", "a b", "--layers", "[1, 2]", "--flag", "true"]
    assert worker_command(env, "python") == ["python", "train.py", *arguments]
    assert worker_command({"SM_ENTRY_SCRIPT": "train.sh"}, "python") == ["/bin/bash", "train.sh"]


def test_the_secret_is_in_no_command_line():
    for name in ("sagemaker_groups", "sagemaker_groups_server"):
        for start in planned(recorded(name), GROUPS, secret="hush"):
            assert start.environment["HERRING_SECRET"] == "hush"
            assert "hush" not in " ".join(start.arguments)


def test_options_come_from_what_the_sdk_has_written():
    config = '{"process_count_per_node": 8, "server_group": "servers", "secret_arn": "arn"}'
    assert read_options({"SM_DISTRIBUTED_CONFIG": config}) == Options("servers", 8, "arn")
    assert read_options({}) == Options()


@pytest.mark.parametrize(
    ("name", "changes", "options", "words"),
    [
        (
            "sagemaker_groups",
            {},
            Options("cpus"),
            "server_group is 'cpus', but the job's instance groups are: servers, w",
        ),
        ("sagemaker", {}, Options("servers"), "instance groups are: none"),
        ("sagemaker_groups", {}, Options(), "2 instance groups train.*process_count_per_node, or server_group"),
        ("sagemaker", {}, Options(process_count_per_node=0), "process_count_per_node is 0"),
        ("sagemaker", {"SM_CURRENT_HOST": "algo-12"}, Options(), "this host is 'algo-12' of algo-1, "),
        ("sagemaker", {"SM_HOSTS": "algo-1"}, Options(), "SM_HOSTS is 'algo-1', which is not JSON"),
        ("nothing", {}, Options(), "Is this a SageMaker training job"),
        ("nothing", {"SM_RESOURCE_CONFIG": "[]"}, Options(), "must be an object"),
    ],
)
def test_what_cannot_be_is_a_sentence(name, changes, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        planned(recorded(name, **changes), options)


def test_a_server_group_with_all_hosts_is_refused():
    groups = [{"instance_group_name": "servers", "hosts": ["algo-1"]}]
    config = json.dumps({"current_host": "algo-1", "hosts": ["algo-1"], "instance_groups": groups})
    with pytest.raises(InvalidArgumentError, match="no host is left to train"):
        planned({"SM_RESOURCE_CONFIG": config}, GROUPS)


def test_a_script_that_is_none_is_refused():
    with pytest.raises(InvalidArgumentError, match="entry_script"):
        worker_command({}, "python")


def test_one_host_runs_its_ranks_and_its_exit_status_is_theirs(tmp_path):
    """Through the door: python -m herring.sagemaker."""
    config = json.dumps({"current_host": "localhost", "hosts": ["localhost"], "network_interface_name": "lo"})
    env = {**clean_environment(), "SM_RESOURCE_CONFIG": config}
    program = (
        "import numpy, herring\nherring.init()\ntotal = herring.allreduce(numpy.ones(10, numpy.float32), op='sum')[0]\n"
        "print('sum', total, flush=True)\nherring.shutdown()\nraise SystemExit(7 * (herring.__name__ == 'WHICH'))"
    )
    for which, status in (("no", 0), ("herring", 7)):
        code = program.replace("WHICH", which)
        command = [sys.executable, "-m", "herring.sagemaker", "--processes", "2", "--", sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == status, done.stderr
        assert done.stdout.splitlines() == ["sum 2.0", "sum 2.0"]
        assert "localhost runs rank 0, rank 1; workers on localhost, servers inside the workers" in done.stderr
        assert ("ended with exit status 7" in done.stderr) == (status == 7)


def test_without_boto3_the_secret_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UnavailableError, match="pip install boto3"):
        _driver.read_secret("arn:aws:secretsmanager:eu-west-1:1:secret:a")


def test_without_the_sdk_the_class_is_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "sagemaker.train.distributed", None)
    monkeypatch.delitem(sys.modules, "herring.sagemaker._config", raising=False)
    import herring.sagemaker

    with pytest.raises(UnavailableError, match="pip install 'sagemaker>=3'"):
        _ = herring.sagemaker.Herring
