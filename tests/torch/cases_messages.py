"""What each rank does in test_torch_messages.py. Every result is held against gloo's, in the same processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import FLOATS, INTEGERS, data, expect_error, world

# What gloo's own collectives take.
GATHERED = (*FLOATS, torch.int8, torch.int32, torch.int64, torch.uint8)
MOVED = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)
Call = Callable[[int, int, Any], list[torch.Tensor]]


def _against_gloo(calls: list[Call]) -> None:
    with world() as (rank, size):
        gloo = dist.new_group(backend="gloo")
        for call in calls:
            ours = call(rank, size, dist.group.WORLD)
            theirs = call(rank, size, gloo)
            assert len(ours) == len(theirs)
            for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert a.dtype == b.dtype, call.__name__
                assert a.shape == b.shape, call.__name__
                assert torch.equal(a, b), f"{call.__name__}, result {number}: {a} is not gloo's {b}"
        dist.destroy_process_group(gloo)


# --- From rank to rank -----------------------------------------------------------------------------------------------


def _ring(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    """Everybody sends to the next, the even ranks first."""
    results = []
    for dtype in MOVED:
        for seed, shape in enumerate(((5,), (), (0,), (3, 4, 2), (50_001,))):
            mine, into = data(rank, shape, dtype, seed), torch.zeros(shape, dtype=dtype)
            if rank % 2 == 0:
                dist.send(mine, (rank + 1) % size, group=group)
            source = dist.recv(into, (rank - 1) % size, group=group)
            if rank % 2 == 1:
                dist.send(mine, (rank + 1) % size, group=group)
            results += [into, torch.tensor(source)]
    return results


def _tags_in_another_order(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    other = rank ^ 1
    if other >= size:
        return []
    sends = [
        dist.isend(data(rank, (10 + 7 * tag,), torch.float32, tag), other, group=group, tag=tag) for tag in range(30)
    ]
    into = [torch.zeros(10 + 7 * tag) for tag in range(30)]
    for tag in reversed(range(30)):
        dist.recv(into[tag], other, group=group, tag=tag)
    for work in sends:
        work.wait()
    return into


def _same_tag_in_order(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    other = rank ^ 1
    if other >= size:
        return []
    into = [torch.zeros(4) for _ in range(50)]
    receives = [dist.irecv(each, other, group=group) for each in into]
    sends = [dist.isend(torch.full((4,), float(100 * rank + k)), other, group=group) for k in range(50)]
    for work in (*receives, *sends):
        work.wait()
    return into


def _any_source(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    """Which comes first is nobody's to say; what came from whom is."""
    if rank != 0:
        for number in range(3):
            dist.send(torch.tensor([rank, number]), 0, group=group, tag=5)
        return []
    seen: list[tuple[int, list[int]]] = []
    for _ in range(3 * (size - 1)):
        into = torch.zeros(2, dtype=torch.int64)
        source = dist.recv(into, None, group=group, tag=5)
        seen.append((source, into.tolist()))
    assert [sorted(seen)] == [[(r, [r, n]) for r in range(1, size) for n in range(3)]], seen
    assert all([n for s, (_, n) in seen if s == r] == [0, 1, 2] for r in range(1, size)), "messages overtook each other"
    return [torch.tensor(sorted(seen, key=str)[0][1])]


def _batch(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    """All pairs, both ways, in one batch."""
    ops, into = [], []
    for other in range(size):
        if other == rank:
            continue
        into.append(torch.zeros(1000 + 10 * other))
        ops.append(dist.P2POp(dist.isend, data(rank, (1000 + 10 * rank,), torch.float32, other), other, group=group))
        ops.append(dist.P2POp(dist.irecv, into[-1], other, group=group))
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return into


def _objects(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    received: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list(["x" * 1000, {"from": 0}], dst=size - 1, group=group)
    elif rank == size - 1:
        dist.recv_object_list(received, src=0, group=group)
        assert received == ["x" * 1000, {"from": 0}]
    return []


def from_rank_to_rank() -> None:
    _against_gloo([_ring, _tags_in_another_order, _same_tag_in_order, _any_source, _batch, _objects])


# --- Collectives -----------------------------------------------------------------------------------------------------


def _gather(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    results = []
    for number, dtype in enumerate(GATHERED):
        root = number % size
        outputs = [torch.zeros(3, 5, dtype=dtype) for _ in range(size)] if rank == root else None
        dist.gather(data(rank, (3, 5), dtype, number), outputs, dst=root, group=group)
        results += outputs or []
    return results


def _scatter(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    results = []
    for number, dtype in enumerate(GATHERED):
        root = number % size
        inputs = [data(r, (4, 2), dtype, number) for r in range(size)] if rank == root else None
        results.append(torch.zeros(4, 2, dtype=dtype))
        dist.scatter(results[-1], inputs, src=root, group=group)
    return results


def _all_to_all_single(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    results = []
    for seed, dtype in enumerate((torch.float32, torch.int64, torch.bfloat16, torch.complex64)):
        even = torch.zeros(size * 3, 2, dtype=dtype)
        dist.all_to_all_single(even, data(rank, (size * 3, 2), dtype, seed), group=group)
        sends = [(2 * rank + to) % 4 for to in range(size)]  # None at all for some.
        receives = [(2 * r + rank) % 4 for r in range(size)]
        uneven = torch.zeros(sum(receives), 5, dtype=dtype)
        dist.all_to_all_single(uneven, data(rank, (sum(sends), 5), dtype, seed), receives, sends, group=group)
        results += [even, uneven]
    return results


def _reduce(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    results = []
    for root in range(size):
        for dtype, op in (
            (torch.int64, dist.ReduceOp.SUM),
            (torch.int32, dist.ReduceOp.MAX),
            (torch.float64, dist.ReduceOp.MIN),
            (torch.uint8, dist.ReduceOp.BOR),
        ):
            tensor = data(rank, (33,), dtype, root)
            before = tensor.clone()
            dist.reduce(tensor, root, op=op, group=group)
            if rank == root:
                results.append(tensor)
            else:
                assert torch.equal(tensor, before) or group is not dist.group.WORLD, "only the root's tensor may change"
    return results


def _reduce_scatter(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    results = []
    for seed, dtype in enumerate((torch.int64, torch.int32)):
        listed = torch.zeros(6, dtype=dtype)
        dist.reduce_scatter(listed, [data(rank, (6,), dtype, 10 * seed + k) for k in range(size)], group=group)
        into = torch.zeros(4, 3, dtype=dtype)
        dist.reduce_scatter_tensor(into, data(rank, (4 * size, 3), dtype, seed), group=group)
        results += [listed, into]
    return results


def _coalesced(rank: int, size: int, group: Any) -> list[torch.Tensor]:
    inputs = [data(rank, (k + 1, 2), torch.int64, k) for k in range(4)]
    gathered = [torch.zeros(size * (k + 1), 2, dtype=torch.int64) for k in range(4)]
    with dist._coalescing_manager(group, device=torch.device("cpu"), async_ops=True) as manager:
        for output, each in zip(gathered, inputs, strict=True):
            dist.all_gather_into_tensor(output, each, group=group)
    manager.wait()
    scattered = [torch.zeros(k + 1, 2, dtype=torch.int64) for k in range(4)]
    with dist._coalescing_manager(group, device=torch.device("cpu"), async_ops=True) as manager:
        for k, output in enumerate(scattered):
            dist.reduce_scatter_tensor(output, data(rank, (size * (k + 1), 2), torch.int64, k), group=group)
    manager.wait()
    summed = [each.clone() for each in inputs]
    with dist._coalescing_manager(group, device=torch.device("cpu"), async_ops=True) as manager:
        for each in summed:
            dist.all_reduce(each, group=group)
    manager.wait()
    return [*gathered, *scattered, *summed]


def _coalesced_messages(rank: int, size: int) -> None:
    into = torch.zeros(100)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(torch.full((100,), float(rank)), (rank + 1) % size)
        dist.irecv(into, (rank - 1) % size)
    manager.wait()
    assert into.tolist() == [float((rank - 1) % size)] * 100


def collectives() -> None:
    _against_gloo([_gather, _scatter, _all_to_all_single, _reduce, _reduce_scatter])


def coalesced() -> None:
    with world() as (rank, size):
        _coalesced_messages(rank, size)
        gathered = _coalesced(rank, size, dist.group.WORLD)
        for k in range(4):
            assert torch.equal(gathered[k], torch.cat([data(r, (k + 1, 2), torch.int64, k) for r in range(size)]))
            total = sum(data(r, (size * (k + 1), 2), torch.int64, k) for r in range(size))
            assert torch.equal(gathered[4 + k], total[rank * (k + 1) : (rank + 1) * (k + 1)])
            assert torch.equal(gathered[8 + k], sum(data(r, (k + 1, 2), torch.int64, k) for r in range(size)))


def more_than_gloo() -> None:
    """What gloo does not do, or asks of the caller: any layout, uneven all_gather, lists of any sizes."""
    with world() as (rank, size):
        outputs = [torch.zeros(2 * r + 1, 3) for r in range(size)]
        dist.all_gather(outputs, data(rank, (2 * rank + 1, 3), torch.float32))
        for r in range(size):
            assert torch.equal(outputs[r], data(r, (2 * r + 1, 3), torch.float32)), "uneven all_gather"
        lists = [torch.zeros(rank + 1, dtype=torch.float8_e4m3fn) for _ in range(size)]
        dist.all_to_all(lists, [torch.full((to + 1,), float(rank), dtype=torch.float8_e4m3fn) for to in range(size)])
        for r in range(size):
            assert lists[r].float().tolist() == [float(r)] * (rank + 1)

        whole = torch.zeros(6, 4)
        requests = [dist.irecv(whole[::2], (rank - 1) % size)] if size > 1 else []
        if size > 1:
            requests.append(
                dist.isend(data(rank, (4, 3), torch.float32).t().reshape(3, 4).contiguous(), (rank + 1) % size)
            )
        for work in requests:
            work.wait()
        assert whole[1::2].count_nonzero() == 0, "memory between the rows was written"
        blocks = [torch.zeros(4, 3).t() for _ in range(size)] if rank == 0 else None
        dist.gather(data(rank, (4, 3), torch.float32).t(), blocks, dst=0)
        for r, block in enumerate(blocks or []):
            assert torch.equal(block, data(r, (4, 3), torch.float32).t()), "gather of transposed tensors"
        numbers = data(rank, (5,), torch.complex64)
        dist.reduce(numbers, 0)
        if rank == 0:
            torch.testing.assert_close(numbers, sum(data(r, (5,), torch.complex64) for r in range(size)))
        scaled = torch.full((3,), float(rank + 1))
        dist.reduce(scaled, 0, op=dist._make_nccl_premul_sum(0.5))
        if rank == 0:
            assert scaled.tolist() == [0.5 * size * (size + 1) / 2] * 3


def groups() -> None:
    """Messages of several groups at once: ranks are the group's, tags of one are not those of another."""
    with world() as (rank, size):
        pairs = [dist.new_group([0, 1]), dist.new_group([size - 1, 0])]
        members = [[0, 1], [size - 1, 0]]
        works, into = [], {}
        for number, (group, ranks) in enumerate(zip(pairs, members, strict=True)):
            if rank not in ranks:
                continue
            other = ranks[1 - ranks.index(rank)]
            into[number] = torch.zeros(3)
            works.append(dist.irecv(into[number], other, group=group))
            works.append(dist.isend(torch.full((3,), 10.0 * number + rank), other, group=group))
        for work in works:
            work.wait()
        for number, ranks in enumerate(members):
            if rank in ranks:
                other = ranks[1 - ranks.index(rank)]
                assert into[number].tolist() == [10.0 * number + other] * 3
        dist.barrier()


def works() -> None:
    with world() as (rank, size):
        other = rank ^ 1
        into = torch.zeros(1000)
        receive = dist.irecv(into, other)
        assert not receive.is_completed()
        dist.barrier()
        send = dist.isend(torch.full((1000,), float(rank)), other)
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(receive.wait()))
        thread.start()
        thread.join(30)
        assert results == [True], "wait() on another thread"
        send.wait()
        assert receive.is_completed()
        assert into[0] == other
        assert receive._source_rank() == other
        future = dist.irecv(into, other).get_future()
        dist.isend(torch.full((1000,), 7.0), other)  # Nobody keeps it.
        assert future.wait()[0][0] == 7
        with torch.autograd.profiler.profile() as profile:
            if rank == 0:
                dist.send(into, 1)
            else:
                dist.recv(into)
        names = [event.name for event in profile.function_events]
        assert names.count("herring:send" if rank == 0 else "herring:recvAnySource") == 1, names
        assert size == 2


def errors() -> None:
    with world() as (rank, size):
        other = rank ^ 1
        assert size == 2
        for large in (4, 1_000_000):
            tensor = torch.zeros(large + rank)
            with expect_error(
                RuntimeError, "mismatch", "rank 0", "rank 1", f"{4 * large} bytes", f"{4 * large + 4} bytes"
            ):
                if rank == 0:
                    dist.send(tensor, other, tag=3)
                else:
                    dist.recv(tensor, other, tag=3)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        with expect_error(ValueError, "Tag must be nonnegative"):
            backend.send([torch.zeros(1)], other, -1)
        with expect_error(ValueError, "rank 9"):
            backend.recv([torch.zeros(1)], 9, 0)
        with expect_error(NotImplementedError):
            backend.send([torch.eye(3).to_sparse()], other, 0)
        group = dist.new_group(timeout=timedelta(seconds=0.5))
        with expect_error(
            RuntimeError, "timeout", "receive of 4 bytes", "tag 11", f"rank {rank} waits for rank {other}"
        ):
            dist.recv(torch.zeros(1), other, group=group, tag=11)
        with expect_error(RuntimeError, "timeout", "send of 4 bytes", "tag 12", f"rank {other}"):
            dist.send(torch.zeros(1), other, group=group, tag=12)
        dist.barrier()
        with expect_error(RuntimeError, "mismatch", "float32", "int32"):
            dtype = torch.float32 if rank == 0 else torch.int32
            dist.all_to_all_single(torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype))
        value = torch.ones(1)  # The group is as good as before.
        dist.all_reduce(value)
        assert value.item() == size


def large() -> None:
    with world() as (rank, size):
        count = 6_000_001
        into = torch.zeros(count)
        ops = [
            dist.P2POp(dist.isend, torch.full((count,), float(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, into, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(into, torch.full((count,), float((rank - 1) % size)))
        exchanged = torch.zeros(size * 500_000)
        dist.all_to_all_single(exchanged, torch.full((size * 500_000,), float(rank)))
        assert torch.equal(exchanged, torch.arange(float(size)).repeat_interleave(500_000))
