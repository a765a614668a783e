"""Operations in several steps, against what numpy says: alltoall, reduce_scatter, uneven allgather, lists of arrays."""

import subprocess
import sys
import time

import numpy as np
import pytest

import herring

FABRIC = {"HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"}
WAYS = pytest.mark.parametrize("env", [{}, FABRIC], ids=["shared_memory", "fabric"])


def mine_of(rank, rows, dtype=np.float64):
    """Rank's array: no two elements of any ranks are equal."""
    return (np.arange(rows * 3).reshape(rows, 3) + 1000 * rank).astype(dtype)


@WAYS
@pytest.mark.parametrize("size", [1, 3])
def test_alltoall(job, size, env):
    job.run(exchange, size, env=env)


def exchange():
    herring.init()
    rank, size = herring.rank(), herring.size()
    for rows in (1, 20_000):
        result = herring.alltoall(mine_of(rank, rows * size), name="even")
        blocks = [mine_of(each, rows * size)[rank * rows : (rank + 1) * rows] for each in range(size)]
        np.testing.assert_array_equal(result, np.concatenate(blocks))
    # Rank a sends a + b rows to rank b: some get none.
    splits = [rank + each for each in range(size)]
    handle = herring.alltoall(mine_of(rank, sum(splits)), splits, async_op=True)
    result, received = handle.wait(30)
    assert handle.done()
    assert received == splits
    blocks = []
    for each in range(size):
        start = sum(each + before for before in range(rank))
        blocks.append(mine_of(each, size * size * 2)[start : start + each + rank])
    np.testing.assert_array_equal(result, np.concatenate(blocks))
    for bad, told in (([1] * (size + 1), "splits are"), ([-1] * size, "none negative"), ([9] * size, "at most")):
        with pytest.raises(herring.InvalidArgumentError, match=told):
            herring.alltoall(np.zeros(3), bad)
    with pytest.raises(herring.InvalidArgumentError, match="is a scalar"):
        herring.alltoall(3.0)
    if size > 1:
        with pytest.raises(herring.InvalidArgumentError, match="cannot be divided equally"):
            herring.alltoall(np.zeros(size + 1))


@WAYS
@pytest.mark.parametrize("size", [1, 3])
def test_reduce_scatter(job, size, env):
    job.run(scatter_sums, size, env=env)


def scatter_sums():
    herring.init()
    rank, size = herring.rank(), herring.size()
    for rows in (0, 1, size, 10_001):
        source = mine_of(rank, rows)
        total = sum(mine_of(each, rows) for each in range(size))
        result = herring.reduce_scatter(source, "sum")
        np.testing.assert_array_equal(result, np.array_split(total, size)[rank])
        mean = herring.reduce_scatter(source, name="mean", async_op=True).wait()
        np.testing.assert_allclose(mean, np.array_split(total / size, size)[rank])
        np.testing.assert_array_equal(source, mine_of(rank, rows))
    with pytest.raises(herring.InvalidArgumentError, match="op is 'mean'"):
        herring.reduce_scatter(np.ones(3), "mean")
    with pytest.raises(herring.InvalidArgumentError, match="is a scalar"):
        herring.reduce_scatter(1.0)


@WAYS
@pytest.mark.parametrize("size", [1, 3])
def test_uneven_allgather(job, size, env):
    job.run(gather_uneven, size, env=env)


def gather_uneven():
    herring.init()
    rank, size = herring.rank(), herring.size()
    for rows in ([5, 0, 20_000], [0, 0, 0], [2, 2, 2]):
        expected = np.concatenate([mine_of(each, rows[each]) for each in range(size)])
        np.testing.assert_array_equal(herring.allgather(mine_of(rank, rows[rank]), uneven=True), expected)
        handle = herring.allgather(mine_of(rank, rows[rank]), uneven=True, name="rows", async_op=True)
        np.testing.assert_array_equal(handle.wait(), expected)
    assert herring.allgather(float(rank), uneven=True).tolist() == [float(each) for each in range(size)]
    if size > 1:
        with pytest.raises(herring.MismatchError, match=r"rank 0: float64\[2, 3\], rank 1: float64\[2, 1\]"):
            herring.allgather(np.zeros((2, 1 if rank == 1 else 3)), uneven=True)
        with pytest.raises(herring.MismatchError, match="float32.*int64"):
            herring.allgather(np.zeros(1, np.int64 if rank == 1 else np.float32), uneven=True)
    herring.barrier()


@WAYS
@pytest.mark.parametrize("size", [1, 3])
def test_lists_of_arrays(job, size, env):
    job.run(reduce_lists, size, env=env)


def reduce_lists():
    herring.init()
    rank, size = herring.rank(), herring.size()
    shapes = [(3,), (), (300_000,), (2, 5), (0, 4), (7,)]
    dtypes = [np.float32, np.float64, np.float32, np.int64, np.float32, np.float32]
    pairs = list(zip(shapes, dtypes, strict=True))
    arrays = [np.full(shape, rank + place, dtype) for place, (shape, dtype) in enumerate(pairs)]
    expected = [np.full(shape, sum(range(size)) + size * place, dtype) for place, (shape, dtype) in enumerate(pairs)]
    before = herring.stats()["ops_completed"]
    results = herring.grouped_allreduce(arrays, "sum")
    # The three small float32 ones are one operation; the one without elements, the large one and the others one each.
    if size > 1:
        assert herring.stats()["ops_completed"] - before == 5
    for array, result, wanted in zip(arrays, results, expected, strict=True):
        np.testing.assert_array_equal(result, wanted)
        assert (result.shape, result.dtype) == (array.shape, array.dtype)
        assert not np.shares_memory(array, result)
    handle = herring.grouped_allreduce_(arrays, "sum", name="list", async_op=True)
    assert handle.wait() is arrays
    for array, wanted in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)
    assert (herring.grouped_allreduce([[1.0, 3.0], 2], name="means")[0] == [1.0, 3.0]).all()


def test_bad_lists_are_refused(job):
    job.run(refuse_lists, 2)


def refuse_lists():
    herring.init()
    rank = herring.rank()
    with pytest.raises(herring.InvalidArgumentError, match="list is empty"):
        herring.grouped_allreduce([])
    read_only = np.ones(3)
    read_only.flags.writeable = False
    bad = [(np.ones((4, 4)).T[1:], "not contiguous"), (read_only, "read-only"), ([1.0], "a list"), (2.0, "a float")]
    for array, told in bad:
        with pytest.raises(herring.InvalidArgumentError, match=f"array 1 of the list.*{told}"):
            herring.grouped_allreduce_([np.ones(2), array])
    with pytest.raises(herring.MismatchError, match=r"^grouped_allreduce: ranks disagree.*float64\[3\].*float64\[4\]"):
        herring.grouped_allreduce([np.ones(2), np.ones(3 + rank)])
    with pytest.raises(
        herring.MismatchError, match=r"^grouped_allreduce 'odd': ranks disagree.*float64\[3\].*float64\[4\]"
    ):
        herring.grouped_allreduce([np.ones(2), np.ones(3 + rank)], name="odd")
    with pytest.raises(herring.MismatchError, match=r"^grouped_allreduce 'odd': ranks give lists of different lengths"):
        herring.grouped_allreduce([np.ones(2)] * (1 + rank), name="odd")
    with pytest.raises(herring.MismatchError, match=r"^allgather 'odd': "):
        herring.allgather(np.ones((2, 2 + rank)), uneven=True, name="odd")
    with pytest.raises(herring.InvalidArgumentError, match="dtype complex128"):
        herring.grouped_allreduce([np.ones(2, complex), np.ones(2)])
    assert herring.grouped_allreduce([np.ones(2), np.ones(2)], "sum")[1].tolist() == [2.0, 2.0]


def test_calls_that_differ_are_told(job):
    job.run(differ, 2, env={"HERRING_TIMEOUT_S": "3"})


def differ():
    herring.init()
    call = herring.reduce_scatter if herring.rank() == 0 else herring.alltoall
    with pytest.raises(herring.MismatchError, match="all_reduce"):
        call(np.ones(4))
    # One name, one call at a time: the second would meet the first's later steps.
    if herring.rank() == 0:
        first = herring.alltoall(np.ones(2), name="x", async_op=True)
        with pytest.raises(herring.InvalidArgumentError, match="'x' is in flight"):
            herring.alltoall(np.ones(2), name="x")
        with pytest.raises(herring.HerringTimeoutError, match="not done after 0.05 s; it is still running"):
            first.wait(0.05)
        herring.barrier()
        assert first.wait().tolist() == [1.0, 1.0]
    else:
        herring.barrier()
        herring.alltoall(np.ones(2), name="x")
    with pytest.raises(herring.HerringTimeoutError, match="rank 1" if herring.rank() == 0 else "rank 0"):
        herring.alltoall(np.ones(2), name=f"alone.{herring.rank()}", timeout=0.5)
    herring.barrier(timeout=30)  # Else one has left before the other's time-out.


def test_a_refused_call_starts_nothing(job):
    job.run(refuse_and_go_on, 2, env={"HERRING_TIMEOUT_S": "10"})


def refuse_and_go_on():
    """Only rank 0's call is wrong. It calls again as it should be, and meets the call that rank 1 made at once."""
    herring.init()
    rank = herring.rank()
    imaginary, deep, real = np.ones(4, complex), np.ones((1,) * 13), np.ones(4)
    for name in (None, "x"):
        if rank == 0:
            for bad, told in ((imaginary, "dtype complex128"), (deep, "13 dimensions")):
                for call in (
                    lambda array: herring.allgather(array, uneven=True),
                    lambda array: herring.alltoall(array, [1, 0]),
                ):
                    with pytest.raises(herring.InvalidArgumentError, match=told):
                        call(bad)
            for splits, told in (([1.5, 2.5], "1.5"), (3, "3"), (["a", 4], "'a'")):
                with pytest.raises(herring.InvalidArgumentError, match=f"alltoall: splits.*{told}"):
                    herring.alltoall(real, splits, name=name)
            for call in (herring.alltoall, herring.reduce_scatter):
                with pytest.raises(herring.InvalidArgumentError, match="dtype complex128"):
                    call(imaginary, name=name)
            with pytest.raises(herring.InvalidArgumentError, match="dtype complex128"):
                herring.grouped_allreduce([real, imaginary], name=name)
            for call in (
                herring.reduce_scatter,
                lambda *arguments, **more: herring.grouped_allreduce([real], *arguments[1:], **more),
            ):
                with pytest.raises(herring.InvalidArgumentError, match="band needs integers or bool, not float64"):
                    call(real, "band", name=name)
        assert herring.alltoall(real, np.array([3, 1]), name=name)[1] == ([3, 3] if rank == 0 else [1, 1])
        assert herring.reduce_scatter(real, "sum", name=name).tolist() == [2.0, 2.0]
        assert herring.allgather(real, uneven=True, name=name).shape == (8,)
        assert herring.grouped_allreduce([real, real], "sum", name=name)[1][0] == 2.0
    with pytest.raises(herring.InvalidArgumentError, match="timeout is 'soon'"):
        herring.alltoall(real, timeout="soon")


def test_lists_of_different_lengths_fail_on_all_ranks(job):
    job.run(differ_in_length, 3, env={"HERRING_TIMEOUT_S": "60"})


def differ_in_length():
    herring.init()
    rank = herring.rank()
    before = time.monotonic()
    for dtypes in (["f4"] * 3, ["f4", "f8", "i8"]):
        arrays = [np.ones(4, dtype) for dtype in (dtypes[:2] if rank == 1 else dtypes)]
        for again in range(2):
            with pytest.raises(herring.MismatchError, match=f"from 2 to 3 arrays; rank {rank} gives {len(arrays)}"):
                herring.grouped_allreduce(arrays, name=None if again else "same")
    assert herring.grouped_allreduce([np.ones(1), np.ones(2)], "sum")[1].tolist() == [3.0, 3.0]
    assert time.monotonic() - before < 30  # Nobody has waited for the time-out.


def test_lists_of_one_and_of_large_arrays_that_differ_end_at_once(job):
    job.run(differ_anyhow, 2, env={"HERRING_TIMEOUT_S": "60"})


def differ_anyhow():
    herring.init()
    rank = herring.rank()
    before = time.monotonic()
    small, large = np.ones(4, np.float32), np.ones(300_000, np.float32)
    longer = [([small], [small] * 3), ([large] * 2, [large] * 3), ([large], [small] * 2), ([small], [large] * 2)]
    for lists in longer:
        for again in range(2):
            arrays = [array.copy() for array in lists[rank]]
            lengths = sorted(map(len, lists))
            with pytest.raises(herring.MismatchError, match=f"from {lengths[0]} to {lengths[1]} arrays; rank {rank} "):
                herring.grouped_allreduce_(arrays, name=None if again else "same")
    for lists in (([large, small], [large, large]), ([small, small], [small, large])):
        with pytest.raises(
            herring.MismatchError, match=r"float32\[4\].*float32\[300000\]|float32\[300000\].*float32\[4\]"
        ):
            herring.grouped_allreduce([array.copy() for array in lists[rank]])
    results = herring.grouped_allreduce([large] * 3, "sum")
    assert [each[-1] for each in results] == [2.0] * 3
    assert time.monotonic() - before < 50  # Nobody has waited for the time-out.


def test_results_for_torch_are_torch(job):
    pytest.importorskip("torch", reason="torch is not installed")
    job.run(with_torch, 2)


def with_torch():
    import torch

    herring.init()
    weight = torch.nn.Parameter(torch.ones(2 * herring.size()))
    calls = (herring.alltoall, herring.reduce_scatter, lambda each: herring.allgather(each, uneven=True))
    calls += tuple(
        lambda each, call=call: call([each, each]) for call in (herring.grouped_allreduce, herring.grouped_allreduce_)
    )
    for call in calls:
        with pytest.raises(herring.InvalidArgumentError, match=r"requires a gradient.*pass tensor.detach\(\)"):
            call(weight)
    rank = herring.rank()
    mine = torch.full((2, 2), float(rank), dtype=torch.bfloat16)
    assert herring.alltoall(mine)[:, 0].tolist() == [0.0, 1.0]
    assert herring.reduce_scatter(mine, "sum").tolist() == [[1.0, 1.0]]
    assert herring.allgather(mine[:rank], uneven=True).tolist() == [[1.0, 1.0]]
    results = herring.grouped_allreduce([mine, mine.float()], "sum")
    assert [each.dtype for each in results] == [torch.bfloat16, torch.float32]
    assert isinstance(herring.allgather(mine, uneven=True), torch.Tensor)
    with pytest.raises(herring.InvalidArgumentError, match="not contiguous"):
        herring.grouped_allreduce_([torch.ones(3, 2).T])


ELASTIC = """
import herring, numpy as np
herring.init()
calls = [
    lambda: herring.alltoall(np.ones(2)),
    lambda: herring.reduce_scatter(np.ones(2)),
    lambda: herring.allgather(np.ones(2), uneven=True),
    lambda: herring.new_group([0]),
    lambda: herring.split(0),
]
for call in calls:
    try:
        call()
    except herring.InvalidArgumentError as error:
        assert "does not work in an elastic job" in str(error), error
    else:
        raise SystemExit("it was not refused")
assert [each.tolist() for each in herring.grouped_allreduce([[1.0], [2.0, 3.0]], "sum")] == [[2.0], [4.0, 6.0]]
print("all refused", flush=True)
"""


def test_elastic_jobs_refuse_what_depends_on_who_is_there(clean_env):
    command = [sys.executable, "-m", "herring._launch", "--elastic", "-np", "2", sys.executable, "-c", ELASTIC]
    done = subprocess.run(command, env=clean_env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.count("all refused") == 2, done.stdout + done.stderr


def test_a_name_is_a_string(job):
    job.run(bad_names, 1)


def bad_names():
    herring.init()
    x = np.ones(2)
    calls = [
        lambda name: herring.allreduce(x, name=name),
        lambda name: herring.alltoall(x, name=name),
        lambda name: herring.reduce_scatter(x, name=name),
        lambda name: herring.allgather(x, uneven=True, name=name),
        lambda name: herring.grouped_allreduce([x], name=name),
        lambda name: herring.broadcast(x, name=name),
        lambda name: herring.barrier(name=name),
    ]
    for call in calls:
        for name, told in ((5, "name is 5; it must be a string"), (b"x", "it must be a string"),
                           ("a\ud800", "name is 'a.ud800'; it must have UTF-8")):  # fmt: skip
            with pytest.raises(herring.InvalidArgumentError, match=told):
                call(name)
