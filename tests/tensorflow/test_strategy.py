"""HerringStrategy on several ranks: against one process, and what Keras and TensorFlow do around it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from surroundings import clean_environment
from test_tensorflow import HERE, Launch, LaunchByHand

CASES = re.findall(r"^def ([a-z][a-z_0-9]+)\(\) -> None:", (HERE / "cases_strategy.py").read_text(), re.MULTILINE)
CASES.remove("one_thread")


@pytest.fixture(scope="module", params=[(2, 0), (4, 1)], ids=["2-ranks", "4-ranks-1-server"])
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    size, servers = request.param
    return Launch(tmp_path_factory.mktemp("strategy"), size, *CASES, servers=servers, program="cases_strategy.py")


@pytest.mark.parametrize("case", CASES)
def test_case(launch: Launch, case: str) -> None:
    launch.check(case)


def test_all_of_it_ended_well(launch: Launch) -> None:
    assert launch.codes == [0], launch.output[-8000:]
    assert "Traceback" not in launch.output


def test_a_job_of_one_process(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 1, *CASES, program="cases_strategy.py")
    assert launch.codes == [0], launch.output[-8000:]


def test_a_dead_rank_ends_fit_on_all(tmp_path: Path) -> None:
    launch = LaunchByHand(tmp_path, 3, "_dead_rank_in_fit", program="cases_strategy.py")
    launch.check("_dead_rank_in_fit", ranks=2)
    assert launch.codes == [0, 0, 9], launch.output[-8000:]


def test_one_inter_op_thread_is_enough(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 2, "one_thread", program="cases_strategy.py")
    launch.check("one_thread")
    assert launch.codes == [0], launch.output[-8000:]


def test_a_lost_server_costs_no_step_of_fit(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 2, "_lost_server_in_fit", servers=2, program="cases_strategy.py")
    launch.check("_lost_server_in_fit")
    assert launch.codes == [0], launch.output[-8000:]
    assert "is lost" in launch.output


def test_the_example_learns(tmp_path: Path) -> None:
    example = HERE.parents[1] / "examples" / "tensorflow_strategy.py"
    command = [sys.executable, "-m", "herring._launch", "-np", "2", sys.executable, str(example)]
    done = subprocess.run(
        command, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^accuracy ([\d.]+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert float(found[1]) > 0.9
