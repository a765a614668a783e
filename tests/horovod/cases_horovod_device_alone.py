"""What needs settings of its own, on tensors of a GPU that tests/torch/accelerator.cc plays."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import torch
from accelerator import DEVICE, IS_REAL, load
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
    hvd.synchronize(hvd.allreduce_async(tensor, name="stalled"))
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


def case_the_job_ends_while_a_copy_back_is_under_way() -> None:
    gpu = load()
    streams = gpu.fake_new_stream()
    tensor = torch.ones(200_000).to(DEVICE)
    hvd.allreduce_(tensor, op=hvd.Sum)
    assert tensor.cpu().unique().tolist() == [2.0]
    if not IS_REAL:  # The stream of the copies back, the second that Herring took.
        old = gpu.fake_set_stream(streams + 2)
        gpu.fake_stall(1)
        gpu.fake_set_stream(old)
    hvd.allreduce_(tensor, op=hvd.Sum)
    hvd.shutdown()
    gc.collect()
    if not IS_REAL:
        old = gpu.fake_set_stream(streams + 2)
        gpu.fake_stall(0)
        gpu.fake_set_stream(old)
    gpu.fake_run_all()
    time.sleep(0.5)
    assert tensor.cpu().unique().tolist() == [4.0]


def case_two_threads_begin_at_once() -> None:
    load()
    tensors = [torch.ones(200_000).to(DEVICE) for _ in range(2)]
    together = threading.Barrier(2)

    def reduce(index: int) -> None:
        together.wait()
        hvd.allreduce_(tensors[index], name=f"thread.{index}", op=hvd.Sum)

    threads = [threading.Thread(target=reduce, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _stagers() == 1
    assert [tensor.cpu().unique().tolist() for tensor in tensors] == [[2.0]] * 2


def case_jobs_that_follow_each_other_leave_no_thread() -> None:
    load()
    for turn in range(4):
        tensor = torch.ones(200_000).to(DEVICE)
        hvd.allreduce_(tensor, name="turn", op=hvd.Sum)
        assert tensor.cpu().unique().tolist() == [2.0], turn
        hvd.shutdown()
        hvd.init()
    assert _stagers() == 1


def _stagers() -> int:
    return sum(_name_of(task).startswith("herring-stager") for task in Path("/proc/self/task").iterdir())


def _name_of(task: Path) -> str:
    """Empty: the thread has ended since it was listed."""
    try:
        return (task / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
