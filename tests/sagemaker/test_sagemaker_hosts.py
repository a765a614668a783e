"""A training job on four emulated hosts, algo-1 to algo-4, each with an /opt/ml of its own: `make test-sagemaker`.

Real are SageMaker's SDK (the class that it takes, the scripts that it writes and that every host runs), boto3, the
driver, the servers and the workers. Not SageMaker: the service, its containers, its network. Secrets Manager is a
small HTTP server here, which boto3 is sent to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import emulated
import pytest
import sagemaker.core.utils.install_requirements as install_requirements
from sagemaker.core.training.configs import SourceCode
from sagemaker.train.constants import SM_DRIVERS_LOCAL_PATH
from sagemaker.train.model_trainer import ModelTrainer

import herring
from herring.sagemaker import Herring

pytestmark = pytest.mark.root

ARN = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:herring-AbCdEf"
SECRET = "a secret that only the manager knows"
GROUPS = {"servers": ["algo-1", "algo-2"], "workers": ["algo-4", "algo-3"]}
TRAIN = """
import os, sys, numpy, herring
herring.init()
total = float(herring.allreduce(numpy.full(100_000, herring.rank() + 1.0, numpy.float32), op="sum")[-1])
known = os.environ["HERRING_SECRET"] == %r
print(f"{herring.rank()} of {herring.size()}: {total:g} {known} {sys.argv[1:]}", flush=True)
herring.shutdown()
sys.exit(int(sys.argv[2]) if herring.__name__ and os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    yield from emulated.made(4, tmp_path_factory.mktemp("hosts"))


class Manager(BaseHTTPRequestHandler):
    """Answers GetSecretValue as Secrets Manager does."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.headers["X-Amz-Target"] == "secretsmanager.GetSecretValue" and asked == {"SecretId": ARN}
        body = (
            {"ARN": ARN, "Name": "herring", "SecretString": SECRET + "\n"}
            if known
            else {"__type": "ResourceNotFoundException", "message": "Secrets Manager can't find the specified secret."}
        )
        text = json.dumps(body).encode()
        self.send_response(200 if known else 400)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def manager(hosts):
    server = ThreadingHTTPServer((hosts.here, 0), Manager)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{hosts.here}:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def prepared(folder: Path, distributed: Herring, train: str) -> Path:
    """The two channels as ModelTrainer makes them, by its own methods."""
    drivers, code = folder / "sm_drivers", folder / "code"
    shutil.copytree(SM_DRIVERS_LOCAL_PATH, drivers)
    shutil.copy2(install_requirements.__file__, drivers / "scripts" / "install_requirements.py")
    shutil.copytree(distributed.driver_dir, drivers / "distributed_drivers", dirs_exist_ok=True)
    code.mkdir()
    (code / "train.py").write_text(train)
    source = SourceCode(source_dir=str(code), entry_script="train.py")
    there, trainer = SimpleNamespace(name=str(drivers)), SimpleNamespace(hyperparameters=None, _jumpstart_config=None)
    ModelTrainer._prepare_train_script(trainer, tmp_dir=there, source_code=source, distributed=distributed)
    ModelTrainer._write_source_code_json(trainer, tmp_dir=there, source_code=source)
    ModelTrainer._write_distributed_json(trainer, tmp_dir=there, distributed=distributed)
    return folder


class TrainingJob:
    """What the service does: a container on each host, with its /opt/ml."""

    def __init__(self, hosts: emulated.Hosts, folder: Path, manager: str) -> None:
        self.hosts, self.folder, self.manager = hosts, folder, manager
        self.processes: list[subprocess.Popen[bytes]] = []
        lines = [f"{address} algo-{index + 1}" for index, address in enumerate(hosts.addresses)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")

    def root(self, index: int) -> Path:
        return self.folder / f"algo-{index + 1}"

    def log(self, index: int) -> Path:
        return self.folder / f"log-{index}"

    def start(self, index: int, channels: Path, hyperparameters: dict[str, str]) -> None:
        """The container of that host."""
        config, data = self.root(index) / "input" / "config", self.root(index) / "input" / "data"
        config.mkdir(parents=True)
        (self.root(index) / "output").mkdir()
        shutil.copytree(channels, data)
        kinds = {"servers": "ml.c6in.32xlarge", "workers": "ml.g5.2xlarge"}
        groups = [
            {"instance_group_name": name, "instance_type": kinds[name], "hosts": hosts}
            for name, hosts in GROUPS.items()
        ]
        own = next(name for name, each in GROUPS.items() if f"algo-{index + 1}" in each)
        resources = {
            "current_host": f"algo-{index + 1}",
            "current_instance_type": kinds[own],
            "current_group_name": own,
            "hosts": [f"algo-{number}" for number in range(1, 5)],
            "instance_groups": groups,
            "network_interface_name": "eth0",
        }
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        (config / "inputdataconfig.json").write_text("{}")
        (config / "hyperparameters.json").write_text(json.dumps(hyperparameters))
        env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(Path(herring.__file__).resolve().parents[1]),
            "HOME": "/root",
            "TRAINING_JOB_NAME": "train",
            "AWS_REGION": "eu-west-1",
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_ENDPOINT_URL_SECRETS_MANAGER": self.manager,
        }
        inside = (
            f"hostname algo-{index + 1} && mount --bind {self.folder}/hosts /etc/hosts && mount -t tmpfs none /opt && "
            f"mkdir /opt/ml && mount --bind {self.root(index)} /opt/ml && cd / && "
            "exec /bin/bash /opt/ml/input/data/sm_drivers/sm_train.sh"
        )
        command = ["ip", "netns", "exec", self.hosts.namespaces[index], "unshare", "-u", "-m", "env", "-i"]
        words = [f"{name}={value}" for name, value in env.items()]
        with self.log(index).open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [*command, *words, "sh", "-c", inside],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def finish(self, timeout: float = 90) -> list[tuple[int, str]]:
        """Exit status and output of each host."""
        deadline = time.monotonic() + timeout
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(max(deadline - time.monotonic(), 0))
        done = [(process.poll(), self.log(index).read_text()) for index, process in enumerate(self.processes)]
        if any(code is None for code, _ in done):
            report = "\n".join(f"--- algo-{index + 1}: {code}\n{text}" for index, (code, text) in enumerate(done))
            pytest.fail(f"not finished after {timeout:g} s\n{report}", pytrace=False)
        return done

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def job(hosts, tmp_path, manager):
    made = TrainingJob(hosts, tmp_path, manager)
    yield made
    made.stop()


def run(job: TrainingJob, distributed: Herring, status: int = 0) -> list[tuple[int, str]]:
    with TemporaryDirectory() as folder:
        channels = prepared(Path(folder) / "data", distributed, TRAIN % SECRET)
        for index in range(4):
            job.start(index, channels, {"status": str(status)})
    return job.finish()


def test_four_hosts_of_two_groups_train(job):
    """algo-1 is a server, though SM_MASTER_ADDR is algo-1."""
    done = run(job, Herring(server_group="servers", process_count_per_node=2, secret_arn=ARN))
    report = "\n".join(text for _, text in done)
    assert [code for code, _ in done] == [0] * 4, report
    lines = sorted(line for line in report.splitlines() if " of 4: " in line)
    assert lines == [f"{rank} of 4: 10 True ['--status', '0']" for rank in range(4)], report
    assert "rank 0 of 4 workers on 2 hosts (RANK and WORLD_SIZE), 2 server processes" in done[2][1]
    for index in range(2):
        assert (
            f"algo-{index + 1} runs server {index}; workers on algo-3, algo-4, servers on algo-1, algo-2"
            in done[index][1]
        )
        assert int(done[index][1].partition(f"herring server {index}: ")[2].split()[0]) > 0  # Operations.
    assert SECRET not in report
    assert not any((job.root(index) / "output" / "failure").exists() for index in range(4))


def test_a_rank_that_fails_is_the_hosts_status_and_its_reason(job):
    done = run(job, Herring(server_group="servers", process_count_per_node=2, secret_arn=ARN), status=5)
    assert done[2][0] == 5, done[2][1]
    assert (job.root(2) / "output" / "failure").read_text() == "herring.sagemaker: algo-3 ended with exit status 5\n"


def test_a_secret_that_is_not_there_ends_every_host_with_a_sentence(job):
    done = run(job, Herring(server_group="servers", secret_arn=ARN.replace("herring", "nothing")))
    for index, (code, text) in enumerate(done):
        assert code == 1, text
        said = (job.root(index) / "output" / "failure").read_text()
        assert "cannot be read" in said
        assert "ResourceNotFoundException" in said
        assert "The job's role needs secretsmanager:GetSecretValue" in said
        assert "Traceback" not in text
