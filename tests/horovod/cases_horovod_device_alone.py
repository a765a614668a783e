"""What needs settings of its own, on tensors of a GPU that tests/torch/accelerator.cc plays."""

from __future__ import annotations

import torch
from accelerator import DEVICE, load
from common import expect_error

import herring.horovod.torch as hvd


def case_a_kernel_that_never_ends_is_a_time_out() -> None:
    gpu = load()
    tensor = torch.ones(4).to(DEVICE)
    # CUDA waits for all kernels before it gives pinned memory.
    handles = [hvd.allreduce_async(tensor) for _ in range(3)]
    for handle in handles:
        hvd.synchronize(handle)
    hvd.allgather(tensor)
    gpu.fake_stall(1)
    named = hvd.allreduce_async(tensor, name="stalled")
    for call in (hvd.allreduce, hvd.allgather):
        with expect_error(hvd.HorovodInternalError, "were not ready on", "has not ended"):
            call(tensor)
    with expect_error(hvd.HorovodInternalError, "allreduce.stalled", "were not ready on", "has not ended"):
        hvd.synchronize(named)
    assert hvd.poll(hvd.allreduce_async(torch.ones(4))) in (True, False), "the job goes on"
    gpu.fake_stall(0)
    gpu.fake_run_all()


def case_switched_off_they_are_refused() -> None:
    load()
    tensor = torch.ones(4).to(DEVICE)
    for call in (hvd.allreduce, hvd.allgather, lambda t: hvd.broadcast(t, 0)):
        with expect_error(ValueError, "HERRING_CUDA=off", "tensor.cpu()"):
            call(tensor)
    with expect_error(ValueError, "HERRING_CUDA=off"):
        hvd.allreduce_async(tensor, name="off")
    assert hvd.allreduce(torch.ones(4), op=hvd.Sum).tolist() == [float(hvd.size())] * 4
