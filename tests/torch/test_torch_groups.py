"""Life of process groups: several at once, again and again, and what happens when ranks disagree or go away."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks


def test_overlapping_groups_do_not_mix() -> None:
    run_ranks(3, "cases_groups:several_groups")


def test_init_and_destroy_leave_nothing_behind(tmp_path: Path) -> None:
    run_ranks(2, "cases_groups:again_and_again", 30, tmp_path, timeout=200)


def test_ranks_that_disagree_all_get_an_error_that_says_who_said_what() -> None:
    run_ranks(3, "cases_groups:disagreement")


def test_a_rank_that_never_comes_is_named() -> None:
    run_ranks(3, "cases_groups:absent_rank")


def test_a_member_that_never_creates_the_group_is_named_in_time() -> None:
    run_ranks(3, "cases_groups:absent_member")


def test_abort_of_a_sub_group_ends_that_group_alone() -> None:
    run_ranks(3, "cases_groups:aborted_sub_group")


@pytest.mark.parametrize("intra_node", ["auto", "off"])
def test_destroy_does_not_wait_for_a_rank_that_will_not_come(intra_node: str) -> None:
    run_ranks(2, "cases_groups:destroyed_while_pending", env={"HERRING_INTRA_NODE": intra_node})


def test_pending_calls_on_one_memory_go_in_call_order() -> None:
    run_ranks(4, "cases_groups:overlapping_memory")


def test_a_sub_group_may_use_herring_while_the_default_group_uses_gloo() -> None:
    run_ranks(3, "cases_groups:sub_group_of_gloo")


def test_torch_and_numpy_share_one_runtime(tmp_path: Path) -> None:
    run_ranks(2, "cases_groups:beside_the_numpy_api", tmp_path)


def test_a_script_that_just_ends_ends_well() -> None:
    outputs = run_ranks(2, "cases_groups:no_goodbye")
    assert all("ended" in output for output in outputs)


def test_a_forked_child_is_told_so() -> None:
    run_ranks(2, "cases_groups:forked_child")


def test_a_process_that_dies_is_named_to_the_others() -> None:
    run_ranks(3, "cases_groups:dies", 1, expect={0: 3, 1: 17, 2: 3})


def test_threads_may_use_a_group_each() -> None:
    run_ranks(2, "cases_groups:from_many_threads")


def test_a_file_store_that_an_earlier_run_left_behind(tmp_path: Path) -> None:
    """torch leaves it where a run crashed, and where two processes end at the same moment."""
    file = tmp_path / "store"
    run_ranks(3, "cases_groups:over_a_file", file, "leaves")
    assert file.exists(), "nothing was left behind"
    run_ranks(3, "cases_groups:over_a_file", file, "cleans", timeout=30)
