"""Spark's TorchDistributor on a real Spark of one machine: two executors, each with one worker."""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("pyspark", reason="Spark is not installed: make test-spark")

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    os.environ["PYSPARK_PYTHON"] = sys.executable
    folder = tmp_path_factory.mktemp("spark")
    built = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(folder))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.executorEnv.PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        .getOrCreate()
    )
    yield built
    built.stop()


def test_two_executors_train_one_model(spark):
    def train(steps: int) -> dict:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import herring.torch  # noqa: F401  # Here Herring is on the path and not installed.

        dist.init_process_group("herring")
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 8)
        y = x.sum(1, keepdim=True)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights = [torch.empty(1, 8) for _ in range(2)]
        dist.all_gather(weights, model.module.weight.detach())
        found = {
            "backend": dist.get_backend(),
            "size": dist.get_world_size(),
            "losses": losses,
            "weights": [each.flatten().tolist() for each in weights],
        }
        dist.destroy_process_group()
        return found

    found = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(train, 40)
    assert found["backend"] == "herring"
    assert found["size"] == 2
    assert found["weights"][0] == found["weights"][1]
    assert found["losses"][-1] < found["losses"][0] * 0.1


def test_a_worker_that_raises_fails_the_run_with_its_error(spark):
    def fails() -> None:
        import torch
        import torch.distributed as dist

        import herring.torch  # noqa: F401

        dist.init_process_group("herring")
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 1:
            raise ValueError("the data of rank 1 are bad")
        dist.all_reduce(torch.ones(3))

    with pytest.raises(Exception, match="(?s)the data of rank 1 are bad|has left the job|failed"):
        TorchDistributor(num_processes=2, local_mode=False, use_gpu=False).run(fails)
