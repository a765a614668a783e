"""Every collective of the backend against a reference that each rank works out by itself."""

from __future__ import annotations

import pytest
from ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_gives_what_the_operator_says_for_every_dtype(size: int) -> None:
    run_ranks(size, "cases_collectives:all_reduce", timeout=240)


def test_any_layout_and_calling_style_reduces_in_place() -> None:
    run_ranks(3, "cases_collectives:layouts_and_odd_calls")


@pytest.mark.parametrize("size", [1, 3])
def test_moves_bring_the_same_bits(size: int) -> None:
    run_ranks(size, "cases_collectives:moves", timeout=180)


def test_futures_may_block_on_collectives_and_work_may_be_dropped() -> None:
    run_ranks(3, "cases_collectives:futures")


def test_the_profiler_shows_collectives_by_name() -> None:
    run_ranks(2, "cases_collectives:profiler")


def test_bad_arguments_are_refused_by_name_and_the_group_lives_on() -> None:
    run_ranks(2, "cases_collectives:refusals")


def test_large_tensors() -> None:
    run_ranks(2, "cases_collectives:sizes_that_matter")


def test_every_dtype_through_servers_alone() -> None:
    """The same without shared memory: every byte crosses the network hops."""
    run_ranks(2, "cases_collectives:all_reduce", timeout=280, env={"HERRING_INTRA_NODE": "off"})
