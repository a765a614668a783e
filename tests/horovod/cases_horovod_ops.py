"""What each rank does in test_horovod_operations.py: the collectives, their names, sets and gradients."""

from __future__ import annotations

import torch
from common import data, expect_error

import herring.horovod.torch as hvd

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)


def _all(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    return [data(rank, shape, dtype, seed) for rank in range(hvd.size())]


def _mine(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return data(hvd.rank(), shape, dtype, seed)


def _close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(result, expected.to(result.dtype), rtol=tolerance, atol=tolerance)


def case_every_op_and_dtype() -> None:
    for seed, dtype in enumerate(DTYPES):
        rows = torch.stack(_all((3, 5), dtype, seed)).double()
        total = rows.sum(0)
        expected = {
            hvd.Sum: total,
            hvd.Average: total / hvd.size() if dtype.is_floating_point else (total / hvd.size()).trunc(),
            hvd.Min: rows.min(0).values,
            hvd.Max: rows.max(0).values,
            hvd.Product: rows.prod(0),
        }
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
        for op, value in expected.items():
            tensor = _mine((3, 5), dtype, seed)
            result = hvd.allreduce(tensor, op=op, name=f"every.{dtype}.{op}")
            assert result.dtype == dtype
            _close(result, value, tolerance)
            assert torch.equal(tensor, _mine((3, 5), dtype, seed)), "the input has changed"


def case_older_arguments() -> None:
    _close(hvd.allreduce(_mine((4,)), False), sum(_all((4,))))
    _close(hvd.allreduce(_mine((4,)), average=True, name="older"), sum(_all((4,))) / hvd.size())
    with expect_error(ValueError, "supersedes"):
        hvd.allreduce(_mine((4,)), average=True, op=hvd.Sum)


def case_scaling() -> None:
    total = sum(_all((6,)))
    _close(hvd.allreduce(_mine((6,)), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), total * 1.5)
    ints = torch.tensor([3, -3, 7], dtype=torch.int32)
    half = hvd.allreduce(ints, op=hvd.Sum, prescale_factor=0.5)  # 1, -1, 3: truncated before the sum
    assert half.tolist() == [each * hvd.size() for each in (1, -1, 3)]


def case_in_place_and_odd_layouts() -> None:
    tensor = _mine((4, 6))
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    _close(tensor, sum(_all((4, 6))))
    columns = _mine((4, 6)).t()
    hvd.allreduce_(columns, op=hvd.Sum, name="columns")
    _close(columns, sum(_all((4, 6))).t())
    leaf = torch.nn.Parameter(_mine((3,)))
    hvd.broadcast_(leaf, 1)
    _close(leaf.data, _all((3,))[1])
    number = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Max)
    assert number.shape == ()
    assert number.item() == hvd.size() - 1
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)


def case_names_match_in_any_order() -> None:
    numbers = list(range(12))
    mine = numbers[hvd.rank() :] + numbers[: hvd.rank()]
    for step in range(3):  # The names come again.
        sums = {n: hvd.allreduce_async(torch.full((5,), float(n + step)), name=f"o{n}", op=hvd.Sum) for n in mine}
        rows = {n: hvd.allgather_async(torch.full((hvd.rank() + 1,), n), name=f"o{n}") for n in reversed(mine)}
        for n in reversed(mine):
            assert hvd.synchronize(sums[n]).tolist() == [float((n + step) * hvd.size())] * 5
            assert hvd.synchronize(rows[n]).tolist() == [n] * sum(range(1, hvd.size() + 1))


def case_handles() -> None:
    handle = hvd.allreduce_async(_mine((8,)), name="handle", op=hvd.Sum)
    with expect_error(ValueError, "handle", "in flight"):
        hvd.allreduce_async(_mine((8,)), name="handle", op=hvd.Sum)
    hvd.barrier()
    while not hvd.poll(handle):
        pass
    _close(hvd.synchronize(handle), sum(_all((8,))))
    assert hvd.synchronize(handle) is None
    with expect_error(ValueError, "cleared"):
        hvd.poll(handle)


def case_grouped() -> None:
    shapes = ((3,), (2, 4), (1,))
    wanted = [sum(_all(shape, seed=i)) for i, shape in enumerate(shapes)]
    tensors = [_mine(shape, seed=i) for i, shape in enumerate(shapes)]
    for result, value in zip(hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group"), wanted, strict=True):
        _close(result, value)
    gathered = hvd.grouped_allgather(tensors)
    assert [tuple(each.shape) for each in gathered] == [(3 * hvd.size(),), (2 * hvd.size(), 4), (hvd.size(),)]
    parts = hvd.grouped_reducescatter([_mine((6, 2)), _mine((7,), seed=1)], op=hvd.Sum)
    rows = 6 // hvd.size()
    _close(parts[0], sum(_all((6, 2)))[rows * hvd.rank() : rows * (hvd.rank() + 1)])
    hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    for result, value in zip(tensors, wanted, strict=True):
        _close(result, value)


def case_uneven_allgather() -> None:
    mine = torch.full((2 * hvd.rank(), 3), float(hvd.rank()))  # Rank 0 brings nothing.
    result = hvd.allgather(mine)
    assert result[:, 0].tolist() == [float(rank) for rank in range(hvd.size()) for _ in range(2 * rank)]
    assert hvd.allgather(torch.tensor(hvd.rank())).tolist() == list(range(hvd.size()))
    assert hvd.allgather(torch.tensor([hvd.rank() % 2 == 0])).dtype == torch.bool


def case_alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    even = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    assert even.tolist() == [100 * source + 2 * rank + i for source in range(size) for i in range(2)]
    splits = torch.tensor([(rank + to) % 3 for to in range(size)])
    rows, received = hvd.alltoall(torch.full((int(splits.sum()), 2), float(rank)), splits)
    assert received.tolist() == [(source + rank) % 3 for source in range(size)]
    assert rows[:, 1].tolist() == [float(source) for source, n in enumerate(received.tolist()) for _ in range(n)]
    handle = hvd.alltoall_async(torch.arange(size), name="later")
    assert hvd.synchronize(handle)[1].tolist() == [1] * size
    with expect_error(ValueError, "splits"):
        hvd.alltoall(torch.arange(3), splits=[4] * size)
    with expect_error(ValueError, "equally"):
        hvd.alltoall(torch.arange(size + 1))


def case_reducescatter() -> None:
    total = sum(_all((hvd.size() + 1, 2)))
    result = hvd.reducescatter(_mine((hvd.size() + 1, 2)), op=hvd.Sum)
    start = 0 if hvd.rank() == 0 else hvd.rank() + 1  # The first rank has one row more.
    _close(result, total[start : start + (2 if hvd.rank() == 0 else 1)])
    with expect_error(ValueError, "dimension"):
        hvd.reducescatter(torch.tensor(1.0))


def case_process_sets() -> None:
    last = hvd.size() - 1
    ends = hvd.add_process_set([last, 0])
    middle = hvd.add_process_set(hvd.ProcessSet(range(1, last)))
    assert ends.ranks == [0, last]
    assert ends.size() == 2
    assert ends.included() == (hvd.rank() in (0, last))
    if ends.included():
        assert ends.rank() == (0 if hvd.rank() == 0 else 1)
        assert hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, process_set=ends).item() == last
        # The root is a rank of the job.
        assert hvd.broadcast(torch.tensor([hvd.rank()]), last, process_set=ends).item() == last
        assert hvd.allgather(torch.tensor([hvd.rank()]), process_set=ends).tolist() == [0, last]
        rows, _ = hvd.alltoall(torch.tensor([hvd.rank()] * 2), splits=[1, 1], process_set=ends)
        assert rows.tolist() == [0, last]
        with expect_error(ValueError, "root rank 1"):
            hvd.broadcast(torch.zeros(1), 1, process_set=ends)
    else:
        with expect_error(ValueError, "not in process set"):
            hvd.allreduce(torch.zeros(1), process_set=ends)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=middle).item() == hvd.size() - 2
    with expect_error(ValueError, "duplicate"):
        hvd.add_process_set([0, last])
    assert hvd.remove_process_set(ends)
    assert not hvd.remove_process_set(ends)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with expect_error(ValueError, "not in use"):
        hvd.allreduce(torch.zeros(1), process_set=ends)
    again = hvd.add_process_set([0, last])
    if again.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).item() == 2
    hvd.remove_process_set(again)
    hvd.remove_process_set(middle)


def case_sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.sparse_coo_tensor([[rank, size]], [[1.0, 2.0], [float(rank), 0.0]], (size + 1, 2))
    handle = hvd.sparse_allreduce_async(mine, "sparse", hvd.Average)
    dense = handle().to_dense()
    expected = torch.tensor([[1.0, 2.0]] * size + [[float(sum(range(size))), 0.0]]) / size
    _close(dense, expected)
    with expect_error(ValueError, "sparse_allreduce_async"):
        hvd.allreduce(mine)


def case_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()
    leaf = torch.ones(4, requires_grad=True)
    (hvd.allreduce(leaf, op=hvd.Sum) * (rank + 1)).sum().backward()
    _close(leaf.grad, torch.full((4,), sum(range(1, size + 1)) * 1.0))
    leaf = torch.ones(rank + 1, 2, requires_grad=True)
    gathered = hvd.allgather(leaf)
    (gathered * torch.arange(len(gathered))[:, None]).sum().backward()
    start = sum(range(1, rank + 1))
    _close(leaf.grad[:, 0], torch.arange(start, start + rank + 1.0))
    leaf = torch.ones(2, requires_grad=True)
    (hvd.broadcast(leaf, 1) * (rank + 1)).sum().backward()
    _close(leaf.grad, torch.full((2,), sum(range(1, size + 1)) / size if rank == 1 else 0.0))
    leaf = torch.ones(size, requires_grad=True)
    rows, _ = hvd.alltoall(leaf, splits=[1] * size)
    (rows * (rank + 1)).sum().backward()
    _close(leaf.grad, torch.arange(1.0, size + 1))
    leaf = torch.ones(size, requires_grad=True)
    (hvd.reducescatter(leaf) * (rank + 1)).sum().backward()
    _close(leaf.grad, torch.arange(1.0, size + 1))


def case_compression() -> None:
    tensor = _mine((5,))
    result = hvd.allreduce(tensor, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert result.dtype == torch.float32
    _close(result, sum(_all((5,))), 1e-2)


def case_objects() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, 1) == {"rank": 1}
    assert hvd.allgather_object([hvd.rank()] * hvd.rank()) == [[rank] * rank for rank in range(hvd.size())]


def case_places() -> None:
    assert sorted(hvd.allgather_object((hvd.rank(), hvd.local_rank()))) == [(r, r) for r in range(hvd.size())]
    assert (hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (hvd.size(), 0, 1)
    assert not hvd.nccl_built()
    assert not hvd.mpi_enabled()
    assert hvd.is_initialized()


def case_bad_tensors() -> None:
    with expect_error(ValueError, "complex64", "float32"):
        hvd.allreduce(torch.zeros(2, dtype=torch.complex64))
    with expect_error(ValueError, "meta", "CPU"):
        hvd.allreduce(torch.zeros(2, device="meta"))
    with expect_error(ValueError, "list"):
        hvd.allreduce([1.0])
    # Nothing of it was started: the next call matches.
    _close(hvd.allreduce(_mine((2,)), op=hvd.Sum), sum(_all((2,))))
