"""Ranks that disagree, join, or do not come: errors that say who, on every rank, and a job that goes on."""

from __future__ import annotations

import pytest
from horovod_job import cases_of, check


@pytest.mark.parametrize("case", cases_of("cases_horovod_errors"))
def test_on_three_ranks(case: str) -> None:
    check("cases_horovod_errors", 3, case)


@pytest.mark.parametrize("case", cases_of("cases_horovod_timeouts"))
def test_with_a_short_time_out(case: str) -> None:
    check("cases_horovod_timeouts", 2, case, (("HERRING_TIMEOUT_S", "2"),))
