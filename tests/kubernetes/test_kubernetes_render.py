"""`herring kubernetes`: what it prints holds against strict schemas, and what cannot be is refused in a sentence."""

from __future__ import annotations

import copy
import subprocess
import sys

import player
import pytest
import strict
import yaml

from herring import InvalidArgumentError
from herring.kubernetes import KINDS, Job, render, to_yaml

CLI = [sys.executable, "-m", "herring", "kubernetes"]
PLAIN = Job("train", "registry/train:1", ["python", "train.py"], workers=4, servers=2)
# Other things than words in YAML, without quotation marks.
WORDS = (
    *("on", "NO", "~", "null", "1", "-1", "1.5", "1e3", "0x1f", "0o7", "1:30", "a: b", "a:", "- a", "#a", "a #b", "&a"),
    *("*a", "!a", "|", "%a", "@a", "`a", "{a", "[a", "'a", '"a', "a\nb", "", " a", "a ", "\\", "2026-11-24", "=", "<<"),
    *(".inf", "é"),
)
FULL = Job(
    "train",
    "registry.example:5000/team/train:1",
    ["python", "train.py", "--note", "yes: 'no' # 0x10", "--rate", "1e-3", ""],
    workers=3,
    servers=1,
    processes=8,
    gpus=8,
    worker_resources={"cpu": "96", "memory": "512Gi", "vpc.amazonaws.com/efa": "4"},
    server_resources={"cpu": "8", "memory": "16Gi"},
    worker_nodes={"pool": "gpu"},
    server_nodes={"pool": "cpu"},
    env={"HERRING_LOG": "info", "EMPTY": "", "WORD": "on", "COLON": "a:"},
    namespace="team",
    secret="mine",
    restarts=0,
    runtime="herring-one",
)


def printed(kind, name="train", **more):
    command = [*CLI, kind, "--name", name, "--image", "registry/train:1", "--workers", "4", "--servers", "2"]
    for option, value in more.items():
        command += [f"--{option}", value] if value is not None else [f"--{option}"]
    return subprocess.run(
        [*command, "--", "python", "train.py"], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("job", [PLAIN, FULL], ids=["plain", "full"])
def test_every_field_is_known_and_of_its_type(kind, job):
    assert strict.problems(kind, render(kind, job)) == []


def test_an_elastic_jobset_and_one_without_servers_too():
    elastic = Job("train", "image", ["python", "train.py"], workers=2, servers=1, elastic=True)
    alone = Job("train", "image", ["python", "train.py"], workers=1)
    assert strict.problems("jobset", render("jobset", elastic)) == []
    for kind in KINDS:
        assert strict.problems(kind, render(kind, alone)) == []
        assert "server" not in to_yaml(render(kind, alone)).replace("HERRING_SERVERS", "")


@pytest.mark.parametrize("kind", KINDS)
def test_the_schemas_find_a_misspelt_field_a_wrong_type_and_a_missing_one(kind):
    """Else the tests above would say nothing."""
    (right, *_) = render(kind, PLAIN)

    def pods(document):
        spec = document["spec"].get("template", document)["spec"]
        return [each["template"] for each in spec.get("replicatedJobs") or spec["tasks"]]

    for wrong in range(3):
        document = copy.deepcopy(right)
        inner = pods(document)[0]["spec"]
        pod = inner.get("template", {"spec": inner})["spec"]
        if wrong == 0:
            pod["restartpolicy"] = pod.pop("restartPolicy")
        elif wrong == 1:
            pod["containers"][0]["env"][0]["value"] = 5
        else:
            del pod["containers"][0]["image"]
        assert strict.OF_KIND[kind][0](document, "it")


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_prints_what_the_function_returns(kind):
    done = printed(kind)
    assert done.returncode == 0, done.stderr
    assert list(yaml.safe_load_all(done.stdout)) == render(kind, PLAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_yaml_gives_back_every_word(kind):
    """`yes`, `1e-3` and `a:` are other things in YAML without quotation marks."""
    assert list(yaml.safe_load_all(to_yaml(render(kind, FULL)))) == render(kind, FULL)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_means_something_in_yaml_stays_a_word(word):
    assert yaml.safe_load(to_yaml([{"a": word, "b": [word, {word: word}]}])) == {"a": word, "b": [word, {word: word}]}


def test_the_secret_itself_is_in_no_manifest():
    for kind in KINDS:
        for pod in player.pods_of(render(kind, PLAIN)):
            assert pod.environment["HERRING_SECRET"] == player.SECRET
            assert pod.secrets == {"herring-secret" if kind == "kubeflow" else "train-secret"}


def test_service_links_are_off_in_every_pod():
    """A Service that is called herring would put HERRING_PORT into each."""
    for kind in KINDS:
        text = to_yaml(render(kind, PLAIN))
        assert text.count("enableServiceLinks: false") == text.count("restartPolicy:") == 2


def test_lost_servers_do_not_end_a_jobset_and_lost_workers_do():
    (document,) = render("jobset", PLAIN)
    jobs = {each["name"]: each["template"]["spec"] for each in document["spec"]["replicatedJobs"]}
    restart = {name: job["template"]["spec"]["restartPolicy"] for name, job in jobs.items()}
    assert restart == {"workers": "Never", "servers": "OnFailure"}
    assert jobs["workers"]["backoffLimit"] == 0
    assert jobs["servers"]["backoffLimit"] > 1000
    assert document["spec"]["successPolicy"]["targetReplicatedJobs"] == ["workers"]


def test_gpus_and_efa_are_limits_and_processors_are_not():
    (document,) = render("jobset", FULL)
    (container,) = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "96", "memory": "512Gi", "vpc.amazonaws.com/efa": "4"},
        "limits": {"nvidia.com/gpu": "8", "memory": "512Gi", "vpc.amazonaws.com/efa": "4"},
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"servers": -1}, "servers is -1"),
        ({"processes": 0}, "processes is 0"),
        ({"name": "Train"}, "name is 'Train'"),
        ({"name": "train.one"}, "lower-case letters"),
        ({"name": "t" * 38}, "38 characters; at most 37"),
        ({"secret": "a b"}, "secret is 'a b'"),
        ({"command": []}, "after --"),
        ({"env": {"HERRING_HUB": "x:1"}}, "HERRING_HUB: the manifest sets it"),
        ({"env": {"RANK": "1"}}, "RANK"),
        ({"elastic": True, "processes": 2}, "elastic"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    values = {"name": "train", "image": "image", "command": ["a"], "workers": 1, **changes}
    with pytest.raises(InvalidArgumentError, match=words):
        render("jobset", Job(**values))


def test_the_command_line_refuses_in_a_sentence():
    for done, words in [
        (printed("volcano", elastic=None), "elastic jobs need kind jobset"),
        (printed("jobset", env="HERRING_LOG"), "--env HERRING_LOG: it must be NAME=VALUE"),
        (printed("jobset", name="a_b"), "name is 'a_b'"),
    ]:
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("herring kubernetes: ")
        assert words in done.stderr
        assert "Traceback" not in done.stderr
