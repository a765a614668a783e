"""Horovod's torch API on tensors of a GPU, on a device that torch is made to believe in: users who change one import
lose no result, and hear of what does not work."""

from __future__ import annotations

import subprocess

import pytest
from accelerator import prepare
from horovod_job import cases_of, check


@pytest.fixture(scope="module", autouse=True)
def accelerator() -> None:
    """Compiled before ranks with a time limit want it."""
    try:
        prepare()
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the fake accelerator does not compile: {error}")


@pytest.mark.parametrize("case", cases_of("cases_horovod_device"))
@pytest.mark.parametrize("size", [2, 3])
def test_on_several_ranks(case: str, size: int) -> None:
    check("cases_horovod_device", size, case, (("HERRING_TEST_SEED", str(size)),))


def test_a_kernel_that_never_ends_is_a_time_out() -> None:
    settings = (("HERRING_TIMEOUT_S", "2"),)
    check("cases_horovod_device_alone", 2, "case_a_kernel_that_never_ends_is_a_time_out", settings, alone=True)


@pytest.mark.parametrize(
    "case",
    [
        "the_job_ends_while_a_copy_back_is_under_way",
        "two_threads_begin_at_once",
        "jobs_that_follow_each_other_leave_no_thread",
    ],
)
@pytest.mark.parametrize("fusion", ["0", "16MB"])
def test_threads_and_ends(case: str, fusion: str) -> None:
    check("cases_horovod_device_alone", 2, f"case_{case}", (("HERRING_FUSION_BYTES", fusion),), alone=True)


def test_switched_off_they_are_refused_and_cpu_tensors_are_not() -> None:
    settings = (("HERRING_CUDA", "off"),)
    check("cases_horovod_device_alone", 2, "case_switched_off_they_are_refused", settings, alone=True)
