"""Horovod's collectives: values, names in any order, process sets, gradients, through shared memory and servers."""

from __future__ import annotations

import pytest
from horovod_job import cases_of, check

CASES = "cases_horovod_ops"
NETWORK = (("HERRING_INTRA_NODE", "off"), ("HERRING_INTERFACE", "lo"))


@pytest.mark.parametrize("case", cases_of(CASES))
def test_on_three_ranks(case: str) -> None:
    check(CASES, 3, case)


@pytest.mark.parametrize("case", [each for each in cases_of(CASES) if "process_sets" not in each])
def test_on_two_ranks_through_servers(case: str) -> None:
    check(CASES, 2, case, NETWORK)
