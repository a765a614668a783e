"""What each rank does in test_horovod_first_hour.py."""

from __future__ import annotations

import copy
import os
import pickle
import resource
import sys
import time
from pathlib import Path

import pytest
import torch

import herring.horovod.torch as hvd


def stall(late: str) -> None:
    """Rank 1 comes late to two reductions and a gather; the job goes on as if nothing had been."""
    hvd.init()
    if hvd.rank() == 1:
        time.sleep(float(late))
    handles = [hvd.allreduce_async(torch.ones(3), name=f"late.{index}") for index in range(2)]
    handles.append(hvd.allgather_async(torch.ones(1), name="rows"))
    for handle in handles:
        hvd.synchronize(handle)
    # All have started this one: whatever it takes, it is no stall.
    hvd.allreduce(torch.ones(3), name="in_time")
    hvd.shutdown()


def stall_that_ends_the_job(mark: str) -> None:
    hvd.init()
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"never.*rank 1.*HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
            hvd.allreduce(torch.ones(3), name="never")
        print("told", flush=True)
        Path(mark).touch()
        os._exit(0)
    begun = time.monotonic()
    while not Path(mark).exists() and time.monotonic() - begun < 6:  # Until rank 0 has been told.
        time.sleep(0.05)
    os._exit(0)


def die_with_a_timeline() -> None:
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    hvd.synchronize(hvd.allreduce_async(torch.ones(3), name="small"))
    hvd.barrier()
    os._exit(9)


def train_without_shutdown(fails: str) -> None:
    """Rank 0 forks too: its child's exit is not the end of the timeline."""
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    hvd.allreduce(torch.ones(3), name="after")
    if int(fails):
        raise ValueError("bad batch")


def full_disk() -> None:
    """The file may not grow past 3 KB: writing fails as on a full disk. Training goes on."""
    hvd.init()
    hvd.allreduce(torch.ones(3), name="before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for step in range(40):
        assert hvd.allreduce(torch.ones(3), name=f"step.{step}", op=hvd.Sum).tolist() == [hvd.size()] * 3
    hvd.shutdown()
    print("trained", flush=True)


def full_from_the_start() -> None:
    hvd.init()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    hvd.start_timeline("/dev/full")
    hvd.shutdown()
    print("trained", flush=True)


def bad_timeline() -> None:
    with pytest.raises(ValueError, match=r"HOROVOD_TIMELINE is '.*/missing/timeline.json'"):
        hvd.init()
    assert not hvd.is_initialized()


def duplicate_sets() -> None:
    for sets in ([[0, 1], hvd.ProcessSet([1, 0])], [[0], [1], [0]]):
        with pytest.raises(ValueError, match="duplicate process set"):
            hvd.init(process_sets=sets)
        assert not hvd.is_initialized()
    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first, [1]])
    assert first.process_set_id == 1
    hvd.init(process_sets=[hvd.ProcessSet([0])])  # Again: those that are there.
    with pytest.raises(ValueError, match="duplicate process set"):
        hvd.init(process_sets=[[1, 0]])
    hvd.shutdown()


def sync_states() -> None:
    """Tensors are not pickled, and what is saved stays in the memory that it was saved in first."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    mean = torch.full((1000,), float(hvd.rank()))
    state = hvd.elastic.TorchState(model, optimizer, mean=mean, lists=[mean + 1, {"a": (mean + 2, "b")}], epoch=7)
    pickled: list[type] = []

    def reduce_ex(tensor: torch.Tensor, protocol: int) -> object:
        pickled.append(type(tensor))
        return plain(tensor, protocol)

    plain, torch.Tensor.__reduce_ex__ = torch.Tensor.__reduce_ex__, reduce_ex
    try:
        state.sync()
        assert pickled == []
        pickle.dumps(mean)
        assert pickled == [torch.Tensor]  # So it would have shown.
    finally:
        torch.Tensor.__reduce_ex__ = plain
    assert (state.mean == 0).all()
    assert (state.lists[1]["a"][0] == 2).all()
    assert (state.lists[0] == 1).all()
    assert state.lists[1]["a"][1] == "b"
    handlers = state._handlers
    places = [each.data_ptr() for each in handlers["model"]._saved.values()]
    moments = handlers["optimizer"]._saved["state"][0]["exp_avg"].data_ptr()
    before = copy.deepcopy(model.state_dict())
    weights = hvd.allgather(before["0.weight"].reshape(1, -1))
    assert torch.equal(weights[0], weights[1]), "the same on all ranks"
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state.save()
    assert [each.data_ptr() for each in handlers["model"]._saved.values()] == places
    assert handlers["optimizer"]._saved["state"][0]["exp_avg"].data_ptr() == moments
    after = copy.deepcopy(model.state_dict())
    assert not torch.equal(before["0.weight"], after["0.weight"])
    with torch.no_grad():
        model[0].weight.zero_()
    optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    state.restore()
    assert all(torch.equal(after[key], each) for key, each in model.state_dict().items())
    assert model.state_dict()._metadata == after._metadata
    assert optimizer.state_dict()["state"][0]["exp_avg"].abs().sum() > 0
    # Training goes on without touching what was saved.
    with torch.no_grad():
        model[0].weight.zero_()
        optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    state.restore()
    assert torch.equal(after["0.weight"], model[0].weight)
    assert optimizer.state_dict()["state"][0]["exp_avg"].abs().sum() > 0
    hvd.shutdown()


def bfloat16_join() -> None:
    """A rank that has joined takes part in a list of bfloat16, one value at least for each operator."""
    hvd.init()
    if hvd.rank() == 0:
        for op, wanted in ((hvd.Sum, 3.0), (hvd.Min, 3.0), (hvd.Max, 3.0), (hvd.Product, 3.0)):
            tensors = [torch.full((2,), 3.0, dtype=torch.bfloat16), torch.full((4,), 3.0, dtype=torch.bfloat16)]
            for each in hvd.grouped_allreduce(tensors, op=op, name=f"op.{op}"):
                assert (each == wanted).all(), (op, each)
    assert hvd.join() == 0
    hvd.shutdown()
