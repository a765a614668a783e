"""The manifests against published schemas: `make test-kubernetes` installs the two packages that have them.

* kubeflow-trainer-api: models of JobSet, TrainJob and the runtimes. They leave out unknown fields without a word, so
  what they give back is compared with what they got.
* kubernetes-validate: the schemas of Kubernetes' own kinds, strict; pods are checked inside of a Job.

Volcano publishes none on PyPI: its job is checked by tests/kubernetes/strict.py and its pods here.
"""

from __future__ import annotations

import kubernetes_validate
import pytest
from kubeflow_trainer_api import models
from test_kubernetes_render import FULL, PLAIN

from herring.kubernetes import KINDS, Job, render

ELASTIC = Job("train", "image", ["python", "train.py"], workers=2, servers=1, elastic=True)
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


def difference(given, kept, at: str) -> list[str]:
    """Where `kept` lacks something of `given`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        lost = [f"{at}.{name}" for name in given if name not in kept and given[name] not in ({}, [])]
        return lost + [
            each for name in given if name in kept for each in difference(given[name], kept[name], f"{at}.{name}")
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [each for index, (one, other) in pairs for each in difference(one, other, f"{at}[{index}]")]
    return [] if given == kept else [f"{at}: {given!r} became {kept!r}"]


def lost_by_model(document) -> list[str]:
    model = MODELS[document["kind"]].from_dict(document)
    return difference(document, model.to_dict(), document["kind"])


@pytest.mark.parametrize("kind", ["jobset", "kubeflow"])
@pytest.mark.parametrize("job", [PLAIN, FULL], ids=["plain", "full"])
def test_the_models_of_kubeflow_keep_every_field(kind, job):
    for document in render(kind, job):
        assert lost_by_model(document) == []


def test_and_of_an_elastic_jobset():
    (document,) = render("jobset", ELASTIC)
    assert lost_by_model(document) == []


def test_the_models_find_what_is_wrong():
    (document,) = render("jobset", PLAIN)
    document["spec"]["failurePolicy"] = {"maxrestarts": 3}
    assert lost_by_model(document) == ["JobSet.spec.failurePolicy.maxrestarts"]
    document["spec"]["failurePolicy"] = {"maxRestarts": "three"}
    with pytest.raises(ValueError, match="maxRestarts"):
        lost_by_model(document)


def jobs_of(kind, document):
    """Kubernetes' own Job around each pod."""
    spec = document["spec"]
    spec = spec.get("template", {"spec": spec})["spec"] if kind != "volcano" else spec
    for each in spec.get("replicatedJobs", []):
        yield {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": each["name"]},
            "spec": each["template"]["spec"],
        }
    for each in spec.get("tasks", []):
        job = {"template": each["template"]}
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}, "spec": job}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("job", [PLAIN, FULL], ids=["plain", "full"])
def test_jobs_and_pods_hold_against_kubernetes_schemas(kind, job):
    jobs = list(jobs_of(kind, render(kind, job)[0]))
    assert len(jobs) == 2
    for each in jobs:
        kubernetes_validate.validate(each, "1.33", strict=True)


def test_the_schemas_find_a_misspelt_field():
    (document,) = render("jobset", PLAIN)
    job = next(jobs_of("jobset", document))
    job["spec"]["template"]["spec"]["enableServicelinks"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.33", strict=True)
