"""Small arrays that are reduced by name travel together: their bits, their errors and the order of their uses."""

import hashlib
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import herring

SHARED = {}
FABRIC = {"HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"}
WAYS = pytest.mark.parametrize("env", [SHARED, FABRIC], ids=["shared_memory", "fabric"])


def made(prefix, count=60):
    """Name, array and the mean over the ranks."""
    mean = (herring.size() - 1) / 2
    shapes = [(index + 1, 3) if index % 2 else (index,) for index in range(count)]
    return [
        (f"{prefix}.{index}", np.full(shape, herring.rank() + index, np.float32), np.full(shape, mean + index))
        for index, shape in enumerate(shapes)
    ]


def start_all(arrays):
    return [herring.allreduce_(array, name=name, async_op=True) for name, array, _ in arrays]


def check(arrays):
    for name, array, mean in arrays:
        np.testing.assert_array_equal(array, mean, err_msg=name)


@WAYS
def test_they_travel_together_in_any_order(job, env):
    job.run(any_order, 3, env=env)


def any_order():
    herring.init()
    for turn in range(4):
        arrays = made("any", 200)
        random.Random(10 * turn + herring.rank()).shuffle(arrays)
        before = herring.stats()["ops_completed"]
        handles = start_all(arrays)
        for place in random.Random(herring.rank()).sample(range(200), 200):
            assert handles[place].wait() is arrays[place][1]
            assert handles[place].done()
            assert handles[place].contributors() == [0, 1, 2]
        check(arrays)
        if turn > 0:
            assert herring.stats()["ops_completed"] - before < 100, "each by itself"


def test_the_bits_are_those_that_each_has_alone(job):
    digests = job.run(bits, 3)
    assert digests[0] == digests[1] == digests[2]


def bits():
    herring.init()
    generator = np.random.default_rng(herring.rank())
    cases = []
    for dtype in ("float32", "float64", "float16", "int32", "uint8", "bool"):
        for op in ("sum", "average", "min", "max", "product", "band"):
            if (op == "band" and "float" in dtype) or (op == "average" and dtype == "bool"):
                continue
            values = (generator.standard_normal(37) * 3).astype(dtype)
            cases.append((values, op, f"{dtype}.{op}"))
    handles = [herring.allreduce(values, op, name=name, async_op=True) for values, op, name in cases]
    digest = hashlib.sha256()
    for handle, (values, op, name) in zip(handles, cases, strict=True):
        result = handle.wait()
        assert result.tobytes() == herring.allreduce(values, op).tobytes(), name
        assert result.dtype == values.dtype
        digest.update(result.tobytes())
    return digest.hexdigest()


def test_handles_may_be_dropped(job):
    job.run(drop, 2)


def drop():
    import gc

    herring.init()
    for _ in range(20):
        for index in range(50):
            herring.allreduce(np.ones(100, np.float32), "sum", name=f"dropped.{index}", async_op=True)
        herring.allreduce(np.ones(400_000, np.float32), "sum", name="dropped.0", async_op=True)
        gc.collect()
    assert herring.allreduce(1.0, "sum") == 2.0


@WAYS
def test_uses_of_one_name_follow_each_other(job, env):
    job.run(one_name, 2, env=env)


def one_name():
    herring.init()
    rank = herring.rank()
    handles = [herring.allreduce(np.full(5, use), "sum", name="again", async_op=True) for use in range(100)]
    assert [handle.wait()[-1] for handle in handles] == [2 * use for use in range(100)]
    handles = [herring.allreduce(np.full(5, use), "sum", name="again", async_op=True) for use in range(100)]
    assert [handle.wait()[-1] for handle in handles[::-1]] == [2 * use for use in range(100)][::-1]
    for turn in range(3):
        # An array of its own, the same array again, another collective, a call that waits, a large one.
        array = np.ones(4)
        first = herring.allreduce_(array, "sum", name="mixed", async_op=True)
        second = herring.allreduce_(array, "sum", name="mixed", async_op=True)
        told = herring.broadcast(np.full(3, rank), 1, name="mixed", async_op=True)
        large = herring.allreduce(np.ones(400_000, np.float64), "sum", name="mixed", async_op=True)
        assert herring.allreduce(float(rank), "max", name="mixed") == 1.0
        assert large.wait()[-1] == 2
        assert told.wait().tolist() == [1, 1, 1]
        assert second.wait()[0] == 4
        assert first.wait()[0] == 4, turn


def test_who_waits_at_once_meets_who_does_not(job):
    job.run(waits_at_once, 2)


def waits_at_once():
    herring.init()
    for step in range(3):
        value = np.full(5, float(herring.rank()))
        if herring.rank() == step % 2:
            herring.allreduce_(value, "sum", name="mixed")
        else:
            herring.allreduce_(value, "sum", name="mixed", async_op=True).wait()
        assert value.tolist() == [1.0] * 5


def test_a_shape_that_differs_is_named_and_the_rest_is_whole(job):
    job.run(odd_shape, 3)


def odd_shape():
    herring.init()
    for turn in range(3):
        shape, dtype = (2 + herring.rank() // 2, "f4") if turn < 2 else (2, "f8" if herring.rank() == 2 else "f4")
        odd = herring.allreduce_(np.zeros(shape, dtype), name="odd.one", async_op=True)
        arrays = made("even")
        handles = start_all(arrays)
        with pytest.raises(herring.MismatchError) as caught:
            odd.wait()
        other = "float32[3]" if turn < 2 else "float64[2]"
        for part in ("odd.one", "float32[2]", other, "rank 2"):
            assert part in str(caught.value), str(caught.value)
        for handle in handles:
            handle.wait()
        check(arrays)
    size = herring.allreduce(np.zeros(10 if herring.rank() == 0 else 1_000_000, "f4"), name="size", async_op=True)
    with pytest.raises(herring.MismatchError, match=r"'size'.*float32\[10\].*float32\[1000000\]"):
        size.wait()


def test_what_cannot_be_reduced_is_said_of_itself_alone(job):
    job.run(bad_op, 2)


def bad_op():
    herring.init()
    arrays = made("good")
    handles = start_all(arrays)
    bad = herring.allreduce(np.ones(3), "band", name="bad", async_op=True)
    with pytest.raises(herring.InvalidArgumentError):
        bad.wait()
    for handle in handles:
        handle.wait()
    check(arrays)


def test_a_nan_is_blamed_on_its_array_and_rank(job):
    job.run(not_finite, 2, env={"HERRING_CHECK_FINITE": "on"})


def not_finite():
    herring.init()
    for _ in range(2):
        bad = np.ones(9, np.float32)
        if herring.rank() == 1:
            bad[3] = np.nan
        arrays = made("good")
        handles = start_all(arrays)
        broken = herring.allreduce_(bad, name="bad.one", async_op=True)
        with pytest.raises(herring.NotFiniteError, match=r"(?s)bad\.one.*rank 1|rank 1.*bad\.one"):
            broken.wait()
        for handle in handles:
            handle.wait()
        check(arrays)


def test_one_that_never_comes_is_named_with_its_ranks(job):
    job.run(never_comes, 2, env={"HERRING_TIMEOUT_S": "4"})


def never_comes():
    herring.init()
    arrays = made("there")
    handles = start_all(arrays)
    if herring.rank() == 0:
        missing = herring.allreduce(np.ones(3), name="only.on.0", async_op=True)
        with pytest.raises(herring.HerringTimeoutError, match=r"(?s)only\.on\.0.*rank 1"):
            missing.wait()
    for handle in handles:
        handle.wait()
    check(arrays)
    herring.barrier(timeout=60)


def test_groups_have_names_of_their_own(job):
    job.run(in_groups, 3)


def in_groups():
    herring.init()
    pairs = [herring.new_group([0, 1]), herring.new_group([1, 2])]
    for turn in range(2):
        handles = []
        for group in pairs:
            if group.rank is None:
                continue
            for index in range(20):
                array = np.full(4, float(herring.rank()))
                handle = herring.allreduce_(array, "sum", name=f"g.{index}", async_op=True, group=group)
                handles.append((handle, sum(group.ranks)))
        arrays = made("all")
        all_handles = start_all(arrays)
        for handle, wanted in handles:
            assert handle.wait().tolist() == [wanted] * 4, turn
        for handle in all_handles:
            handle.wait()
        check(arrays)
    for group in pairs:
        group.close()


@WAYS
@pytest.mark.parametrize("callers", [[0], [2], [0, 1], [0, 1, 2]], ids=["first", "last", "two", "each_another"])
def test_a_group_is_closed_at_once_where_some_never_call_a_name(job, env, callers):
    job.run(closed_while_pending, 3, {"callers": callers}, env=env)


def test_a_group_is_closed_soon_where_a_name_that_some_never_call_waits_for_long(job):
    job.run(closed_while_pending, 3, {"callers": [0, 1], "waits": True})


def closed_while_pending(callers, waits=False):
    herring.init()
    for knows in (False, True):
        group = herring.new_group([0, 1, 2])
        everywhere, names = {}, {}
        for use in range(3):
            array = np.full(9, herring.rank() + use, np.float32)
            everywhere[use] = herring.allreduce_(array, "sum", name="everywhere", async_op=True, group=group)
        if knows:
            herring.allreduce_(np.ones(5), name="missing", async_op=True, group=group).wait()
        large = np.full(400_000, float(herring.rank()))
        alone = herring.allreduce_(large, "sum", name="large", async_op=True, group=group)
        if herring.rank() in callers:
            name = "missing" if len(callers) < 3 else f"missing.{herring.rank()}"
            for _ in range(2):
                names[herring.allreduce_(np.ones(5), name=name, async_op=True, group=group)] = name
        if herring.rank() == 1:
            time.sleep(0.1)  # The others are in rounds already.
        if waits:  # It has gone alone by then.
            time.sleep(2.5 if knows else 0.6)
        last = herring.allreduce_(np.full(4, float(herring.rank())), "sum", name="last", async_op=True, group=group)
        before = time.monotonic()
        group.close()
        assert time.monotonic() - before < 2  # 30 s where nobody is told.
        for use, handle in everywhere.items():
            assert handle.wait().tolist() == [3 + 3 * use] * 9
        assert last.wait().tolist() == [3] * 4
        assert (alone.wait() == 3).all()
        for handle, name in names.items():
            assert handle.done()
            kinds = (herring.CancelledError, herring.MismatchError) if waits else herring.CancelledError
            text = "closed|removed" if waits else "group was closed"
            with pytest.raises(kinds, match=f"'{name}'.*({text})"):
                handle.wait()
        herring.barrier()


def test_a_job_ends_at_once_where_each_rank_waits_for_another_name(job):
    job.run(ended_while_pending, 2)


def ended_while_pending():
    herring.init()
    name = f"missing.{herring.rank()}"
    handle = herring.allreduce_(np.ones(5), name=name, async_op=True)
    before = time.monotonic()
    herring.shutdown()
    assert time.monotonic() - before < 2
    with pytest.raises(herring.HerringError, match=name):
        handle.wait()


def test_threads_have_names_of_their_own(job):
    job.run(threads, 2)


def threads():
    herring.init()

    def work(number):
        for _ in range(10):
            arrays = made(f"thread{number}", 10)
            for handle in start_all(arrays):
                handle.wait()
            check(arrays)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@WAYS
@pytest.mark.parametrize("late", [[2], [1, 2]], ids=["two_listen", "one_listens"])
def test_who_is_told_of_long_operations_is_not_held_up_for_ever(job, env, late, tmp_path):
    """Ranks that something large keeps waiting enter a round to which nobody has to come."""
    arguments = {"late": late, "folder": str(tmp_path)}
    job.run(never_comes_to_the_round, 3, arguments, env={**env, "HERRING_TIMEOUT_S": "4"})


def never_comes_to_the_round(late, folder):
    herring.init()
    small, large = np.ones(10), np.ones(3_000_000, np.float32)
    herring.allreduce_(small, "sum", name="small", async_op=True).wait()
    if herring.rank() in late:
        time.sleep(0.6)
    herring.allreduce_(large, "sum", name="large", async_op=True).wait()
    before = time.monotonic()
    if herring.rank() == 2:
        while len(os.listdir(folder)) < 2 and time.monotonic() - before < 12:  # Until both others have been told.
            time.sleep(0.05)
        return
    with pytest.raises(herring.HerringError, match="small") as caught:
        herring.allreduce_(small, "sum", name="small", async_op=True).wait()
    assert "rank 2" in str(caught.value) or isinstance(caught.value, herring.PeerLostError)
    assert time.monotonic() - before < 11
    Path(folder, str(herring.rank())).touch()


def test_what_is_pending_ends_before_the_job(job):
    job.run(end_of_job, 2)


def end_of_job():
    herring.init()
    arrays = made("last")
    handles = start_all(arrays)
    herring.shutdown()
    check(arrays)
    for handle in handles:
        handle.wait()
    herring.init()
    before = time.monotonic()
    arrays = made("last")
    for handle in start_all(arrays):
        handle.wait()
    check(arrays)
    assert time.monotonic() - before < 60


@WAYS
def test_switched_off_nothing_changes(job, env):
    job.run(switched_off, 2, env={**env, "HERRING_FUSION_BYTES": "0"})


def switched_off():
    herring.init()
    arrays = made("off", 20)
    before = herring.stats()["ops_completed"]
    for handle in start_all(arrays):
        handle.wait()
    check(arrays)
    assert herring.stats()["ops_completed"] - before == 20
