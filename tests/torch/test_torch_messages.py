"""Point-to-point messages and the collectives made of them, each against gloo in the same processes."""

from __future__ import annotations

import pytest
from ranks import run_ranks


@pytest.mark.parametrize("size", [2, 4])
def test_messages_are_what_gloo_delivers(size: int) -> None:
    run_ranks(size, "cases_messages:from_rank_to_rank", timeout=180)


@pytest.mark.parametrize("size", [1, 3])
def test_collectives_are_what_gloo_gives(size: int) -> None:
    run_ranks(size, "cases_messages:collectives", timeout=180)


def test_coalescing_managers() -> None:
    run_ranks(3, "cases_messages:coalesced")


def test_any_layout_and_uneven_lists() -> None:
    run_ranks(3, "cases_messages:more_than_gloo")


def test_groups_are_apart() -> None:
    run_ranks(3, "cases_messages:groups")


def test_works_futures_and_profiler() -> None:
    run_ranks(2, "cases_messages:works")


def test_errors_name_rank_bytes_and_tag() -> None:
    run_ranks(2, "cases_messages:errors")


def test_large_messages() -> None:
    run_ranks(3, "cases_messages:large")


def test_over_the_network() -> None:
    """The same without shared memory: every message crosses the second endpoint."""
    network = {"HERRING_INTRA_NODE": "off"}
    run_ranks(3, "cases_messages:from_rank_to_rank", timeout=180, env=network)
    run_ranks(3, "cases_messages:collectives", timeout=180, env=network)
    run_ranks(2, "cases_messages:errors", env=network)
    run_ranks(3, "cases_messages:large", env=network)
