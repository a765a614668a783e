"""What a Horovod user meets in the first hour: stalls that are named, timelines of crashes, names scripts import."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import clean_environment, run_ranks

HERE = str(Path(__file__).resolve().parent)


def run(size: int, case: str, *arguments: object, env: dict[str, str] | None = None, **options: object) -> list[str]:
    import herring

    paths = [HERE, str(Path(HERE).parent / "torch"), str(Path(herring.__file__).resolve().parents[1])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "HERRING_TIMEOUT_S": "30", **(env or {})}
    return run_ranks(size, f"cases_first_hour:{case}", *arguments, env=variables, timeout=90, **options)


@pytest.mark.parametrize("fusion", ["1", "0"], ids=["fused", "alone"])
def test_a_stall_is_named_once(fusion: str) -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"} | ({"HERRING_FUSION_BYTES": "0"} if fusion == "0" else {})
    first, second, third = run(3, "stall", 4, env=env)
    told = [line for line in first.splitlines() if "stalled" in line]
    assert len(told) == 1, first
    assert "allgather.rows, allreduce.late.0, allreduce.late.1: waiting for rank 1, which has not started it" in told[0]
    assert "rank 0 warning" in told[0]
    assert "stalled" not in second + third


def test_the_stall_check_can_be_switched_off() -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    assert "stalled" not in "".join(run(2, "stall", 2, env=env))


def test_a_stall_may_end_the_job(tmp_path: Path) -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1.5"}
    assert "told" in run(2, "stall_that_ends_the_job", str(tmp_path / "told"), env=env)[0]


def test_a_timeline_is_there_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    run(2, "die_with_a_timeline", env=env, expect={0: 9, 1: 9})
    events = json.loads(path.read_text() + "]")  # What viewers take without.
    rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    begun = [rows[each["tid"]] for each in events if each["ph"] == "B"]
    assert begun[:2] == ["allreduce.before", "allreduce.small"]
    assert any(each["name"] == "CYCLE_START" for each in events)


@pytest.mark.parametrize("fails", [False, True], ids=["well", "raises"])
def test_a_timeline_is_whole_without_shutdown(tmp_path: Path, fails: bool) -> None:
    path = tmp_path / "timeline.json"
    run(1, "train_without_shutdown", int(fails), env={"HOROVOD_TIMELINE": str(path)}, expect={0: int(fails)})
    events = json.loads(path.read_text())
    assert [each["name"] for each in events if each["ph"] == "B"] == ["ALLREDUCE", "ALLREDUCE"]
    assert path.read_text().endswith("\n]\n")


def test_a_bad_timeline_path_names_the_variable(tmp_path: Path) -> None:
    run(1, "bad_timeline", env={"HOROVOD_TIMELINE": str(tmp_path / "missing" / "timeline.json")})


def test_a_full_disk_ends_the_timeline_not_the_job(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    first, second = run(2, "full_disk", env={"HOROVOD_TIMELINE": str(path)})
    assert "trained" in first
    assert "trained" in second
    assert first.count("the timeline ends here") == 1, first
    assert f"{path}: File too large" in first
    first, second = run(2, "full_from_the_start", env={"HOROVOD_TIMELINE": "/dev/full"})
    assert "trained" in first
    assert "trained" in second
    assert first.count("warning: /dev/full: No space left on device; the timeline ends here") == 2, first


def test_init_refuses_duplicate_process_sets() -> None:
    run(2, "duplicate_sets")


def test_states_are_sent_without_pickling_tensors() -> None:
    run(2, "sync_states")


def test_a_joined_rank_takes_part_in_lists_of_bfloat16() -> None:
    run(2, "bfloat16_join")


def test_the_engine_knows_no_framework() -> None:
    code = (
        "import sys, herring.horovod._engine.engine, herring.horovod._engine.info, herring.horovod._engine.objects\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=True, timeout=60)
    folder = Path(importlib.import_module("herring.horovod._engine").__file__ or "").parent
    assert [path.name for path in folder.glob("*.py") if "import torch" in path.read_text()] == []


def test_private_names_that_scripts_import() -> None:
    basics = importlib.import_module("herring.horovod.torch.mpi_ops")._basics
    assert not basics.is_initialized()
    util = importlib.import_module("herring.horovod.common.util")
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet")
    assert [util.num_rank_is_power_2(each) for each in (0, 1, 2, 3, 4)] == [False, True, True, False, True]
    optimizer = importlib.import_module("herring.horovod.torch.optimizer")
    torch, hvd = importlib.import_module("torch"), importlib.import_module("herring.horovod.torch")
    hvd.init()
    try:
        model = torch.nn.Linear(2, 2)
        made = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        assert isinstance(made, optimizer._DistributedOptimizer)
        assert basics._get_process_set_ids_and_ranks() == {0: [0]}
    finally:
        hvd.shutdown()


def test_names_of_horovods_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = importlib.import_module("herring.horovod.runner")
    assert runner.run is importlib.import_module("herring.horovod").run
    place = importlib.import_module("herring.horovod.runner.common.util.env").get_env_rank_and_size
    for name in (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_RANK",
        "PMI_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    assert place() == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(RuntimeError, match="OMPI_COMM_WORLD_SIZE is not"):
        place()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert place() == (1, 3)
    monkeypatch.setenv("HOROVOD_RANK", "2")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    assert place() == (2, 4)


def test_scripts_that_assert_a_backend_go_on() -> None:
    hvd = importlib.import_module("herring.horovod.torch")
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_built()
    assert not hvd.mpi_enabled()
