"""HerringConfig(elastic=True): Ray replaces a lost worker alone, and it joins the job that the others go on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="Ray is not installed: make test-ray")

import elastic_loop
from conftest import assert_nothing_is_left
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from herring.ray import HerringConfig

cloudpickle.register_pickle_by_value(elastic_loop)  # Ray's workers do not find this file.


def fit(config: HerringConfig, folder: Path, strikes: dict[int, str], failures: int = 1, workers: int = 3, **more):
    """The results by Ray's rank: one file for each process that came to the end."""
    run = RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=failures))
    TorchTrainer(
        elastic_loop.train_elastic,
        train_loop_config={"folder": str(folder), "workers": workers, "strikes": strikes, **more},
        torch_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=run,
    ).fit()
    return [[json.loads(file.read_text()) for file in folder.glob(f"{rank}-*.json")] for rank in range(workers)]


def assert_replaced(results, struck: int, workers: int = 3) -> None:
    """The struck rank's new process joined late; the others are the processes that began, and all have one state."""
    assert [len(each) for each in results] == [1] * workers
    for rank, (result,) in enumerate(results):
        assert result["step"] == results[0][0]["step"]
        assert result["weights"] == results[0][0]["weights"]
        if rank == struck:
            assert result["began"] > 10
            assert result["seen"][0] == workers
        else:
            assert result["began"] == 0
            assert result["seen"][0] == workers
            assert workers - 1 in result["seen"], "the job went on while the worker was away"
            assert result["seen"][-1] == workers
            assert len(result["seen"]) == result["step"], "no step was done twice"


@pytest.mark.parametrize("struck", [0, 2])
def test_a_killed_worker_is_replaced_and_the_others_keep_their_process(tmp_path, struck):
    results = fit(HerringConfig(elastic=True), tmp_path, {struck: "kill"})
    assert_replaced(results, struck)
    assert "elastic" in results[1][0]["description"]
    assert_nothing_is_left()


def test_a_worker_that_raises_is_replaced_too(tmp_path):
    results = fit(HerringConfig(elastic=True, servers=1), tmp_path, {1: "raise"}, shuts_down=False)
    assert_replaced(results, 1)
    assert "1 server" in results[0][0]["description"]
    assert_nothing_is_left()


def test_without_failures_left_the_run_ends_with_the_workers_error(tmp_path):
    with pytest.raises(Exception, match="bad data on purpose"):
        fit(HerringConfig(elastic=True), tmp_path, {1: "raise"}, failures=0)
    assert_nothing_is_left()


def test_fewer_than_min_workers_end_the_job_and_ray_starts_all_again(tmp_path):
    """Where no worker is left, or too few, there is nothing to join."""
    results = fit(HerringConfig(elastic=True, min_workers=2), tmp_path, {0: "kill", 1: "kill"}, 3, 2)
    ((first,), (second,)) = ([each for each in result if each["began"] == 0] for result in results)
    assert first["weights"] == second["weights"]
    assert_nothing_is_left()


def test_more_than_all_workers_cannot_be_the_least(tmp_path):
    with pytest.raises(Exception, match=r"min_workers=4\), but ScalingConfig has num_workers=3"):
        fit(HerringConfig(elastic=True, min_workers=4), tmp_path, {})
    assert_nothing_is_left()
