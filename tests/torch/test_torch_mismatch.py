"""Ranks that call different collectives, or leave with something pending: errors that say so, in seconds."""

from __future__ import annotations

import sys

import pytest
from ranks import clean_environment, run_children, run_ranks

PLACES = {"memory": {}, "network": {"HERRING_INTRA_NODE": "off"}}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [2, 3])
def test_every_pair_of_collectives_is_named(size: int, place: str) -> None:
    run_ranks(size, "cases_mismatch:every_pair", env=PLACES[place])


@pytest.mark.parametrize("place", PLACES)
def test_who_comes_late_is_no_mismatch(place: str) -> None:
    run_ranks(3, "cases_mismatch:late_is_no_mismatch", env=PLACES[place])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", ["receive", "apart", "composed", "one"])
def test_destroying_does_not_wait_for_what_never_ends(case: str, place: str) -> None:
    run_ranks(2, "cases_mismatch:destroy_in_time", case, env=PLACES[place])


def _run_elastic(size: int, case: str, env: dict[str, str]) -> str:
    launch = [sys.executable, "-m", "herring._launch", "-np", str(size), "--elastic"]
    program = f"import cases_mismatch; cases_mismatch.{case}()"
    return run_children([([*launch, sys.executable, "-c", program], clean_environment(env))], 120)[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("size", [2, 3])
def test_every_pair_is_named_in_an_elastic_job(size: int, place: str) -> None:
    _run_elastic(size, "every_pair", PLACES[place])


@pytest.mark.parametrize("place", PLACES)
def test_who_calls_only_after_a_loss_is_told(place: str) -> None:
    output = _run_elastic(3, "late_after_a_loss", PLACES[place])
    assert output.count("told in time") == 2, output
