"""Manifests for Kubernetes: a JobSet, a runtime and a TrainJob of Kubeflow Trainer, or a job of Volcano.

    from herring.kubernetes import Job, render, to_yaml
    print(to_yaml(render("jobset", Job("train", "registry/train:1", ["python", "train.py"], workers=4, servers=2))))

The same as `herring kubernetes jobset --name train ...`. Nothing here talks to a cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from herring._errors import InvalidArgumentError

__all__ = ["KINDS", "Job", "render", "to_yaml"]

KINDS = ("jobset", "kubeflow", "volcano")
"""What render() makes: a JobSet; a Kubeflow ClusterTrainingRuntime with its TrainJob; a Volcano Job."""

Document = dict[str, Any]

_HUB_PORT, _TORCH_PORT, _RENDEZVOUS_PORT = 29400, 29500, 29600
# Kubernetes counts a container's restarts as well. Servers that come back must not end the job.
_MANY = 1_000_000
_INDEX_PATH = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SERVER = ["herring", "server", "--rank", "auto"]
_DNS_LABEL = 63
# What a pod's name has after the job's: "-rendezvous-0-100000-abcde" at most.
_LONGEST_SUFFIX = 26
_RESERVED = re.compile(
    r"HERRING_(HUB|SERVERS|SECRET|ELASTIC|RENDEZVOUS)|PET_\w+|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE)"
)


@dataclass(frozen=True)
class Job:
    """What is to run. The pods' image needs Herring and the training script; servers run in the same image."""

    name: str  #: Of the job; pods find each other by it.
    image: str
    command: Sequence[str]  #: Of each worker process.
    workers: int  #: Pods that train.
    servers: int = 0  #: Pods that run `herring server`. 0: servers are inside the workers.
    processes: int = 1  #: Worker processes in each pod. More than 1: torchrun starts them, the image needs torch.
    gpus: int = 0  #: Of each worker's pod (nvidia.com/gpu).
    worker_resources: Mapping[str, str] = field(default_factory=dict)  #: {"cpu": "8", "memory": "64Gi"}.
    server_resources: Mapping[str, str] = field(default_factory=dict)
    worker_nodes: Mapping[str, str] = field(default_factory=dict)  #: Labels of nodes (nodeSelector).
    server_nodes: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)  #: For all pods.
    namespace: str = ""
    secret: str = (
        ""  #: Name of the Secret whose key "secret" is the job's secret. Empty: NAME-secret, kubeflow: RUNTIME-secret.
    )
    restarts: int = 3  #: How often the whole job is started again after a worker's failure.
    elastic: bool = False  #: JobSet only: the job goes on without a lost worker, which comes back.
    runtime: str = "herring"  #: Kubeflow only: name of the ClusterTrainingRuntime.


def render(kind: str, job: Job) -> list[Document]:
    """The manifests, as `kubectl apply` takes them. `kind` is one of KINDS. Raises InvalidArgumentError."""
    if kind not in KINDS:
        raise InvalidArgumentError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if not job.secret:  # A runtime serves many jobs, so theirs is one Secret in each namespace.
        job = replace(job, secret=f"{job.runtime if kind == 'kubeflow' else job.name}-secret")
    _check(kind, job)
    return {"jobset": _jobset, "kubeflow": _kubeflow, "volcano": _volcano}[kind](job)


def _check(kind: str, job: Job) -> None:
    for what, name in (("name", job.name), ("secret", job.secret), ("runtime", job.runtime)):
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
            raise InvalidArgumentError(
                f"{what} is {name!r}; it must begin with a letter and have lower-case letters, digits and '-' only"
            )
    if len(job.name) > _DNS_LABEL - _LONGEST_SUFFIX:
        raise InvalidArgumentError(
            f"name {job.name!r} has {len(job.name)} characters; at most {_DNS_LABEL - _LONGEST_SUFFIX}, because the "
            "names of pods are made of it"
        )
    for count, value, least in (("workers", job.workers, 1), ("servers", job.servers, 0), ("gpus", job.gpus, 0)):
        if value < least:
            raise InvalidArgumentError(f"{count} is {value}; it must be at least {least}")
    if job.processes < 1 or job.restarts < 0:
        raise InvalidArgumentError(
            f"processes is {job.processes} (at least 1) and restarts {job.restarts} (at least 0)"
        )
    if not job.command or not job.image:
        raise InvalidArgumentError("give the image, and the command that trains (after --)")
    taken = sorted(name for name in job.env if _RESERVED.fullmatch(name))
    if taken:
        raise InvalidArgumentError(f"env has {', '.join(taken)}: the manifest sets it itself; remove it")
    if job.elastic and (kind != "jobset" or job.processes > 1):
        raise InvalidArgumentError("elastic jobs need kind jobset and one process in each pod")


# --- Pods ------------------------------------------------------------------------------------------------------------


def _variables(values: Mapping[str, object]) -> list[Document]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def _secret_variable(job: Job) -> Document:
    return {"name": "HERRING_SECRET", "valueFrom": {"secretKeyRef": {"name": job.secret, "key": "secret"}}}


def _resources(values: Mapping[str, str], gpus: int) -> Document:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    both: Document = {"requests": dict(values)} if values else {}
    # A container may use more processors than it asks for; not more memory.
    limits.update({name: value for name, value in values.items() if name != "cpu"})
    return {**both, **({"limits": limits} if limits else {})}


def _pod(job: Job, container: Document, *, is_server: bool, restart: str) -> Document:
    nodes = job.server_nodes if is_server else job.worker_nodes
    resources = _resources(job.server_resources if is_server else job.worker_resources, 0 if is_server else job.gpus)
    return {
        "restartPolicy": restart,
        # Else a Service that is called herring puts variables with names like HERRING_PORT into every pod.
        "enableServiceLinks": False,
        **({"nodeSelector": dict(nodes)} if nodes else {}),
        "containers": [{**container, **({"resources": resources} if resources else {})}],
    }


def _by_torchrun(job: Job) -> list[str]:
    """A worker pod's command. torchrun takes all else from PET_*."""
    return ["torchrun", "--no-python", *job.command] if job.processes > 1 else list(job.command)


def _metadata(job: Job, name: str) -> Document:
    return {"name": name, **({"namespace": job.namespace} if job.namespace else {})}


# --- JobSet ----------------------------------------------------------------------------------------------------------


def _replicated(name: str, count: int, pod: Document, backoff: int) -> Document:
    spec = {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": backoff,
        "template": {"spec": pod},
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _places(job: Job, first_worker: str) -> list[Document]:
    """Of a worker's pod whose rank is its index: what torchrun reads, or Herring and torch without it."""
    if job.processes == 1:
        one = {"WORLD_SIZE": job.workers, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        return _variables({"MASTER_ADDR": first_worker, "MASTER_PORT": _TORCH_PORT, **one})
    sizes = {"PET_NNODES": job.workers, "PET_NPROC_PER_NODE": job.processes}
    return _variables({"PET_MASTER_ADDR": first_worker, "PET_MASTER_PORT": _TORCH_PORT, **sizes})


def _jobset(job: Job) -> list[Document]:
    first = f"{job.name}-workers-0-0.{job.name}"
    meeting = {"HERRING_HUB": f"{first}:{_HUB_PORT}"}
    if job.elastic:
        meeting = {"HERRING_RENDEZVOUS": f"{job.name}-rendezvous-0-0.{job.name}:{_RENDEZVOUS_PORT}"}
    common = [*_variables({**job.env, **meeting, "HERRING_SERVERS": job.servers}), _secret_variable(job)]
    places = _places(job, first)
    if job.processes > 1:
        places.append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX_PATH}}})
    if job.elastic:
        places += _variables({"HERRING_ELASTIC": "on"})
    worker = {"name": "worker", "image": job.image, "command": _by_torchrun(job), "env": [*common, *places]}
    server = {"name": "server", "image": job.image, "command": _SERVER, "env": common}
    restart, backoff = ("OnFailure", _MANY) if job.elastic else ("Never", 0)
    jobs = [_replicated("workers", job.workers, _pod(job, worker, is_server=False, restart=restart), backoff)]
    if job.servers:
        pod = _pod(job, server, is_server=True, restart="OnFailure")
        jobs.append(_replicated("servers", job.servers, pod, _MANY))
    if job.elastic:
        sizes = ["--workers", str(job.workers), "--servers", str(job.servers)]
        held = {"name": "rendezvous", "image": job.image, "command": ["herring", "rendezvous", *sizes], "env": common}
        jobs.append(_replicated("rendezvous", 1, _pod(job, held, is_server=True, restart="Never"), 0))
    spec = {**_ending(job, "rendezvous" if job.elastic else "workers"), "replicatedJobs": jobs}
    return [
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(job, job.name), "spec": spec}
    ]


def _ending(job: Job, target: str) -> Document:
    return {
        # Pods ask for each other's names before they are ready.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [target]},
        "failurePolicy": {"maxRestarts": job.restarts},
    }


# --- Kubeflow Trainer ------------------------------------------------------------------------------------------------


def _kubeflow(job: Job) -> list[Document]:
    """The runtime has the servers, the TrainJob the workers. Trainer gives both PET_* (envInjection: to servers)."""
    common = [*_variables({**job.env, "HERRING_SERVERS": job.servers}), _secret_variable(job)]
    # Trainer wants this name, and this label.
    node = {"name": "node", "image": job.image, "command": _by_torchrun(job), "env": common}
    trainer = _replicated("node", job.workers, _pod(job, node, is_server=False, restart="Never"), 0)
    trainer["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    jobs, torch = [trainer], {}
    if job.servers:
        server = {"name": "server", "image": job.image, "command": _SERVER, "env": common}
        pod = _pod(job, server, is_server=True, restart="OnFailure")
        jobs.append(_replicated("servers", job.servers, pod, _MANY))
        torch = {"envInjection": {"targets": [{"jobName": "servers", "containerNames": ["server"]}]}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": job.runtime, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.workers, "torch": torch},
            "template": {"spec": {**_ending(job, "node"), "replicatedJobs": jobs}},
        },
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, job.name),
        "spec": {
            "runtimeRef": {"name": job.runtime, "kind": "ClusterTrainingRuntime"},
            "trainer": {
                "numNodes": job.workers,
                "numProcPerNode": job.processes,
                "image": job.image,
                "command": _by_torchrun(job),
            },
        },
    }
    return [runtime, train_job]


# --- Volcano ---------------------------------------------------------------------------------------------------------


def _volcano(job: Job) -> list[Document]:
    """Ranks are VC_TASK_INDEX, which the plugin env sets; names come from the plugin svc."""
    first = f"{job.name}-worker-0.{job.name}"
    meeting = {"HERRING_HUB": f"{first}:{_HUB_PORT}", "HERRING_SERVERS": job.servers}
    common = [*_variables({**job.env, **meeting}), _secret_variable(job)]
    command = list(job.command)
    if job.processes > 1:
        # No other variable of the manifest can be made of VC_TASK_INDEX: the plugin puts it behind them.
        script = 'exec torchrun --node-rank "$VC_TASK_INDEX" --no-python "$@"'
        command = ["sh", "-c", script, "torchrun", *command]
    worker = {"name": "worker", "image": job.image, "command": command, "env": [*common, *_places(job, first)]}
    server = {"name": "server", "image": job.image, "command": _SERVER, "env": common}
    tasks = [_task(job.workers, "worker", _pod(job, worker, is_server=False, restart="Never"))]
    # The job is done when the workers are.
    tasks[0]["policies"] = [{"event": "TaskCompleted", "action": "CompleteJob"}]
    if job.servers:
        tasks.append(_task(job.servers, "server", _pod(job, server, is_server=True, restart="OnFailure")))
    spec = {
        "schedulerName": "volcano",
        "minAvailable": job.workers + job.servers,
        "maxRetry": job.restarts,
        "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
        "policies": [{"event": "PodFailed", "action": "RestartJob"}, {"event": "PodEvicted", "action": "RestartJob"}],
        "tasks": tasks,
    }
    return [
        {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": _metadata(job, job.name), "spec": spec}
    ]


def _task(count: int, name: str, pod: Document) -> Document:
    return {"name": name, "replicas": count, "template": {"spec": pod}}


# --- YAML ------------------------------------------------------------------------------------------------------------

# Words that are no strings without quotation marks (YAML 1.1 has many), and text that could be a number.
_WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "none"}
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*")


def to_yaml(documents: Sequence[Document]) -> str:
    """Of dictionaries, lists, text, whole numbers and truth values."""
    return "---\n".join("\n".join(_lines(document)) + "\n" for document in documents)


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        lines = []
        for key, each in value.items():
            inner = _lines(each)
            is_nested = isinstance(each, Mapping | list) and bool(each)
            lines += (
                [f"{_scalar(key)}:", *(f"  {line}" for line in inner)] if is_nested else [f"{_scalar(key)}: {inner[0]}"]
            )
        return lines
    if isinstance(value, list) and value:
        lines = []
        for each in value:
            first, *others = _lines(each)
            lines += [f"- {first}", *(f"  {line}" for line in others)]
        return lines
    return [_scalar(value)]


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if is_plain else json.dumps(value)
    return "{}" if isinstance(value, Mapping) else "[]"
