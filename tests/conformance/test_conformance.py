"""A part of torch's own suites, on gloo and on herring: `make conformance` runs all of them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().with_name("run.py")
PARTS = (
    "test_DistributedDataParallelCPU_grad",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_complex",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_ddp_comparison_uneven_inputs",
    "test_gather_object_subgroup",
    "test_monitored_barrier_gloo",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's suites need expecttest")
def test_nothing_of_it_fails_that_passes_on_gloo(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(RUN), "--columns", "gloo", "herring as gloo", "--json", str(results)]
    command += [argument for part in PARTS for argument in ("--match", part)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    ended = json.loads(results.read_text())["ended"]
    passed = {column: {name for name, how in tests.items() if how[0] == "pass"} for column, tests in ended.items()}
    assert passed["gloo"] <= passed["herring as gloo"], passed["gloo"] - passed["herring as gloo"]
    counts = {column: Counter(how[0] for how in tests.values()) for column, tests in ended.items()}
    assert len(passed["herring as gloo"]) >= len(PARTS), f"torch's suite no longer runs these tests: {counts}"
