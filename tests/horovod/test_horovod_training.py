"""Horovod's training helpers: each trains what one process trains on all ranks' data."""

from __future__ import annotations

import pytest
from horovod_job import cases_of, check


@pytest.mark.parametrize("case", cases_of("cases_horovod_training"))
def test_on_two_ranks(case: str) -> None:
    check("cases_horovod_training", 2, case)


def test_adasum_on_four_ranks() -> None:
    check("cases_horovod_training", 4, "case_adasum", alone=True)
