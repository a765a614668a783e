"""HERRING_GPUDIRECT: whole jobs of real ranks and servers on emulated hosts, with tensors on the fake accelerator and
network cards that are strict about its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import strict_fabric
from accelerator import IS_REAL, ROOT, prepare
from ranks import HERE, clean_environment

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(IS_REAL, reason="emulated hosts and cards are for machines without a GPU"),
]

accelerator = pytest.fixture(scope="module", autouse=True)(prepare)


@pytest.fixture(scope="module")
def cards() -> dict[str, str]:
    found = strict_fabric.settings()
    if found is None:
        pytest.skip("no libfabric is installed")
    return found


def run(case: str, settings: dict[str, str], *, workers: int = 2, servers: int = 2, per_host: int = 1, arguments=()):
    options = ["--workers", str(workers), "--ranks-per-host", str(per_host), "--servers", str(servers)]
    program = [sys.executable, str(HERE / "cases_direct.py"), case, *arguments]
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "emulate_cluster.py"), *options, "--rate", "none", "--timeout", "90",
         "--", *program],
        env=clean_environment(settings), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def run_here(case: str, settings: dict[str, str], *options: str, arguments=()):
    """Two ranks, and servers where `options` say so, all on this host."""
    program = [sys.executable, str(HERE / "cases_direct.py"), case, *arguments]
    return subprocess.run(
        [sys.executable, "-m", "herring._launch", "-np", "2", *options, "--", *program],
        env=clean_environment(settings), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def expect_well(done, ranks: int) -> None:
    assert done.stdout.count("all is well") == ranks, done.stdout[-4000:] + done.stderr[-8000:]


@pytest.mark.parametrize(
    ("case", "failover"), [("bits", "auto"), ("bits", "off"), ("streams", "auto"), ("ddp", "auto"), ("ddp", "off")]
)
def test_the_card_has_the_tensor_and_the_host_has_not(cards: dict[str, str], case: str, failover: str) -> None:
    done = run(case, {**cards, "HERRING_FAILOVER": failover})
    expect_well(done, 2)
    assert done.returncode == 0


def test_ranks_that_stage_and_ranks_on_the_cpu_take_part(cards: dict[str, str]) -> None:
    expect_well(run("mixed", cards, workers=3, servers=3), 3)


def test_chunks_that_travel_together_and_alone(cards: dict[str, str]) -> None:
    expect_well(run("bits", {**cards, "HERRING_CHUNK_BYTES": "16KB", "HERRING_EAGER_BYTES": "4KB"}), 2)


def test_a_kernel_that_does_not_end_is_a_time_out(cards: dict[str, str]) -> None:
    expect_well(run("a_kernel_that_never_ends", cards), 2)


def test_a_killed_rank_is_an_error_that_names_it(cards: dict[str, str]) -> None:
    expect_well(run("a_rank_is_killed", cards), 1)


def test_a_server_that_dies_costs_no_bit(cards: dict[str, str]) -> None:
    done = run("a_server_dies", {**cards, "HERRING_DEAD_AFTER_S": "2"}, servers=3)
    expect_well(done, 2)


def test_memory_that_a_lost_server_may_still_write_to_is_not_used_again(cards: dict[str, str]) -> None:
    settings = {"HERRING_DEAD_AFTER_S": "2", "STRICT_FABRIC_LACKS": "cancel"}
    expect_well(run("a_server_dies_and_the_card_goes_on", {**cards, **settings}, servers=3), 2)


REASONS = {
    "embedded": ({}, {"servers": 0}, "embedded in workers"),
    "fewer servers": ({}, {"servers": 1}, "Start at least as many server hosts as worker hosts"),
    "two ranks on a host": ({}, {"per_host": 2}, "the group has 2 ranks on this host"),
    "checksums": ({"HERRING_CHECKSUM": "on"}, {}, "HERRING_CHECKSUM is on"),
    "no such card": ({"STRICT_FABRIC_LACKS": "hmem"}, {}, "takes no GPU memory (fi_getinfo with FI_HMEM"),
    "out of reach": ({"STRICT_FABRIC_LACKS": "p2p"}, {}, "fi_setopt"),
    "refused": ({"STRICT_FABRIC_LACKS": "register"}, {}, "fi_mr_regattr of"),
    "builtin": ({"HERRING_PROVIDER": "builtin"}, {}, "builtin tcp takes no GPU memory"),
}


# A reason before the first call, and one at it, do for "auto".
@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "on") for name in REASONS), ("two ranks on a host", "auto"), ("refused", "auto")]
)
def test_where_it_cannot_be(cards: dict[str, str], name: str, mode: str) -> None:
    settings, shape, why = REASONS[name]
    done = run("impossible", {**cards, **settings, "HERRING_GPUDIRECT": mode}, arguments=[why], **shape)
    ranks = 2 * shape.get("per_host", 1)
    expect_well(done, ranks)
    if mode == "auto":
        said = [line for line in done.stderr.splitlines() if "without GPUDirect" in line]
        assert len(said) == ranks, done.stderr
        assert all(why in line for line in said)


ONE_HOST = {
    "a server on this host": ({"HERRING_INTRA_NODE": "off"}, ["--servers", "2"], "runs on the host of rank"),
    "elastic": ({}, ["--elastic"], "the job is elastic: its ranks keep operations in host memory"),
}


def expect_an_error_and_a_warning(done, why: str) -> None:
    """Of rank 0 and rank 1, which know it by themselves."""
    expect_well(done, 2)
    said = [line for line in done.stderr.splitlines() if "without GPUDirect" in line]
    assert len(said) == 1, done.stderr
    assert "rank 1 in process group" in said[0]
    assert why in said[0]


def test_where_it_cannot_be_with_backup_workers(cards: dict[str, str]) -> None:
    why = "HERRING_BACKUP_WORKERS is not 0"
    done = run("impossible_both_ways", {**cards, "HERRING_BACKUP_WORKERS": "1"}, arguments=[why])
    expect_an_error_and_a_warning(done, why)


@pytest.mark.parametrize("name", ONE_HOST)
def test_where_it_cannot_be_on_one_host(cards: dict[str, str], name: str) -> None:
    settings, options, why = ONE_HOST[name]
    done = run_here("impossible_both_ways", {**cards, **settings}, *options, arguments=[why])
    expect_an_error_and_a_warning(done, why)
