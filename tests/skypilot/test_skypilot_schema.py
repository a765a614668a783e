"""SkyPilot itself reads the task."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("sky", reason="SkyPilot is not installed: make test-skypilot")

import sky
from sky.utils import common_utils, schemas

FILE = Path(__file__).resolve().parents[2] / "examples" / "skypilot" / "train.yaml"


def check(task: dict) -> None:
    common_utils.validate_schema(task, schemas.get_task_schema(), "train.yaml: ")


def test_its_schema_takes_the_task():
    check(yaml.safe_load(FILE.read_text()))


@pytest.mark.parametrize("wrong", [{"num_node": 4}, {"num_nodes": "four"}, {"secret": {}}])
def test_the_schema_finds_mistakes(wrong):
    with pytest.raises(ValueError, match=r"train\.yaml"):
        check({**yaml.safe_load(FILE.read_text()), **wrong})


def test_it_becomes_a_task_of_four_nodes_with_the_secret():
    task = sky.Task.from_yaml_config(yaml.safe_load(FILE.read_text()), secrets_overrides=[("HERRING_SECRET", "x")])
    assert task.num_nodes == 4
    assert list(task.secrets) == ["HERRING_SECRET"]
