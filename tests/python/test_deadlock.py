"""Ranks that wait for each other: arrays under different names, groups in another order, Horovod's names for torch."""

import time

import numpy as np
import pytest

import herring

SETTINGS = {"HERRING_DEADLOCK_AFTER_S": "0.5", "HERRING_TIMEOUT_S": "80"}


def found(call, *words):
    with pytest.raises(herring.MismatchError, match="ranks wait for each other") as caught:
        call()
    for word in (*words, "is waited for on rank", "was never called on rank"):
        assert word in str(caught.value), caught.value


def test_arrays_under_different_names(job):
    job.run(different_names, 3, env=SETTINGS)


def different_names():
    herring.init()
    assert herring.allreduce(1.0, "sum", name="same") == 3.0
    name = "left" if herring.rank() == 0 else "right"
    large = np.ones(1_000_000, np.float32)
    found(lambda: herring.allreduce(large, "sum", name=name), "left", "right")


def test_groups_in_another_order(job):
    job.run(another_order, 2, env=SETTINGS)


def another_order():
    herring.init()
    groups = [herring.new_group([0, 1]) for _ in range(2)]
    if herring.rank() == 1:
        groups.reverse()
    found(lambda: [herring.barrier(group=group) for group in groups], "call 1 of group")


def test_a_rank_that_is_late_is_waited_for(job):
    job.run(one_is_late, 2, env=SETTINGS)


def one_is_late():
    herring.init()
    for late in range(2):
        if herring.rank() == late:
            time.sleep(2.5)
        assert herring.allreduce(1.0, "sum", name="step") == 2.0


def test_a_time_out_of_the_callers_own_is_no_deadlock(job):
    job.run(own_time_out, 2, env=SETTINGS)


def own_time_out():
    """Who gives up by himself goes on."""
    herring.init()
    value = np.ones(1_000_000, np.float32)
    names = ["left", "right"] if herring.rank() == 0 else ["right", "left"]
    first = herring.allreduce(value, "sum", name=names[0], async_op=True)
    with pytest.raises(herring.HerringTimeoutError):
        first.wait(timeout=2.5)
    time.sleep(0.5)  # The other rank has begun to wait a moment later.
    second = herring.allreduce(value, "sum", name=names[1], async_op=True)
    assert second.wait()[0] == first.wait()[0] == 2


@pytest.mark.parametrize("waits_by_name", [0, 1])
def test_a_small_array_by_name_and_a_call_without_a_name(job, waits_by_name):
    job.run(small_array_and_barrier, 2, {"waits_by_name": waits_by_name}, env=SETTINGS)


def small_array_and_barrier(waits_by_name):
    herring.init()
    small = np.ones(3, np.float32)
    assert herring.allreduce(small, "sum", name="known", async_op=True).wait()[0] == 2
    if herring.rank() == waits_by_name:
        found(herring.allreduce(small, "sum", name="small", async_op=True).wait, "'small'", "barrier")
    else:
        found(herring.barrier, "'small'", "barrier")


def test_a_small_array_that_waits_in_another_order_is_not_missed(job):
    job.run(small_array_before_barrier, 2, env=SETTINGS)


def small_array_before_barrier():
    """Each rank is late once where the other waits with a small array pending."""
    herring.init()
    small = np.ones(3, np.float32)
    for late in range(2):
        if herring.rank() == late:
            time.sleep(2.5)
        pending = herring.allreduce(small, "sum", name=f"small {late}", async_op=True)
        if herring.rank() == late:
            assert pending.wait()[0] == 2
            time.sleep(2.5)
        herring.barrier()
        assert pending.wait()[0] == 2


def test_who_calls_it_alone_and_who_with_others_wait_for_a_late_rank(job):
    job.run(two_ways_and_one_late, 3, env=SETTINGS)


def two_ways_and_one_late():
    """One waits for the barrier and the other for the array, until the third comes: each could be said to miss the
    other's call for the moment in which the array leaves the round."""
    herring.init()
    small = np.ones(3, np.float32)
    assert herring.allreduce(small, "sum", name="x", async_op=True).wait()[0] == 3
    for _ in range(3):
        pending = None
        if herring.rank() == 2:
            time.sleep(2)
        if herring.rank() == 0:
            pending = herring.allreduce(small, "sum", name="x", async_op=True)
        else:
            assert herring.allreduce(small, "sum", name="x")[0] == 3
        herring.barrier()
        assert pending is None or pending.wait()[0] == 3


def test_names_of_horovod(job):
    job.run(names_of_horovod, 2, env=SETTINGS)


def names_of_horovod():
    torch = pytest.importorskip("torch")
    import herring.horovod.torch as hvd
    from herring.horovod.common.exceptions import HorovodInternalError

    hvd.init()
    handles = [hvd.allreduce_async(torch.ones(3), name=f"w{each}") for each in ((1, 2) if hvd.rank() == 0 else (1, 3))]
    hvd.synchronize(handles[0])
    with pytest.raises(HorovodInternalError, match="ranks wait for each other") as caught:
        hvd.synchronize(handles[1])
    assert all(name in str(caught.value) for name in ("w2", "w3")), caught.value


def test_a_small_tensor_of_horovod_and_a_barrier(job):
    job.run(horovod_and_barrier, 2, env=SETTINGS)


def horovod_and_barrier():
    torch = pytest.importorskip("torch")
    import herring.horovod.torch as hvd
    from herring.horovod.common.exceptions import HorovodInternalError

    hvd.init()
    assert hvd.synchronize(hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="known"))[0] == 2
    call = hvd.barrier
    if hvd.rank() == 0:
        pending = hvd.allreduce_async(torch.ones(3), name="small")
        call = lambda: hvd.synchronize(pending)  # noqa: E731
    with pytest.raises(HorovodInternalError, match="ranks wait for each other") as caught:
        call()
    assert "small" in str(caught.value), caught.value
