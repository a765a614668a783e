"""torch and TensorFlow in one process, imported in either order."""

from __future__ import annotations

import os
import re

import pytest
from surroundings import is_installed
from test_tensorflow import HERE, Launch

PROGRAM = "cases_with_torch.py"
CASES = re.findall(r"^def ([a-z][a-z_0-9]+)\(\) -> None:", (HERE / PROGRAM).read_text(), re.MULTILINE)
pytestmark = pytest.mark.skipif(
    not is_installed("torch") and not os.environ.get("TORCH_SITE"),
    reason="torch is not installed, nor is TORCH_SITE set",
)


@pytest.fixture(scope="module", params=["torch-first", "tensorflow-first"])
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch(tmp_path_factory.mktemp("torch"), 2, request.param, *CASES, program=PROGRAM)


@pytest.mark.parametrize("case", CASES)
def test_case(launch: Launch, case: str) -> None:
    launch.check(case)


def test_all_of_it_ended_well(launch: Launch) -> None:
    assert launch.codes == [0], launch.output[-8000:]
    assert "Traceback" not in launch.output
