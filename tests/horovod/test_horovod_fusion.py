"""Small tensors by name travel together, and nobody can tell but by the clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from horovod_job import cases_of, check, launch

from herring import _core

HERE = Path(__file__).resolve().parent


def test_a_class_without_functions_for_dlpack_is_refused() -> None:
    for classes in ((int,), (), (1,)):
        with pytest.raises(TypeError):
            _core.TensorReader(classes, "is_neg")  # type: ignore[arg-type]


@pytest.mark.parametrize("case", cases_of("cases_horovod_fusion"))
def test_on_three_ranks(case: str) -> None:
    check("cases_horovod_fusion", 3, case)


STEPS = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
import herring.horovod.torch as hvd
from surroundings import server_pids
hvd.init()
for step in range(60):
    if {kills} and step == 20 and hvd.rank() == 0:
        os.kill(server_pids()[1], signal.SIGKILL)
    tensors = [torch.full((index * 10,), float(hvd.rank() + step)) for index in range(40)]
    handles = [hvd.allreduce_async_(each, name=f"t.{{i}}", op=hvd.Sum) for i, each in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)
    assert all(bool((each == 2 * step + 1).all()) for each in tensors), step
hvd.shutdown()
print("well", flush=True)
"""


def test_a_lost_server_costs_no_step(tmp_path: Path) -> None:
    script = STEPS.format(tests=str(HERE.parent / "python"), kills=True)
    done = launch(tmp_path, script, "--servers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("well") == 2
    assert "is lost" in done.stderr


NOT_FINITE = """
import torch
import herring.horovod.torch as hvd
hvd.init()
for _ in range(2):
    tensors = [torch.full((9,), float(hvd.rank())) for _ in range(20)]
    if hvd.rank() == 1:
        tensors[7][3] = float("nan")
    handles = [hvd.allreduce_async_(each, name=f"grad.{i}", op=hvd.Sum) for i, each in enumerate(tensors)]
    for i, handle in enumerate(handles):
        try:
            hvd.synchronize(handle)
            assert i != 7
        except hvd.HorovodInternalError as error:
            assert i == 7 and "grad.7" in str(error) and "rank 1" in str(error), (i, error)
    assert all(bool((each == 1).all()) for i, each in enumerate(tensors) if i != 7)
hvd.shutdown()
print("well", flush=True)
"""


def test_a_nan_is_blamed_on_its_tensor_and_rank(tmp_path: Path) -> None:
    done = launch(tmp_path, NOT_FINITE, HERRING_CHECK_FINITE="on")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("well") == 2


@pytest.mark.parametrize("name", ["HERRING_FUSION_BYTES", "HOROVOD_FUSION_THRESHOLD"])
def test_it_can_be_turned_off(tmp_path: Path, name: str) -> None:
    script = STEPS.format(tests=str(HERE.parent / "python"), kills=False)
    counted = script.replace('print("well"', 'print("well"').replace(
        "hvd.shutdown()", "import herring\nassert herring.stats()['ops_completed'] >= 60 * 40\nhvd.shutdown()"
    )
    done = launch(tmp_path, counted, **{name: "0"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_bad_threshold_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path, "import herring.horovod.torch as hvd\nhvd.init()\n", HOROVOD_FUSION_THRESHOLD="64MB")
    assert done.returncode != 0
    assert "HOROVOD_FUSION_THRESHOLD is '64MB'" in done.stderr


def test_a_dead_rank_is_named_at_once(tmp_path: Path) -> None:
    script = """
import os, time, torch
import herring.horovod.torch as hvd
hvd.init()
for step in range(10):
    handles = [hvd.allreduce_async_(torch.ones(9), name=f"t.{i}") for i in range(10)]
    if step == 5 and hvd.rank() == 1:
        os._exit(9)
    begun = time.monotonic()
    try:
        for handle in handles:
            hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        assert time.monotonic() - begun < 5
        assert "rank 1" in str(error) or "worker 1" in str(error), error
        assert "t." in str(error), error
        print("named", flush=True)
        raise SystemExit(3)
"""
    done = launch(tmp_path, script)
    assert done.returncode != 0
    assert "named" in done.stdout, done.stdout + done.stderr
