"""HERRING_ON_HOST=nccl: what the ranks of a host do with tensors of GPUs that NCCL reduces. NCCL is the fake
accelerator's: its kernels wait for the other ranks', its calls are in progress until all ranks have made theirs, and
its order of summation is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from accelerator import IS_REAL, ROOT, build, prepare
from ranks import clean_environment, run_ranks

pytestmark = pytest.mark.skipif(IS_REAL, reason="NCCL wants a GPU for each rank")

accelerator = pytest.fixture(scope="module", autouse=True)(prepare)


def nccl(**more: str) -> dict[str, str]:
    return {"HERRING_ON_HOST": "nccl", "HERRING_NCCL": str(build()), "HERRING_DEVICE_MEMORY_BYTES": "1MB", **more}


def test_sums_of_two_ranks_have_the_bits_of_the_cpu_and_never_see_the_host() -> None:
    run_ranks(2, "cases_peers:bits", env=nccl(), timeout=120)


@pytest.mark.parametrize(("ranks", "seed"), [(3, 2), (4, 3)])
def test_sums_of_more_are_the_same_on_all_ranks(ranks: int, seed: int) -> None:
    run_ranks(ranks, "cases_peers:an_order_of_its_own", env=nccl(HERRING_TEST_SEED=str(seed)), timeout=120)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 3)])
def test_streams_wait_for_what_they_must(ranks: int, seed: int) -> None:
    run_ranks(ranks, "cases_peers:streams", env=nccl(HERRING_TEST_SEED=str(seed)), timeout=120)


@pytest.mark.parametrize(
    "case",
    [
        "lifetime",
        "ddp",
        "mismatch",
        "the_first_call_of_one_rank_is_on_the_cpu",
        "aborted",
        "one_rank_does_not_connect",
        "blocks_differ",
        "destroyed_by_one_rank_before_the_other",
    ],
)
def test_two_ranks(case: str) -> None:
    run_ranks(2, f"cases_peers:{case}", env=nccl(), timeout=120)


def test_groups_of_several_ranks() -> None:
    run_ranks(3, "cases_peers:groups", env=nccl(), timeout=120)


@pytest.mark.parametrize(
    "case",
    [
        "a_rank_is_killed",
        "a_rank_is_killed_while_a_kernel_waits_for_it",
        "a_rank_is_killed_while_kernels_of_several_groups_wait_for_it",
    ],
)
def test_a_killed_rank_is_an_error_that_names_it(case: str) -> None:
    run_ranks(2, f"cases_peers:{case}", env=nccl(), timeout=120, expect={1: -9})


def test_without_the_library() -> None:
    run_ranks(2, "cases_peers:no_library", env=nccl(HERRING_NCCL="/nowhere/libnccl.so.2"), timeout=120)


@pytest.mark.parametrize("case", ["collectives", "streams", "order_with_cpu_tensors", "refusals", "training_in_parts"])
def test_what_holds_for_tensors_on_an_accelerator_holds_here(case: str) -> None:
    run_ranks(2, f"cases_accelerator:{case}", env=nccl(HERRING_LOCAL_PART_BYTES="4096"), timeout=120)


@pytest.mark.root
def test_several_hosts() -> None:
    cluster = ["--workers", "2", "--ranks-per-host", "2", "--servers", "1", "--rate", "none", "--timeout", "100"]
    program = [sys.executable, "-c", "import cases_peers; cases_peers.hosts()"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "emulate_cluster.py"), *cluster, "--", *program],
        env=clean_environment(nccl()), capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every sum is right") == 4
