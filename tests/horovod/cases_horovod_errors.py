"""What each rank does in test_horovod_errors.py: ranks that disagree, ranks that have joined."""

from __future__ import annotations

import contextlib
import time
import unittest.mock
from typing import Any

import torch
from common import expect_error

import herring
import herring.horovod.torch as hvd
from herring._sealed import Seal
from herring.horovod._engine.join import Joins


def case_shapes_differ() -> None:
    with expect_error(hvd.HorovodInternalError, "shapes", "rank 0", "float32[2]", "float32[3]"):
        hvd.allreduce(torch.zeros(2 if hvd.rank() == 0 else 3), name="shapes")


def case_dtypes_differ() -> None:
    dtype = torch.float32 if hvd.rank() == 0 else torch.float64
    with expect_error(hvd.HorovodInternalError, "float32", "float64"):
        hvd.synchronize(hvd.allreduce_async_(torch.zeros(2, dtype=dtype), name="dtypes"))
    with expect_error(hvd.HorovodInternalError, "rank 0: float32[2]", "float64[2]"):
        hvd.allgather(torch.zeros(2, dtype=dtype), name="dtypes")


def case_rows_differ() -> None:
    with expect_error(hvd.HorovodInternalError, "only the first dimension may differ"):
        hvd.allgather(torch.zeros(2, 1 + min(hvd.rank(), 1)), name="rows")
    with expect_error(hvd.HorovodInternalError, "only the first dimension may differ"):
        hvd.alltoall(torch.zeros(hvd.size(), 1 + min(hvd.rank(), 1)), name="rows")


def case_roots_differ() -> None:
    with expect_error(hvd.HorovodInternalError, "root 0", "root 1"):
        hvd.broadcast(torch.zeros(2), min(hvd.rank(), 1), name="roots")


def case_calls_differ() -> None:
    """Without names, calls match in the order they are made: also calls of two kinds."""
    with expect_error(hvd.HorovodInternalError, "all_reduce", "broadcast"):
        if hvd.rank() == 0:
            hvd.allreduce(torch.zeros(2))
        else:
            hvd.broadcast(torch.zeros(2), 0)


def case_sets_differ() -> None:
    with expect_error(hvd.HorovodInternalError, "process sets"):
        hvd.add_process_set([0] if hvd.rank() == 0 else [1])


def case_objects_without_the_jobs_secret() -> None:
    """Rank 1's place is taken by somebody who can send, and does not have the secret: nothing of his is unpickled."""
    forger = Seal("guessed", b"")
    if hvd.rank() == 1:
        length = forger.close_length(1 << 40, "broadcast_object 'forged' of process set 0", 1)
        hvd.broadcast(torch.frombuffer(bytearray(length), dtype=torch.uint8), 1, name="forged.size")
    else:
        with expect_error(herring.ProtocolError, "broadcast_object", "rank 1", "seal"):
            hvd.broadcast_object(None, 1, name="forged")
    mine = unittest.mock.patch("herring.horovod._engine.objects.seal_of", return_value=forger)
    with mine if hvd.rank() == 1 else contextlib.nullcontext():
        wrong = "rank 0" if hvd.rank() == 1 else "rank 1"
        with expect_error(herring.ProtocolError, "allgather_object", wrong, "seal"):
            hvd.allgather_object(Runs())
    assert not RAN


RAN: list[int] = []


def _run(rank: int) -> None:
    RAN.append(rank)


class Runs:
    """Unpickled, it leaves a note of the rank that pickled it."""

    def __reduce__(self) -> Any:
        return _run, (hvd.rank(),)


def case_everything_works_afterwards() -> None:
    for name in ("shapes", "dtypes", None):
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name=name).tolist() == [float(hvd.size())] * 2


def case_join_with_uneven_data() -> None:
    size, rank = hvd.size(), hvd.rank()
    for step in range(2 + 2 * rank):  # The last rank has most.
        working = [each for each in range(size) if step < 2 + 2 * each]
        handles = [hvd.allreduce_async(torch.ones(3), name=f"uneven.{i}", op=hvd.Sum) for i in range(4)]
        average = hvd.allreduce(torch.ones(2, dtype=torch.bfloat16))
        low = hvd.allreduce(torch.full((1,), 5 + rank, dtype=torch.int64), op=hvd.Min, name="low")
        grouped = hvd.grouped_allreduce([torch.ones(1), torch.ones(2, 2).double()], op=hvd.Sum)
        assert [hvd.synchronize(each)[0].item() for each in handles] == [len(working)] * 4
        assert abs(average[0].item() - len(working) / size) < 0.01
        assert low.item() == 5 + working[0]
        assert grouped[1].sum().item() == 4 * len(working)
    last = hvd.join()
    assert hvd.allgather_object(last) == [size - 1] * size


def case_join_while_operations_are_in_flight() -> None:
    """One rank joins without ever having started what the others already wait for."""
    if hvd.rank() != 0:
        early = hvd.allreduce_async(torch.ones(2), name="early", op=hvd.Sum)
        assert hvd.synchronize(early).tolist() == [hvd.size() - 1.0] * 2
    assert hvd.join() != 0 or hvd.size() == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def case_only_allreduce_goes_on_after_join() -> None:
    calls = {
        "allgather": lambda: hvd.allgather(torch.ones(2)),
        "broadcast": lambda: hvd.broadcast(torch.ones(2), hvd.size() - 1),
        "alltoall": lambda: hvd.alltoall(torch.ones(hvd.size())),
    }
    for name, call in calls.items():
        if hvd.rank() > 0:
            # Of the others, one may have failed and joined before the next one looks.
            with expect_error(hvd.HorovodInternalError, "(ranks [0", "have called join()"):
                call()
        assert hvd.join() > 0, name
    if hvd.rank() > 0:
        hvd.barrier()  # Who has joined counts as having come.
    hvd.join()
    assert hvd.allgather(torch.ones(1)).sum().item() == hvd.size()


def case_all_know_who_joined_when_their_operation_fails() -> None:
    """Also where the notice of it comes late to one rank."""
    take = Joins._take

    def take_late(joins: Joins, source: int, message: dict[str, Any]) -> None:
        if "joined" in message and joins._engine.rank == joins._engine.size - 1:
            time.sleep(0.5)
        take(joins, source, message)

    with unittest.mock.patch.object(Joins, "_take", take_late):
        if hvd.rank() > 0:
            with expect_error(hvd.HorovodInternalError, "(ranks [0", "have called join()"):
                hvd.allgather(torch.ones(2))
        hvd.join()


def case_join_in_a_process_set() -> None:
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 1:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 1
    hvd.join()
    hvd.remove_process_set(pair)
