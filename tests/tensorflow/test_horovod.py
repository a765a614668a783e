"""Horovod's TensorFlow and Keras names on several ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from surroundings import clean_environment
from test_tensorflow import HERE, Launch, LaunchByHand

LONG = pytest.mark.skipif("TENSORFLOW_LONG" not in os.environ, reason="make test-tensorflow-long runs it")
OPERATIONS, TRAINING = "cases_hvd.py", "cases_hvd_training.py"


def cases_of(program: str) -> list[str]:
    cases = re.findall(r"^def ([a-z][a-z_0-9]+)\(\) -> None:", (HERE / program).read_text(), re.MULTILINE)
    return [each for each in cases if each != "one_thread"]


@pytest.fixture(scope="module", params=[(2, 0), (4, 1)], ids=["2-ranks", "4-ranks-1-server"])
def operations(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    size, servers = request.param
    return Launch(
        tmp_path_factory.mktemp("operations"), size, *cases_of(OPERATIONS), servers=servers, program=OPERATIONS
    )


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=LONG)], ids=["2-ranks", "4-ranks"])
def training(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch(tmp_path_factory.mktemp("training"), request.param, *cases_of(TRAINING), program=TRAINING)


@pytest.mark.parametrize("case", cases_of(OPERATIONS))
def test_operations(operations: Launch, case: str) -> None:
    operations.check(case)


@pytest.mark.parametrize("case", cases_of(TRAINING))
def test_training(training: Launch, case: str) -> None:
    training.check(case)


def test_tapes_and_fit_on_4_ranks(tmp_path: Path) -> None:
    cases = ["tape", "partial_tape_and_optimizer", "sagemakers_tape", "many_gradients", "fit_with_keras_3"]
    launch = Launch(tmp_path, 4, *cases, program=TRAINING)
    for case in cases:
        launch.check(case)
    assert launch.codes == [0], launch.output[-8000:]


def test_all_of_it_ended_well(operations: Launch, training: Launch) -> None:
    for launch in (operations, training):
        assert launch.codes == [0], launch.output[-8000:]
        assert "Traceback" not in launch.output


def test_one_inter_op_thread_is_enough(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 2, "one_thread", program=OPERATIONS)
    launch.check("one_thread")
    assert launch.codes == [0], launch.output[-8000:]


def test_a_job_of_one_process(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 1, "every_op", "gathers", "exchanges", "scatters", "objects", program=OPERATIONS)
    assert launch.codes == [0], launch.output[-8000:]


def test_a_dead_rank_is_named_to_the_others_at_once(tmp_path: Path) -> None:
    launch = LaunchByHand(tmp_path, 3, "_dead_rank", program=TRAINING)
    launch.check("_dead_rank", ranks=2)
    assert launch.codes == [0, 0, 9], launch.output[-8000:]


def test_keras_2_without_eager_execution(tmp_path: Path) -> None:
    name = "_keras_2_without_eager_execution"
    launch = LaunchByHand(tmp_path, 2, name, program=TRAINING, settings={"TF_USE_LEGACY_KERAS": "1"})
    launch.check(name)
    assert launch.codes == [0, 0], launch.output[-8000:]


def test_a_rank_that_skips_a_variable(tmp_path: Path) -> None:
    launch = LaunchByHand(tmp_path, 2, "_a_rank_that_skips_a_variable", program=TRAINING)
    launch.check("_a_rank_that_skips_a_variable")


@pytest.mark.parametrize("mode", ["reduce", pytest.param("gather", marks=LONG)])
def test_elastic_training_shrinks_and_grows(tmp_path: Path, mode: str) -> None:
    """A process is killed, the others go on in the graphs that they have, another one comes in."""
    launcher = ["-m", "herring._launch", "-np", "3", "--elastic", "--restart-workers", "1"]
    done = subprocess.run(
        [sys.executable, *launcher, sys.executable, str(HERE / "script_elastic.py"), str(tmp_path / "mark"), mode],
        env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same on 3") == 3, done.stdout + done.stderr
