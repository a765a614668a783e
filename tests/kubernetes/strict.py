"""What the manifests may hold: every field that they use, with its type, and no other.

Written by hand from the CRDs of JobSet v1alpha2, Kubeflow Trainer v1alpha1 and Volcano batch v1alpha1, and from core/v1
and batch/v1; the fields that Herring does not use are left out. `make test-kubernetes` checks against published ones.
What only a cluster knows (CEL rules, webhooks) is checked by neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Check = Callable[[Any, str], list[str]]

LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"


def text(pattern: str = r".+") -> Check:
    def check(value: Any, at: str) -> list[str]:
        right = isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL)
        return [] if right else [f"{at}: {value!r} does not match {pattern}"]

    return check


def number(least: int = 0) -> Check:
    def check(value: Any, at: str) -> list[str]:
        right = isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31
        return [] if right else [f"{at}: {value!r} is no whole number from {least} on"]

    return check


def truth(value: Any, at: str) -> list[str]:
    return [] if isinstance(value, bool) else [f"{at}: {value!r} is no truth value"]


def list_of(inner: Check, least: int = 1) -> Check:
    def check(value: Any, at: str) -> list[str]:
        if not isinstance(value, list) or len(value) < least:
            return [f"{at}: {value!r} is no list of {least} or more"]
        return [problem for index, each in enumerate(value) for problem in inner(each, f"{at}[{index}]")]

    return check


def map_of(inner: Check, least: int = 1) -> Check:
    def check(value: Any, at: str) -> list[str]:
        if not isinstance(value, dict) or len(value) < least:
            return [f"{at}: {value!r} is no map of {least} or more"]
        return [problem for key, each in value.items() for problem in inner(each, f"{at}.{key}")]

    return check


def fields(optional: dict[str, Check] | None = None, **required: Check) -> Check:
    """A map with all of the required names, some of the optional ones, and no others."""
    optional = optional or {}

    def check(value: Any, at: str) -> list[str]:
        if not isinstance(value, dict):
            return [f"{at}: {value!r} is no map"]
        known = {**required, **optional}
        problems = [f"{at}: there is no field {name!r}" for name in value if name not in known]
        problems += [f"{at}: {name!r} is missing" for name in required if name not in value]
        return problems + [
            p for name, each in value.items() if name in known for p in known[name](each, f"{at}.{name}")
        ]

    return check


INDEX_PATH = re.escape("metadata.annotations['batch.kubernetes.io/job-completion-index']")
SOURCE = fields(
    {
        "secretKeyRef": fields(name=text(LABEL), key=text("secret")),
        "fieldRef": fields(fieldPath=text(INDEX_PATH)),
    }
)
VARIABLE = fields({"value": text(".*"), "valueFrom": SOURCE}, name=text("[A-Za-z_][A-Za-z0-9_]*"))
RESOURCES = fields({"requests": map_of(text(QUANTITY)), "limits": map_of(text(QUANTITY))})
CONTAINER = fields(
    {"resources": RESOURCES}, name=text(LABEL), image=text(), command=list_of(text(".*")), env=list_of(VARIABLE)
)
POD = fields(
    {"nodeSelector": map_of(text())},
    restartPolicy=text("Never|OnFailure"),
    enableServiceLinks=truth,
    containers=list_of(CONTAINER),
)
INDEXED_JOB = fields(
    parallelism=number(1),
    completions=number(1),
    completionMode=text("Indexed"),
    backoffLimit=number(),
    template=fields(spec=POD),
)
LABELS = fields({"labels": map_of(text())})
REPLICATED = fields(name=text(LABEL), replicas=number(1), template=fields({"metadata": LABELS}, spec=INDEXED_JOB))
JOBSET_SPEC = fields(
    network=fields(enableDNSHostnames=truth, publishNotReadyAddresses=truth),
    successPolicy=fields(operator=text("All|Any"), targetReplicatedJobs=list_of(text(LABEL))),
    failurePolicy=fields(maxRestarts=number()),
    replicatedJobs=list_of(REPLICATED),
)
METADATA = fields({"namespace": text(LABEL)}, name=text(LABEL))
JOBSET = fields(
    apiVersion=text(r"jobset\.x-k8s\.io/v1alpha2"), kind=text("JobSet"), metadata=METADATA, spec=JOBSET_SPEC
)
TRAINER_API = text(r"trainer\.kubeflow\.org/v1alpha1")
TARGET = fields(jobName=text(LABEL), containerNames=list_of(text(LABEL)))
TORCH = fields({"envInjection": fields(targets=list_of(TARGET))})
RUNTIME = fields(
    apiVersion=TRAINER_API,
    kind=text("ClusterTrainingRuntime"),
    metadata=fields(name=text(LABEL), labels=map_of(text())),
    spec=fields(mlPolicy=fields(numNodes=number(1), torch=TORCH), template=fields(spec=JOBSET_SPEC)),
)
TRAIN_JOB = fields(
    apiVersion=TRAINER_API,
    kind=text("TrainJob"),
    metadata=METADATA,
    spec=fields(
        runtimeRef=fields(name=text(LABEL), kind=text("ClusterTrainingRuntime")),
        trainer=fields(numNodes=number(1), numProcPerNode=number(1), image=text(), command=list_of(text(".*"))),
    ),
)
POLICY = fields(
    event=text("PodFailed|PodEvicted|TaskCompleted"),
    action=text("RestartJob|CompleteJob"),
)
TASK = fields({"policies": list_of(POLICY)}, name=text(LABEL), replicas=number(1), template=fields(spec=POD))
VOLCANO = fields(
    apiVersion=text(r"batch\.volcano\.sh/v1alpha1"),
    kind=text("Job"),
    metadata=METADATA,
    spec=fields(
        schedulerName=text("volcano"),
        minAvailable=number(1),
        maxRetry=number(),
        plugins=map_of(list_of(text(), least=0)),
        policies=list_of(POLICY),
        tasks=list_of(TASK),
    ),
)
OF_KIND = {"jobset": [JOBSET], "kubeflow": [RUNTIME, TRAIN_JOB], "volcano": [VOLCANO]}


def problems(kind: str, documents: list[dict[str, Any]]) -> list[str]:
    """Empty where all is right."""
    checks = OF_KIND[kind]
    if len(checks) != len(documents):
        return [f"{len(documents)} documents instead of {len(checks)}"]
    return [p for check, document in zip(checks, documents, strict=True) for p in check(document, document["kind"])]
