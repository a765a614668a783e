"""What each rank does in test_collectives.py."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
import torch.distributed as dist
from common import FLOATS, INTEGERS, data, expect_error, same_everywhere, tolerance, world

SHAPES = ((7,), (), (0,), (3, 5, 2), (1, 1, 1, 1, 2, 1, 1, 1, 3), (40_001,))


def _reference(op: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Of all ranks' inputs, in float64 or int64."""
    wide = [each.to(torch.float64 if each.is_floating_point() else torch.int64) for each in inputs]
    stacked = torch.stack(wide)
    if op == dist.ReduceOp.SUM:
        return stacked.sum(0)
    if op == dist.ReduceOp.AVG:
        return stacked.sum(0) / len(inputs)
    if op == dist.ReduceOp.PRODUCT:
        return stacked.prod(0)
    if op == dist.ReduceOp.MIN:
        return stacked.amin(0)
    if op == dist.ReduceOp.MAX:
        return stacked.amax(0)
    result = wide[0].clone()
    for each in wide[1:]:
        result = {
            dist.ReduceOp.BAND: torch.bitwise_and,
            dist.ReduceOp.BOR: torch.bitwise_or,
            dist.ReduceOp.BXOR: torch.bitwise_xor,
        }[op](result, each)
    return result


def _check(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert result.shape == expected.shape, f"{what}: {result.shape} is not {expected.shape}"
    torch.testing.assert_close(
        result, expected.to(result.dtype), **tolerance(result.dtype), msg=lambda text: f"{what}: {text}"
    )


def all_reduce() -> None:
    with world() as (rank, size):
        reduce = dist.ReduceOp
        for dtype in FLOATS:
            for op in (reduce.SUM, reduce.AVG, reduce.PRODUCT, reduce.MIN, reduce.MAX):
                _all_reduce_one(rank, size, dtype, op)
        for dtype in INTEGERS:
            for op in (reduce.SUM, reduce.PRODUCT, reduce.MIN, reduce.MAX, reduce.BAND, reduce.BOR, reduce.BXOR):
                _all_reduce_one(rank, size, dtype, op)
        for op in (reduce.BAND, reduce.BOR, reduce.BXOR, reduce.MAX, reduce.MIN):
            _all_reduce_one(rank, size, torch.bool, op)


def _all_reduce_one(rank: int, size: int, dtype: torch.dtype, op: Any) -> None:
    for seed, shape in enumerate(SHAPES):
        tensor = data(rank, shape, dtype, seed)
        dist.all_reduce(tensor, op=op)
        what = f"all_reduce {dtype} {op} {shape}"
        _check(tensor, _reference(op, [data(r, shape, dtype, seed) for r in range(size)]), what)
        if dtype in FLOATS:
            same_everywhere(tensor, what)


def layouts_and_odd_calls() -> None:
    with world() as (rank, size):
        inputs = [data(r, (6, 8), torch.float32) for r in range(size)]
        expected = torch.stack(inputs).sum(0)
        transposed = inputs[rank].clone().t()
        dist.all_reduce(transposed)
        _check(transposed, expected.t(), "transposed")
        whole = torch.zeros(12, 8)
        whole[::2] = inputs[rank]
        dist.all_reduce(whole[::2])
        _check(whole[::2], expected, "every second row")
        assert whole[1::2].count_nonzero() == 0, "memory between the rows was written"
        channels_last = data(rank, (2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last)
        dist.all_reduce(channels_last)
        _check(channels_last, sum(data(r, (2, 3, 4, 5), torch.float32) for r in range(size)), "channels_last")
        leaf = inputs[rank].clone().requires_grad_()
        with torch.no_grad():
            dist.all_reduce(leaf)
        _check(leaf.detach(), expected, "a leaf that requires grad")
        with expect_error(ValueError, "share one place in memory"):
            dist.all_reduce(torch.zeros(1).expand(5))

        numbers = [data(r, (4, 3), torch.complex64) for r in range(size)]
        for op, want in ((dist.ReduceOp.SUM, sum(numbers)), (dist.ReduceOp.AVG, sum(numbers) / size)):
            value = numbers[rank].clone()
            dist.all_reduce(value, op=op)
            _check(value, want, f"complex {op}")
        # Past torch's dispatcher, which hands the backend a copy of such a view and drops the result.
        negated = numbers[rank].clone().conj().imag
        assert negated.is_neg()
        dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([negated]).wait()
        _check(negated.resolve_neg(), -sum(each.imag for each in numbers), "a view with the negative bit")
        with expect_error((ValueError, RuntimeError), "complex"):
            dist.all_reduce(numbers[rank].clone(), op=dist.ReduceOp.MAX)

        group = dist.group.WORLD
        several = [data(rank, (9,), torch.float32, seed) for seed in (1, 2)]
        group.allreduce(several, dist.AllreduceOptions()).wait()
        want = sum(data(r, (9,), torch.float32, seed) for r in range(size) for seed in (1, 2))
        for tensor in several:
            _check(tensor, want, "several tensors in one call")
        with torch.inference_mode():
            inference = torch.ones(3)
            dist.all_reduce(inference)
        assert inference.tolist() == [size] * 3
        scaled = torch.full((5,), float(rank + 1))
        dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
        _check(scaled, torch.full((5,), 0.5 * size * (size + 1) / 2), "premul_sum")
        coalesced = [data(rank, (k + 1,), torch.float32, k) for k in range(5)]
        group.allreduce_coalesced(coalesced, dist.AllreduceCoalescedOptions()).wait()
        for k, tensor in enumerate(coalesced):
            _check(tensor, sum(data(r, (k + 1,), torch.float32, k) for r in range(size)), "coalesced")


def moves() -> None:
    with world() as (rank, size):
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16):
            _move_one(rank, size, dtype)
        _scatter_and_exchange(rank, size)
        _objects(rank, size)
        dist.barrier()


def _bits(dtype: torch.dtype, rank: int, shape: tuple[int, ...], seed: int = 3) -> torch.Tensor:
    if dtype in (torch.float8_e4m3fn, torch.uint16):
        return data(rank, shape, torch.float32, seed).abs().to(dtype)
    return data(rank, shape, dtype, seed)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _move_one(rank: int, size: int, dtype: torch.dtype) -> None:
    shape = (3, 5)
    for root in range(size):
        tensor = _bits(dtype, rank, shape)
        dist.broadcast(tensor, src=root)
        assert _equal(tensor, _bits(dtype, root, shape)), f"broadcast {dtype} from {root}"
    outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
    dist.all_gather(outputs, _bits(dtype, rank, shape))
    into = torch.empty((size * 3, 5), dtype=dtype)
    dist.all_gather_into_tensor(into, _bits(dtype, rank, shape))
    for r in range(size):
        assert _equal(outputs[r], _bits(dtype, r, shape)), f"all_gather {dtype}"
        assert _equal(into[3 * r : 3 * r + 3], _bits(dtype, r, shape)), f"all_gather_into_tensor {dtype}"
    gathered = [torch.empty(shape, dtype=dtype) for _ in range(size)] if rank == size - 1 else None
    dist.gather(_bits(dtype, rank, shape), gathered, dst=size - 1)
    for r, block in enumerate(gathered or []):
        assert _equal(block, _bits(dtype, r, shape)), f"gather {dtype}"
    scattered = torch.empty(shape, dtype=dtype)
    blocks = [_bits(dtype, r, shape, 4) for r in range(size)] if rank == 0 else None
    dist.scatter(scattered, blocks, src=0)
    assert _equal(scattered, _bits(dtype, rank, shape, 4)), f"scatter {dtype}"


def _scatter_and_exchange(rank: int, size: int) -> None:
    total = torch.full((4,), float(rank))
    before = total.clone()
    dist.reduce(total, dst=1 % size)
    want = torch.full((4,), float(sum(range(size))))
    assert torch.equal(total, want if rank == 1 % size else before), "reduce changes the root's tensor only"

    inputs = [[data(r, (6,), torch.float32, 10 + k) for k in range(size)] for r in range(size)]
    output = torch.empty(6)
    dist.reduce_scatter(output, [each.clone() for each in inputs[rank]])
    want = sum(inputs[r][rank] for r in range(size))
    _check(output, want, "reduce_scatter")
    joined = torch.cat(inputs[rank])
    kept = joined.clone()
    dist.reduce_scatter_tensor(output, joined, op=dist.ReduceOp.AVG)
    _check(output, want / size, "reduce_scatter_tensor")
    assert torch.equal(joined, kept), "the input of reduce_scatter_tensor changed"

    exchanged = torch.empty(size * 2)
    dist.all_to_all_single(exchanged, torch.arange(size * 2.0) + 100 * rank)
    assert exchanged.tolist() == [100.0 * r + 2 * rank + k for r in range(size) for k in range(2)]
    sends = [(rank + to) % 3 for to in range(size)]
    receives = [(r + rank) % 3 for r in range(size)]
    uneven = torch.empty((sum(receives), 2), dtype=torch.int64)
    rows = torch.tensor([[rank, to] for to in range(size) for _ in range(sends[to])], dtype=torch.int64).reshape(-1, 2)
    dist.all_to_all_single(uneven, rows, receives, sends)
    assert uneven.tolist() == [[r, rank] for r in range(size) for _ in range(receives[r])], "uneven all_to_all_single"
    lists = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(lists, [torch.full((to + 1,), 10.0 * rank + to) for to in range(size)])
    for r in range(size):
        assert lists[r].tolist() == [10.0 * r + rank] * (rank + 1), "all_to_all of a list"
    with expect_error(RuntimeError, "all_to_all", "mismatch", "expects"):
        wrong = [2] * size if rank == 0 else [1] * size
        dist.all_to_all_single(torch.empty(sum(wrong)), torch.empty(size), wrong, [1] * size)


def _objects(rank: int, size: int) -> None:
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank})
    assert everything == [{"rank": r, "text": "x" * r} for r in range(size)]
    told = [("from", 0) if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told == [("from", 0)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]


def futures() -> None:
    with world() as (rank, size):
        works = [dist.all_reduce(torch.full((1000 + k,), float(rank)), async_op=True) for k in range(20)]
        for work in reversed(works):
            assert work.wait()
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()
            assert work.result()[0][0] == sum(range(size))
        # Callbacks that themselves wait for collectives, as PowerSGD's do, deeper than any fixed number of threads.
        total = torch.ones(4)
        future = dist.all_reduce(total, async_op=True).get_future()
        for _ in range(8):
            future = future.then(_reduce_again)
        assert future.wait()[0].tolist() == [float(size**9)] * 4
        # Several chains at once, in the same order on every rank only for the calls that start them.
        first = dist.all_reduce(torch.ones(2), async_op=True)
        assert first.get_future().then(lambda done: done.value()[0].sum().item()).wait() == 2.0 * size
        # A Work that nobody keeps still writes its result.
        kept = torch.ones(100_000)
        dist.all_reduce(kept, async_op=True)
        dist.barrier()
        dist.all_reduce(torch.zeros(1))
        other = dist.all_reduce(torch.ones(3), async_op=True)
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(other.wait()))
        thread.start()
        thread.join(30)
        assert results == [True], "wait() on another thread"
        done = dist.all_reduce(torch.ones(3), async_op=True)
        done.wait()
        assert done.get_future().done()
        assert done.get_future().value()[0].tolist() == [size] * 3


def _reduce_again(done: Any) -> list[torch.Tensor]:
    tensor = done.value()[0].clone()
    return [dist.all_reduce(tensor, async_op=True).get_future().wait()[0]]


def profiler() -> None:
    with world() as (_rank, _size):
        with torch.autograd.profiler.profile() as profile:
            dist.all_reduce(torch.ones(10))
            dist.broadcast(torch.ones(10), src=0)
            dist.all_reduce(torch.ones(10), async_op=True).wait()
        names = [event.name for event in profile.function_events]
        assert names.count("herring:all_reduce") == 2, names
        assert names.count("herring:broadcast") == 1, names


def refusals() -> None:
    with world() as (_rank, size):
        with expect_error((NotImplementedError, RuntimeError), "parse"):
            dist.broadcast(torch.eye(3).to_sparse(), src=0)
        with expect_error(TypeError, "all_reduce", "supported: float32"):
            dist.all_reduce(torch.zeros(3).to(torch.float8_e4m3fn))
        with expect_error(ValueError, "BAND", "integers"):
            dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.BAND)
        with expect_error(ValueError, "all_gather", "must match the input"):
            dist.all_gather([torch.empty(3) for _ in range(size)], torch.empty(4))
        # Refused on every rank before anything was sent: the group is as good as before.
        value = torch.ones(2)
        dist.all_reduce(value)
        assert value.tolist() == [size, size]
        group = dist.new_group()
        backend = group._get_backend(torch.device("cpu"))
        dist.destroy_process_group(group)
        with expect_error(RuntimeError, "destroyed"):
            backend.allreduce([torch.ones(1)])
    with expect_error((ValueError, RuntimeError)):
        dist.all_reduce(torch.ones(1))


def sizes_that_matter() -> None:
    """25 MB and an odd size across part boundaries."""
    with world() as (rank, size):
        for count in (25 * 2**18, 3_333_333):
            tensor = torch.arange(count, dtype=torch.float32).remainder_(1000).add_(rank)
            expected = (torch.arange(count, dtype=torch.float32).remainder_(1000) * size) + size * (size - 1) / 2
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected)
            assert math.isfinite(tensor.sum().item())
