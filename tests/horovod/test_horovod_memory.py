"""Memory by name (hvd.empty_like()) saves copies, and nobody can tell but by the clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from horovod_job import cases_of, check, launch

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("case", cases_of("cases_horovod_memory"))
def test_on_three_ranks(case: str) -> None:
    check("cases_horovod_memory", 3, case)


def test_without_fusion() -> None:
    check("cases_horovod_memory", 2, "case_other_tensors_by_the_same_names", (("HERRING_FUSION_BYTES", "0"),))


def test_in_small_buckets() -> None:
    check("cases_horovod_memory", 2, "case_they_are_reduced_where_they_lie", (("HERRING_FUSION_BYTES", "1MB"),))


def test_where_the_arena_is_full() -> None:
    env = (("HERRING_ARENA_BYTES", "4MB"), ("HERRING_LOCAL_PART_BYTES", "64KB"))
    check("cases_horovod_memory", 2, "case_other_tensors_by_the_same_names", env)


STEPS = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
import herring.horovod.torch as hvd
from surroundings import server_pids
hvd.init()
like = {{f"t.{{i}}": torch.empty(400_000 if i % 9 == 0 else 10 * i) for i in range(40)}}
memory = hvd.empty_like(like)
for step in range(60):
    if {kills} and step == 20 and hvd.rank() == 0:
        os.kill(server_pids()[1], signal.SIGKILL)
    for tensor in memory.values():
        tensor.fill_(float(hvd.rank() + step))
    handles = [hvd.allreduce_async_(each, name=name, op=hvd.Sum) for name, each in memory.items()]
    for handle in handles:
        hvd.synchronize(handle)
    assert all(bool((each == 2 * step + 1).all()) for each in memory.values()), step
hvd.shutdown()
print("well", flush=True)
"""


@pytest.mark.parametrize("checksum", ["off", "on"])
def test_a_lost_server_costs_no_step(tmp_path: Path, checksum: str) -> None:
    script = STEPS.format(tests=str(HERE.parent / "python"), kills=True)
    done = launch(tmp_path, script, "--servers", "2", HERRING_CHECKSUM=checksum)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("well") == 2
    assert "is lost" in done.stderr


def test_elastic(tmp_path: Path) -> None:
    script = STEPS.format(tests=str(HERE.parent / "python"), kills=False)
    done = launch(tmp_path, script, "--elastic")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("well") == 2


NOT_FINITE = """
import torch
import herring.horovod.torch as hvd
hvd.init()
memory = hvd.empty_like({f"grad.{i}": torch.empty(400_000 if i % 9 == 0 else 9) for i in range(20)})
for _ in range(3):
    for tensor in memory.values():
        tensor.fill_(float(hvd.rank()))
    if hvd.rank() == 1:
        memory["grad.7"][3] = memory["grad.9"][300_000] = float("nan")
    handles = {name: hvd.allreduce_async_(each, name=name, op=hvd.Sum) for name, each in memory.items()}
    bad = ("grad.7", "grad.9")
    for name, handle in handles.items():
        try:
            hvd.synchronize(handle)
            assert name not in bad
        except hvd.HorovodInternalError as error:
            assert name in bad and name in str(error) and "rank 1" in str(error), (name, error)
    assert all(bool((each == 1).all()) for name, each in memory.items() if name not in bad)
hvd.shutdown()
print("well", flush=True)
"""


def test_a_nan_is_blamed_on_its_tensor_and_rank(tmp_path: Path) -> None:
    done = launch(tmp_path, NOT_FINITE, HERRING_CHECK_FINITE="on")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("well") == 2
