"""Horovod's torch API on tensors of a GPU, on a device that torch is made to believe in: users who change one import
lose no result, and hear of what does not work."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerator import prepare
from horovod_job import cases_of, check, launch

accelerator = pytest.fixture(scope="module", autouse=True)(prepare)


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


BY_NAME = """
import os, sys
sys.path[:0] = [{tests!r}]
import torch
from accelerator import DEVICE, load
load()
import herring.horovod.torch as hvd
hvd.init()
tensors = [torch.full((100,), 1.0).to(DEVICE) for _ in range(50)]
def step(number):
    handles = [hvd.allreduce_async_(each, name=f"grad.{{i}}", op=hvd.Sum) for i, each in enumerate(tensors)]
    {between}
    return [hvd.synchronize(each) for each in handles]
"""


def _by_name(between: str, body: str) -> str:
    tests = str(Path(__file__).resolve().parents[1] / "torch")
    return BY_NAME.format(tests=tests, between=between) + body


@pytest.mark.parametrize("turn", range(3))
def test_a_program_that_ends_without_shutdown_ends_well(tmp_path: Path, turn: int) -> None:
    """Threads of the binding still drop what is Python's when Python ends."""
    done = launch(tmp_path, _by_name("pass", "for number in range(3): step(number)\n"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate" not in done.stderr


def test_a_program_that_ends_with_tensors_under_way_ends_well(tmp_path: Path) -> None:
    done = launch(tmp_path, _by_name("return", "for number in range(1): step(number)\n"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "terminate" not in done.stderr


def test_a_rank_that_dies_is_named_with_the_tensor(tmp_path: Path) -> None:
    body = """
for number in range(10):
    try:
        step(number)
    except hvd.HorovodInternalError as error:
        assert "allreduce.grad." in str(error) and "worker 1" in str(error), error
        print("named", flush=True)
        raise SystemExit(3)
"""
    done = launch(tmp_path, _by_name("if number == 5 and hvd.rank() == 1: os._exit(9)", body))
    assert done.returncode != 0
    assert "named" in done.stdout, done.stdout + done.stderr


def test_a_nan_is_blamed_on_its_tensor_and_the_others_are_summed(tmp_path: Path) -> None:
    body = """
bad = torch.full((100,), float("nan") if hvd.rank() == 1 else 1.0).to(DEVICE)
handles = [hvd.allreduce_async_(each, name=f"grad.{i}", op=hvd.Sum) for i, each in enumerate([*tensors, bad])]
for i, handle in enumerate(handles):
    try:
        hvd.synchronize(handle)
        assert i != 50
    except hvd.HorovodInternalError as error:
        assert i == 50 and "grad.50" in str(error) and "rank 1" in str(error), (i, error)
assert all(each.cpu().eq(2).all() for each in tensors)
assert bad.cpu().isnan().all() == (hvd.rank() == 1), "it is what it was"
print("well", flush=True)
"""
    done = launch(tmp_path, _by_name("pass", body), HERRING_CHECK_FINITE="on")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("well") == 2
