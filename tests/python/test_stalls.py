"""The warning of an operation that waits: for whom, once, and the job goes on."""

import time

import numpy as np
import pytest

import herring

AFTER_S = 0.6
SETTINGS = {"HERRING_STALL_WARNING_S": str(AFTER_S)}


def warnings_of(job, function, size, env):
    for rank in range(size):
        job.start_worker(function, rank, size, env={**SETTINGS, **env})
    return [line for outcome in job.finish() for line in outcome.errors.splitlines() if "has waited for" in line]


def one_is_late(name, elements, late):
    herring.init()
    values = np.ones(elements, np.float32)
    for round_ in range(2):
        if herring.rank() == late and round_ == 1:
            time.sleep(4 * AFTER_S)
        herring.allreduce(values, "sum", name=name)


def small_by_name():
    one_is_late("gradient.7", 100, late=2)


def large_without_a_name():
    one_is_late(None, 3_000_000, late=1)


def test_ranks_of_one_host_say_it_once(job):
    (line,) = warnings_of(job, large_without_a_name, 3, {})
    assert "all_reduce(float32[3000000], sum) has waited for rank 1 for 0.6 s" in line
    assert line.startswith("herring[rank 0] warning: ")


def test_a_small_array_is_named(job):
    (line,) = warnings_of(job, small_by_name, 3, {})
    assert "'gradient.7': all_reduce(float32[100], sum) has waited for rank 2 for 0.6 s" in line


def small_by_name_that_go_together():
    herring.init()
    if herring.rank() == 1:
        time.sleep(4 * AFTER_S)
    works = [
        herring.allreduce(np.ones(elements, np.float32), "sum", name=name, async_op=True)
        for name, elements in (("bias", 10), ("weight", 100))
    ]
    time.sleep(4 * AFTER_S if herring.rank() == 0 else 0)
    for work in works:
        work.wait()


@pytest.mark.parametrize("intra_node", ["auto", "off"])
def test_small_arrays_that_go_together_are_named(job, intra_node):
    """They wait in a round, of which another warning says the ranks."""
    for rank in range(2):
        job.start_worker(small_by_name_that_go_together, rank, 2, env={**SETTINGS, "HERRING_INTRA_NODE": intra_node})
    lines = [line for outcome in job.finish() for line in outcome.errors.splitlines() if "waited for" in line]
    (names,) = [line for line in lines if line.startswith("herring[rank 0] warning: 'bias', 'weight' have waited")]
    assert "for 0.6 s: not all ranks have called them" in names
    assert any("has waited for rank 1 for 0.6 s" in line for line in lines), lines


def test_servers_say_it_once(job):
    (line,) = warnings_of(job, large_without_a_name, 3, {"HERRING_INTRA_NODE": "off"})
    assert "all_reduce(float32[3000000], sum) has waited for rank 1 for 0.6 s" in line


def test_zero_is_no_warning(job):
    assert not warnings_of(job, large_without_a_name, 2, {"HERRING_STALL_WARNING_S": "0"})


def waits_for_nothing():
    herring.init()
    values = np.ones(3_000_000, np.float32)
    if herring.rank() == 1:
        time.sleep(AFTER_S / 2)  # So long that rank 0 says to the others what is under way by itself; no stall.
    herring.allreduce_(values, "sum", name="large", async_op=True).wait()
    time.sleep(4 * AFTER_S)


def test_a_rank_that_only_listens_is_no_stall(job):
    assert not warnings_of(job, waits_for_nothing, 2, {})
    assert not warnings_of(job, waits_for_nothing, 2, {"HERRING_INTRA_NODE": "off"})
