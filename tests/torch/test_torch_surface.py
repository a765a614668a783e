"""What torch builds on process groups works on backend herring, and gives what one process gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ranks import clean_environment, run_children, run_ranks


def test_sparse_all_reduce_and_monitored_barrier() -> None:
    run_ranks(4, "cases_surface:sparse_and_monitored")


def test_meshes_dtensor_fsdp_zero_and_checkpoints(tmp_path: Path) -> None:
    run_ranks(4, "cases_surface:meshes_and_shards", tmp_path, timeout=200)


def test_pipelines() -> None:
    run_ranks(2, "cases_surface:pipelines", timeout=120)


def test_the_t5_example_trains_as_one_process_does(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "t5_pipeline.py"
    report = tmp_path / "losses.json"
    command = [sys.executable, "-m", "herring._launch", "-np", "4", sys.executable, str(script)]
    command += ["--steps", "12", "--json", str(report)]
    output = run_children([(command, clean_environment())], timeout=120)[0]
    assert "t5_pipeline: OK" in output, output
    losses = json.loads(report.read_text())["split"]
    assert losses[-1] < losses[0] - 0.5, f"it learned nothing: {losses}"
