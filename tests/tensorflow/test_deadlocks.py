"""Ranks that wait for each other under different names: an error on all of them within seconds, and no false alarm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_tensorflow import HERE, LaunchByHand

PROGRAM = "cases_deadlock.py"
CASES = re.findall(r"^def ([a-z][a-z_0-9]+)\(\) -> None:", (HERE / PROGRAM).read_text(), re.MULTILINE)
SETTINGS = {"HERRING_DEADLOCK_AFTER_S": "0.5", "HERRING_TIMEOUT_S": "100"}


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LaunchByHand:
    return LaunchByHand(tmp_path_factory.mktemp("deadlock"), request.param, *CASES, program=PROGRAM, settings=SETTINGS)


@pytest.mark.parametrize("case", CASES)
def test_case(launch: LaunchByHand, case: str) -> None:
    launch.check(case)


def test_all_of_it_ended_well(launch: LaunchByHand) -> None:
    assert launch.codes == [0] * launch.size, launch.output[-8000:]


def test_a_script_that_catches_nothing_ends_with_an_exit_code(tmp_path: Path) -> None:
    launch = LaunchByHand(tmp_path, 2, "_nothing_is_caught", program=PROGRAM, settings=SETTINGS)
    assert launch.codes == [1, 1], launch.output[-8000:]
    assert launch.output.count("ranks wait for each other") >= 2, launch.output[-8000:]
