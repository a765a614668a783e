"""Ray Train on a real Ray cluster of one machine: torch's backend herring, and servers as Ray actors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="Ray is not installed: make test-ray")

from conftest import assert_nothing_is_left
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from herring import InvalidArgumentError, UnavailableError
from herring.ray import HerringConfig, _Servers

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers do not find this file.


def train(folder: str) -> None:
    """40 steps of a small regression; each rank works on data of its own, from weights that differ at first."""
    import json
    import os

    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    import herring

    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seen = {
        "backend": dist.get_backend(),
        "description": herring.description(),
        "weights": [value for each in model.parameters() for value in each.flatten().tolist()],
        "losses": losses,
        "has_secret": "HERRING_SECRET" in os.environ,
    }
    with open(os.path.join(folder, f"{rank}.json"), "w") as file:
        json.dump(seen, file)


def fit(config: HerringConfig, loop, folder: Path, failures: int = 0, workers: int = 2):
    run = RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=failures))
    return TorchTrainer(
        loop,
        train_loop_config=str(folder),
        torch_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=run,
    ).fit()


def results(folder: Path) -> list[dict]:
    import json

    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def assert_trained(seen: list[dict], servers: str) -> None:
    assert [each["backend"] for each in seen] == ["herring"] * 2
    assert seen[0]["weights"] == seen[1]["weights"]
    for each in seen:
        assert each["losses"][-1] < each["losses"][0] * 0.5
        assert servers in each["description"], each["description"]


def test_a_server_actor_serves_two_workers(tmp_path):
    fit(HerringConfig(servers=1), train, tmp_path)
    seen = results(tmp_path)
    assert_trained(seen, "1 server")
    assert "(0 embedded" in seen[0]["description"]
    assert all(each["has_secret"] for each in seen)
    assert_nothing_is_left()


def test_without_servers_they_are_in_the_workers(tmp_path):
    fit(HerringConfig(), train, tmp_path)
    seen = results(tmp_path)
    assert_trained(seen, "")
    assert "(0 embedded" not in seen[0]["description"]
    assert_nothing_is_left()


def test_a_worker_that_raises_ends_the_run_and_its_servers(tmp_path):
    def raises(folder: str) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            raise ValueError("the data of rank 1 are bad")
        dist.all_reduce(torch.ones(4))

    with pytest.raises(Exception, match="the data of rank 1 are bad"):
        fit(HerringConfig(servers=1), raises, tmp_path)
    assert_nothing_is_left()


def test_a_killed_worker_brings_all_of_them_and_the_servers_again(tmp_path):
    def dies_once(folder: str) -> None:
        import os
        import signal

        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(4))
        mark = os.path.join(folder, "died")
        if dist.get_rank() == 1 and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        train(folder)

    fit(HerringConfig(servers=1), dies_once, tmp_path, failures=1)
    assert (tmp_path / "died").exists()
    assert_trained(results(tmp_path), "1 server")
    assert_nothing_is_left()


def test_servers_that_find_no_place_are_an_error_that_says_what_to_do(tmp_path):
    config = HerringConfig(servers=2, server_resources={"CPU": 2}, server_timeout_s=2)
    with pytest.raises(Exception, match=r"no place for 2 Herring servers with \{'CPU': 2\} each within 2 s") as caught:
        fit(config, train, tmp_path)
    assert "'CPU': 3.0" in str(caught.value)
    assert "server_timeout_s" in str(caught.value)
    assert_nothing_is_left()


def test_a_server_that_cannot_start_says_why():
    with pytest.raises(UnavailableError, match="(?s)Herring server 0 of 1 could not be started.*HERRING_HUB"):
        _Servers(HerringConfig(servers=1), {"hub": "no port here", "servers": "1"})
    assert_nothing_is_left()


@pytest.mark.parametrize(
    "values",
    [
        {"servers": -1},
        {"servers": 1.5},
        {"servers": True},
        {"servers": 5000},
        {"backend": "gloo"},
        {"backend": None},
        {"server_resources": {}},
        {"server_resources": {"CPU": 0}},
        {"server_timeout_s": 0},
        {"elastic": 1},
        {"min_workers": 0},
        {"min_workers": 2},
    ],
)
def test_values_that_cannot_be_are_named(values):
    ((name, value),) = values.items()
    with pytest.raises(InvalidArgumentError, match=re.escape(f"HerringConfig({name}={value!r})")):
        HerringConfig(**values)


def test_the_config_is_rays_and_shows_no_secret():
    shown = HerringConfig(servers=2, timeout_s=60).to_dict()
    assert shown["backend"] == "herring"
    assert shown["servers"] == 2
    assert shown["timeout_s"] == 60
    assert not [name for name in shown if "secret" in name]
