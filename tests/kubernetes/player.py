"""Plays manifests: expands them to pods as the controllers would, and starts each pod's command with exactly its
environment on an emulated host of its own, where the pods' names are known.

What it does is written from the controllers' sources (Indexed Jobs, JobSet, Kubeflow Trainer's torch plugin, Volcano's
env and svc plugins). It schedules nothing, and restarts containers only as restartPolicy says.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import emulated
import pytest

import herring

ROOT = Path(__file__).resolve().parents[2]
# For `python -c` in each worker: no torch, so that it starts at once.
SUMS = """
import numpy, herring
herring.init()
total = float(herring.allreduce(numpy.full(100_000, herring.rank() + 1.0, numpy.float32), op="sum")[-1])
print(f"{herring.rank()} of {herring.size()}: {total:g}", flush=True)
herring.shutdown()
"""
INDEX = "batch.kubernetes.io/job-completion-index"
SECRET = "a secret of the cluster"


@dataclass
class Pod:
    """One container of one pod."""

    role: str
    name: str  #: As the other pods find it.
    command: list[str]
    environment: dict[str, str]
    restarts: bool  #: restartPolicy is OnFailure.
    secrets: set[str] = field(default_factory=set)


def _value(variable: dict[str, Any], annotations: dict[str, str], secrets: set[str]) -> str:
    if "valueFrom" not in variable:
        return variable["value"]
    source = variable["valueFrom"]
    if "secretKeyRef" in source:
        secrets.add(source["secretKeyRef"]["name"])
        assert source["secretKeyRef"]["key"] == "secret"
        return SECRET
    name = source["fieldRef"]["fieldPath"].removeprefix("metadata.annotations['").removesuffix("']")
    return annotations[name]


def _pod(role: str, name: str, spec: dict[str, Any], annotations: dict[str, str], more: dict[str, str]) -> Pod:
    (container,) = spec["containers"]
    secrets: set[str] = set()
    given = {each["name"]: _value(each, annotations, secrets) for each in container["env"]}
    assert len(given) == len(container["env"]), "a variable stands there twice"
    restarts = spec["restartPolicy"] == "OnFailure"
    return Pod(role, name, container["command"], {**given, **more}, restarts, secrets)


def pods_of_jobset(jobset: dict[str, Any]) -> list[Pod]:
    """Indexed Jobs' pods; their index is an annotation and, behind the manifest's variables, JOB_COMPLETION_INDEX."""
    name, pods = jobset["metadata"]["name"], []
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        assert spec["completionMode"] == "Indexed"
        assert spec["parallelism"] == spec["completions"]
        for index in map(str, range(spec["completions"])):
            host = f"{name}-{job['name']}-0-{index}.{name}"
            more = {"JOB_COMPLETION_INDEX": index}
            pods.append(_pod(job["name"], host, spec["template"]["spec"], {INDEX: index}, more))
    return pods


def pods_of_trainer(runtime: dict[str, Any], train_job: dict[str, Any]) -> list[Pod]:
    """As the torch plugin does: a JobSet called as the TrainJob is, PET_* for `node` and envInjection's targets."""
    assert train_job["spec"]["runtimeRef"] == {"name": runtime["metadata"]["name"], "kind": runtime["kind"]}
    name, trainer = train_job["metadata"]["name"], train_job["spec"]["trainer"]
    jobset = {"metadata": {"name": name}, "spec": copy.deepcopy(runtime["spec"]["template"]["spec"])}
    injection = runtime["spec"]["mlPolicy"]["torch"].get("envInjection", {"targets": []})
    targets = {(each["jobName"], container) for each in injection["targets"] for container in each["containerNames"]}
    pet = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    for job in jobset["spec"]["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        container["env"] = list(container["env"])
        labels = job["template"].get("metadata", {}).get("labels", {})
        is_trainer = labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer"
        if is_trainer:
            assert (job["name"], container["name"]) == ("node", "node")
            job["template"]["spec"].update(parallelism=trainer["numNodes"], completions=trainer["numNodes"])
            container.update(command=trainer["command"], image=trainer["image"])
        if is_trainer or (job["name"], container["name"]) in targets:
            container["env"] += [{"name": key, "value": value} for key, value in pet.items()]
            rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
            container["env"].append({"name": "PET_NODE_RANK", "valueFrom": rank})
    return pods_of_jobset(jobset)


def pods_of_volcano(job: dict[str, Any]) -> list[Pod]:
    """The plugins env and svc put their variables behind those of the manifest."""
    name, tasks, pods = job["metadata"]["name"], job["spec"]["tasks"], []
    assert set(job["spec"]["plugins"]) == {"env", "svc"}
    hosts = {task["name"]: [f"{name}-{task['name']}-{i}.{name}" for i in range(task["replicas"])] for task in tasks}
    shared = {}
    for task, names in hosts.items():
        shared.update({f"VC_{task.upper()}_HOSTS": ",".join(names), f"VC_{task.upper()}_NUM": str(len(names))})
    for task in tasks:
        for index, host in enumerate(hosts[task["name"]]):
            more = {**shared, "VC_TASK_INDEX": str(index), "VK_TASK_INDEX": str(index)}
            pods.append(_pod(task["name"], host, task["template"]["spec"], {}, more))
    return pods


def pods_of(documents: list[dict[str, Any]]) -> list[Pod]:
    """Of what `herring kubernetes` has printed."""
    kinds = [document["kind"] for document in documents]
    if kinds == ["ClusterTrainingRuntime", "TrainJob"]:
        return pods_of_trainer(*documents)
    return pods_of_jobset(*documents) if kinds == ["JobSet"] else pods_of_volcano(*documents)


# What an image has: the Python with Herring in it, and the checkout.
IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": str(Path(herring.__file__).resolve().parents[1]),
    "HOME": "/root",
    "OMP_NUM_THREADS": "1",
}


class Stage:
    """Emulated hosts, one for each pod, and what runs on them."""

    def __init__(self, pods: list[Pod], hosts: emulated.Hosts, folder: Path) -> None:
        self.pods, self.hosts, self.folder = pods, hosts, folder
        self.names = folder / "hosts"
        self.running: list[subprocess.Popen[bytes] | None] = [None] * len(pods)
        self.starts = [0] * len(pods)
        self.codes: list[int | None] = [None] * len(pods)
        self.names.write_text("127.0.0.1 localhost\n")
        # There is no name server: asking this machine's would take torchrun a minute.
        self.resolver = folder / "resolv.conf"
        self.resolver.write_text("")

    def publish(self) -> None:
        """The pods' names are known from now on."""
        lines = [f"{address} {pod.name}" for address, pod in zip(self.hosts.addresses, self.pods, strict=False)]
        with self.names.open("a") as file:  # In place: it is mounted.
            file.write("\n".join(lines) + "\n")

    def log(self, index: int) -> Path:
        """What that pod has printed, over all its starts."""
        return self.folder / f"log-{index}"

    def start(self, index: int) -> None:
        """The container of that pod."""
        pod = self.pods[index]
        host = shlex.quote(pod.name.partition(".")[0])
        mounts = f"mount --bind {self.names} /etc/hosts && mount --bind {self.resolver} /etc/resolv.conf"
        inside = f'hostname {host} && {mounts} && cd {self.folder} && exec "$@"'
        words = [f"{name}={value}" for name, value in {**IMAGE, **pod.environment}.items()]
        command = ["ip", "netns", "exec", self.hosts.namespaces[index], "unshare", "-u", "-m", "sh", "-c", inside, "sh"]
        self.starts[index] += 1
        with self.log(index).open("ab") as log:
            self.running[index] = subprocess.Popen(
                [*command, "env", "-i", *words, *pod.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def turn(self) -> None:
        """Who has ended is noted, and started again where restartPolicy says so."""
        for index, process in enumerate(self.running):
            code = process.poll() if process is not None else None
            if process is None or code is None:
                continue
            self.running[index] = None
            self.codes[index] = code
            if code != 0 and self.pods[index].restarts:
                self.start(index)

    def wait(self, roles: set[str], timeout: float) -> None:
        """Until all pods of these roles have ended well. Fails the test where one has not, or where time is over."""
        deadline = time.monotonic() + timeout
        wanted = [index for index, pod in enumerate(self.pods) if pod.role in roles]
        assert wanted
        while any(self.running[index] for index in wanted):
            self.turn()
            if time.monotonic() > deadline:
                pytest.fail(f"not finished after {timeout:g} s\n{self.report()}", pytrace=False)
            time.sleep(0.05)
        if any(self.codes[index] for index in wanted):
            pytest.fail(f"pods have failed\n{self.report()}", pytrace=False)

    def until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Plays on until that is so."""
        deadline = time.monotonic() + timeout
        while not condition():
            self.turn()
            if time.monotonic() > deadline:
                pytest.fail(f"it did not happen within {timeout:g} s\n{self.report()}", pytrace=False)
            time.sleep(0.02)

    def kill(self, index: int) -> None:
        """The container dies; what it has started goes with it, as in a pod."""
        process = self.running[index]
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)

    def text(self, role: str) -> str:
        """All that pods of that role have printed."""
        return "".join(self.log(i).read_text() for i, pod in enumerate(self.pods) if pod.role == role)

    def report(self) -> str:
        """For a person who looks for what went wrong."""
        parts = []
        for index, pod in enumerate(self.pods):
            text = self.log(index).read_text() if self.log(index).exists() else "(not started)\n"
            parts.append(f"--- {pod.name}: exit {self.codes[index]}, started {self.starts[index]} times\n{text}")
        return "".join(parts)

    def stop(self) -> None:
        """Ends what still runs, by the groups that were started here."""
        for process in self.running:
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            if process is not None:
                process.wait(10)


def sums_of(text: str) -> list[str]:
    return sorted(re.findall(r"^[0-9] of [0-9]: [0-9]+$", text, re.MULTILINE))


def operations_of_servers(stage: Stage, role: str) -> list[int]:
    """What each has worked off, as it says when it ends."""
    return [int(number) for number in re.findall(r"herring server [0-9]: ([0-9]+) operations?\b", stage.text(role))]
