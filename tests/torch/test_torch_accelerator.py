"""Tensors on an accelerator: the way through host memory runs, on a device that torch is made to believe in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerator import HERE, IS_REAL, prepare
from ranks import clean_environment, run_ranks

accelerator = pytest.fixture(scope="module", autouse=True)(prepare)


def test_every_collective_has_the_bits_of_the_cpu() -> None:
    run_ranks(2, "cases_accelerator:collectives", timeout=120)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_streams_wait_for_what_they_must(seed: int) -> None:
    run_ranks(2, "cases_accelerator:streams", env={"HERRING_TEST_SEED": str(seed)}, timeout=120)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_only_written_waits_for_earlier_kernels_too(seed: int) -> None:
    run_ranks(2, "cases_accelerator:what_is_only_written_waits_too", env={"HERRING_TEST_SEED": str(seed)}, timeout=120)


def test_calls_on_cpu_tensors_keep_their_place() -> None:
    run_ranks(2, "cases_accelerator:order_with_cpu_tensors", timeout=120)


def test_memory_lives_as_long_as_its_copies() -> None:
    run_ranks(2, "cases_accelerator:lifetime", timeout=120)


def test_bad_calls_are_sentences() -> None:
    run_ranks(2, "cases_accelerator:refusals", timeout=120)


def test_switched_off_they_are_refused_and_cpu_tensors_are_not() -> None:
    run_ranks(2, "cases_accelerator:switched_off", env={"HERRING_CUDA": "off"}, timeout=120)


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver")
def test_a_gpu_that_is_asked_for_and_not_there_is_a_sentence() -> None:
    run_ranks(1, "cases_accelerator:wanted_and_not_there", env={"HERRING_CUDA": "on"}, timeout=120)


def test_a_kernel_that_never_ends_is_a_time_out() -> None:
    run_ranks(2, "cases_accelerator:a_kernel_that_never_ends", timeout=120)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("case", ["ranks_that_wait_for_each_other", "a_late_kernel_is_no_deadlock"])
def test_ranks_that_wait_for_each_other_are_told_from_those_that_wait_for_a_gpu(case: str, where: str) -> None:
    env = {"HERRING_DEADLOCK_AFTER_S": "1", "HERRING_ON_HOST": where}
    run_ranks(2, f"cases_accelerator:{case}", env=env, timeout=120)


@pytest.mark.skipif(IS_REAL, reason="each run takes a GPU's context")
@pytest.mark.parametrize("where", ["host", "device"])
def test_a_program_that_ends_with_calls_under_way_ends_well(where: str) -> None:
    """A thread that wants the interpreter's lock when that ends took the process down, in one run of six."""
    command = [sys.executable, "-m", "herring._launch", "-np", "3", sys.executable, str(HERE / "script_ends.py")]
    for _ in range(6):
        done = subprocess.run(
            command, env=clean_environment({"HERRING_ON_HOST": where}), capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


PARTS = {"HERRING_LOCAL_PART_BYTES": "4096"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parts_have_the_bits_of_the_cpu(seed: int) -> None:
    run_ranks(2, "cases_accelerator:parts", env={**PARTS, "HERRING_TEST_SEED": str(seed)}, timeout=120)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parts_wait_for_what_they_must(seed: int) -> None:
    run_ranks(2, "cases_accelerator:parts_of_late_tensors", env={**PARTS, "HERRING_TEST_SEED": str(seed)}, timeout=120)


@pytest.mark.parametrize(
    "case",
    [
        "parts_of_ranks_with_and_without_a_gpu",
        "parts_are_dropped",
        "host_memory_is_the_arenas",
        "a_part_that_never_comes",
        "parts_that_others_disagree_about",
        "training_in_parts",
        "callbacks_that_wait",
        "hooks_in_order",
    ],
)
def test_parts(case: str) -> None:
    run_ranks(2, f"cases_accelerator:{case}", env=PARTS, timeout=120)


def test_more_tensors_than_the_arena_holds() -> None:
    env = {"HERRING_ARENA_BYTES": "16MB", "HERRING_LOCAL_PART_BYTES": "65536"}
    run_ranks(2, "cases_accelerator:more_than_the_arena", env=env, timeout=120)


def test_a_group_ends_while_copies_are_under_way() -> None:
    run_ranks(2, "cases_accelerator:a_group_ends_while_copies_are_under_way", timeout=120)


def test_the_benchmark_measures_tensors_there() -> None:
    run_ranks(2, "cases_accelerator:benchmark", timeout=120)


def test_the_backend_serves_both_devices_and_changes_nobodys_default() -> None:
    import herring.torch  # noqa: F401

    assert dist.Backend.backend_capability["herring"] == ["cpu", "cuda"]
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl", "nobody else's default is changed"


def test_herring_on_the_cpu_beside_nccl_is_still_said_so() -> None:
    import herring.torch  # noqa: F401

    config = dist.BackendConfig(dist.Backend("cpu:herring,cuda:nccl"))
    assert config.get_device_backend_map() == {"cpu": "herring", "cuda": "nccl"}
    both = dist.BackendConfig(dist.Backend("herring")).get_device_backend_map()
    assert both == {"cpu": "herring", "cuda": "herring"}
    assert torch.distributed.is_available()
