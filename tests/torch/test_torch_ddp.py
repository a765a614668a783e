"""DistributedDataParallel trains what one process trains on the joined batch, with the same bits on every rank."""

from __future__ import annotations

import pytest
from ranks import run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_one_process_on_the_joined_batch(size: int) -> None:
    run_ranks(size, "cases_ddp:equals_single_process", timeout=180)


def test_gradients_live_in_the_runtimes_memory() -> None:
    run_ranks(2, "cases_ddp:buckets_are_ours")


def test_no_sync_accumulates() -> None:
    run_ranks(2, "cases_ddp:accumulation")


def test_stock_communication_hooks_work() -> None:
    run_ranks(2, "cases_ddp:hooks", timeout=180)


@pytest.mark.parametrize("ranks", [2, 4])
def test_hooks_that_call_collectives_in_callbacks_work_with_several_buckets(ranks: int) -> None:
    run_ranks(ranks, "cases_ddp:hooks_with_callbacks", timeout=180)


def test_a_hooks_own_error_comes_out_of_backward() -> None:
    run_ranks(2, "cases_ddp:a_hook_that_fails", timeout=120)


def test_join_with_uneven_inputs() -> None:
    run_ranks(2, "cases_ddp:uneven_inputs")


def test_state_and_pickles_move_between_ours_and_torchs() -> None:
    run_ranks(2, "cases_ddp:state_moves")


def test_it_creates_the_process_group_where_there_is_none() -> None:
    run_ranks(2, "cases_ddp:without_a_group")


def test_training_through_servers_alone() -> None:
    run_ranks(2, "cases_ddp:equals_single_process", timeout=240, env={"HERRING_INTRA_NODE": "off"})


def test_what_is_not_finite_is_named_as_the_module_names_it() -> None:
    run_ranks(3, "cases_ddp:names_what_is_not_finite", env={"HERRING_CHECK_FINITE": "on"})


def test_a_hook_of_the_users_takes_the_place_of_ours() -> None:
    run_ranks(2, "cases_ddp:keeps_the_users_hook", env={"HERRING_CHECK_FINITE": "on"})
