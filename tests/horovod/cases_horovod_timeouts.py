"""What each of two ranks does in test_horovod_errors.py where one does not come; the time-out is 2 s."""

from __future__ import annotations

import torch
from common import expect_error

import herring
import herring.horovod.torch as hvd
from herring import HerringError, HerringTimeoutError


def case_a_rank_that_does_not_come_is_named() -> None:
    mine, other = hvd.rank(), 1 - hvd.rank()
    with expect_error(hvd.HorovodInternalError, f"alone.{mine}", f"rank {other}") as error:
        hvd.allreduce(torch.ones(2), name=f"alone.{mine}")
    assert error.text
    hvd.barrier()  # Else the next case's join() takes part for this rank.


def case_a_small_tensor_that_one_rank_lacks_is_named_and_the_rest_is_whole() -> None:
    there = [torch.full((3,), float(hvd.rank())) for _ in range(20)]
    handles = [hvd.allreduce_async_(each, name=f"there.{index}", op=hvd.Sum) for index, each in enumerate(there)]
    if hvd.rank() == 0:
        lonely = hvd.allreduce_async_(torch.ones(3), name="only.on.0")
        with expect_error(hvd.HorovodInternalError, "only.on.0", "rank 1"):
            hvd.synchronize(lonely)
    for handle in handles:
        hvd.synchronize(handle)
    assert all(torch.equal(each, torch.ones(3)) for each in there)
    herring.barrier(name="after.only.on.0", timeout=60)  # Longer than the job's time-out, which rank 0 has waited for.


def case_a_rank_that_never_joins_is_named() -> None:
    """Last: rank 1 leaves."""
    if hvd.rank() == 0:
        with expect_error((HerringTimeoutError, HerringError), "1"):
            hvd.join()
