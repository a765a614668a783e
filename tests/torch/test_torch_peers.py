"""HERRING_ON_HOST=device: what the ranks of a host do with tensors of GPUs that they reduce on the GPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from accelerator import IS_REAL, ROOT, prepare
from ranks import clean_environment, run_ranks

DEVICE = {"HERRING_ON_HOST": "device", "HERRING_DEVICE_MEMORY_BYTES": "1MB"}


accelerator = pytest.fixture(scope="module", autouse=True)(prepare)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_sums_have_the_bits_of_the_cpu_and_never_see_the_host(ranks: int, seed: int) -> None:
    run_ranks(ranks, "cases_peers:bits", env={**DEVICE, "HERRING_TEST_SEED": str(seed)}, timeout=120)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (2, 2), (3, 3)])
def test_streams_wait_for_what_they_must(ranks: int, seed: int) -> None:
    run_ranks(ranks, "cases_peers:streams", env={**DEVICE, "HERRING_TEST_SEED": str(seed)}, timeout=120)


@pytest.mark.parametrize(
    "case",
    [
        "lifetime",
        "ddp",
        "mismatch",
        "one_rank_has_it_on_the_cpu",
        "the_first_call_of_one_rank_is_on_the_cpu",
        "settings_differ",
        "aborted",
    ],
)
def test_two_ranks(case: str) -> None:
    run_ranks(2, f"cases_peers:{case}", env=DEVICE, timeout=120)


def test_groups_of_several_ranks() -> None:
    run_ranks(3, "cases_peers:groups", env=DEVICE, timeout=120)


def test_a_killed_rank_is_an_error_that_names_it() -> None:
    run_ranks(2, "cases_peers:a_rank_is_killed", env=DEVICE, timeout=120, expect={1: -9})


@pytest.mark.skipif(IS_REAL, reason="a real GPU shares its memory")
@pytest.mark.parametrize("mode", ["device", "auto"])
def test_a_rank_that_cannot_share_memory(mode: str) -> None:
    said = run_ranks(2, "cases_peers:one_rank_cannot", env={**DEVICE, "HERRING_ON_HOST": mode}, timeout=120)
    if mode == "auto":
        assert "process group '0' is reduced on the host: rank 1 cannot share memory of its GPU" in said[0]
        assert "process group '0' is reduced on the host: this fake shares no memory" in said[1]


@pytest.mark.parametrize(
    "case",
    [
        "collectives",
        "streams",
        "order_with_cpu_tensors",
        "refusals",
        "a_kernel_that_never_ends",
        "a_group_ends_while_copies_are_under_way",
        "training_in_parts",
        "callbacks_that_wait",
        "hooks_in_order",
    ],
)
def test_what_holds_for_tensors_on_an_accelerator_holds_here(case: str) -> None:
    run_ranks(2, f"cases_accelerator:{case}", env={**DEVICE, "HERRING_LOCAL_PART_BYTES": "4096"}, timeout=120)


@pytest.mark.root
@pytest.mark.skipif(IS_REAL, reason="emulated hosts are for machines with iproute2")
@pytest.mark.parametrize("servers", [0, 2])
def test_several_hosts_have_the_bits_of_the_cpu(servers: int) -> None:
    cluster = [
        "--workers",
        "2",
        "--ranks-per-host",
        "2",
        "--servers",
        str(servers),
        "--rate",
        "none",
        "--timeout",
        "100",
    ]
    program = [sys.executable, "-c", "import cases_peers; cases_peers.hosts()"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "emulate_cluster.py"), *cluster, "--", *program],
        env=clean_environment(DEVICE), capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every sum is right") == 4
