"""What a DistributedDataParallel drop-in honours: arguments, stock hooks, join, mixed precision, compression."""

from __future__ import annotations

from ranks import run_ranks


def test_every_argument_trains_as_one_process_does() -> None:
    run_ranks(2, "cases_ddp_contract:arguments", timeout=180)


def test_the_other_stock_hooks() -> None:
    run_ranks(2, "cases_ddp_contract:hooks", timeout=180)


def test_mixed_precision_join_compile_and_errors() -> None:
    run_ranks(2, "cases_ddp_contract:behaviour", timeout=240)


def test_sixteen_bits_on_the_wire_cost_less_than_in_a_ring() -> None:
    run_ranks(4, "cases_ddp_contract:compression", timeout=180)
