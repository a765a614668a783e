"""What torch builds on process groups works on backend herring, and gives what one process gives."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks


def test_sparse_all_reduce_and_monitored_barrier() -> None:
    run_ranks(4, "cases_surface:sparse_and_monitored")


def test_meshes_dtensor_fsdp_zero_and_checkpoints(tmp_path: Path) -> None:
    run_ranks(4, "cases_surface:meshes_and_shards", tmp_path, timeout=200)


def test_pipelines() -> None:
    run_ranks(2, "cases_surface:pipelines", timeout=120)
