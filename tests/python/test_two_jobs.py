"""Two jobs by hand at one MASTER_ADDR and MASTER_PORT, without a secret: their processes cannot be told apart.

What a user would lose: gradients of another job in the own sums, with no error at all.
"""

import itertools
import os
import time
from pathlib import Path

import numpy as np
import pytest

import herring

PARTS = {"A": 1.0, "B": 100.0}
RIGHT = {2.0, 200.0}
GATE_S = 60


def take_part(name, gates, steps=200, join_timeout_s=8):
    """Comes as worker name[1] of job name[0] once it is let in; the sums that it got, and how it ended."""
    Path(gates, f"{name}.here").touch()
    deadline = time.monotonic() + GATE_S
    while not Path(gates, f"{name}.go").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    sums = set()
    begun = time.monotonic()
    try:
        herring.init(join_timeout_s=join_timeout_s, timeout=20)
        for _ in range(steps):
            sums.add(float(herring.allreduce(np.full(3, PARTS[name[0]]), op="sum")[0]))
            time.sleep(0.02)
        herring.shutdown()
    except herring.HerringError as error:
        return [sorted(sums), type(error).__name__, str(error), time.monotonic() - begun, os.getpid()]
    return [sorted(sums), "", "", time.monotonic() - begun, os.getpid()]


def play(job, tmp_path, order, pauses, **arguments):
    """The processes go in this order, so many seconds after the one before; what became of each, by name."""
    for name in order:
        job.start_worker(take_part, int(name[1]), 2, {"name": name, "gates": str(tmp_path), **arguments})
    deadline = time.monotonic() + GATE_S
    while not all((tmp_path / f"{name}.here").exists() for name in order):
        assert time.monotonic() < deadline, "a process did not start"
        time.sleep(0.01)
    for name, pause in zip(order, [0, *pauses], strict=True):
        time.sleep(pause)
        (tmp_path / f"{name}.go").touch()
    return dict(zip(order, [outcome.result for outcome in job.finish(timeout=90)], strict=True))


def both_are_named(text, ends):
    """A process of either job, by its pid, and what to do."""
    pids = [{f"pid {end[4]} " for name, end in ends.items() if name[0] == job} for job in "AB"]
    return all(any(pid in text for pid in side) for side in pids) and "MASTER_PORT of its own" in text


@pytest.mark.parametrize("order", ["A0 B0 B1 A1", "B0 A0 A1 B1", "A0 B0 A1 B1", "A1 B1 A0 B0"])
def test_two_jobs_at_one_port_refuse_each_other(job, tmp_path, order):
    """Where both workers 0 have come before a job is complete, nobody ever gets a sum of both."""
    ends = play(job, tmp_path, order.split(), [0.3] * 3)
    for name, (sums, error, text, _, _) in ends.items():
        assert set(sums) <= RIGHT, f"{name} got the other job's part"
        assert error, f"{name} ended without an error"
        assert error in ("MismatchError", "HerringTimeoutError", "PeerLostError"), text
    first, second = (name for name in order.split() if name[1] == "0")
    for name in (first, second):
        _, error, text, _, _ = ends[name]
        assert error == "MismatchError", text
        assert both_are_named(text, ends), text
    assert ends[second][3] < 5, "who comes second learns it at once"


def test_a_job_that_began_with_a_stranger_ends_when_its_own_come(job, tmp_path):
    """B's worker 1 has come before A's. That cannot be seen until a second process comes for a place."""
    ends = play(job, tmp_path, ["A0", "B1", "B0", "A1"], [0.5] * 3)
    for name, (_, error, _, _, _) in ends.items():
        assert error, f"{name} ended without an error"
    for name in ("A0", "B1", "B0"):
        assert both_are_named(ends[name][2], ends), ends[name]


def test_jobs_that_start_at_one_moment_do_not_mix(job, tmp_path):
    ends = play(job, tmp_path, ["A0", "B0", "B1", "A1"], [0] * 3)
    for name, (sums, error, _, _, _) in ends.items():
        assert error, f"{name} ended without an error: {sums}"


def test_a_long_running_job_is_left_alone(job, tmp_path):
    """Who starts a second job by mistake must not end the first, once no process of that can be on its way any more."""
    ends = play(job, tmp_path, ["A0", "A1", "B0", "B1"], [0, 3.2, 0], steps=500, join_timeout_s=3)
    assert ends["A0"][:2] == [[2.0], ""], ends["A0"]
    assert ends["A1"][:2] == [[2.0], ""], ends["A1"]
    for name in ("B0", "B1"):
        sums, error, text, seconds, _ = ends[name]
        assert (sums, error) == ([], "MismatchError"), text
        assert both_are_named(text, ends), text
        assert seconds < 6


def test_a_port_can_be_used_again_at_once(job, tmp_path):
    """A job that ends must not be taken for another one by the next at its port."""
    for _ in range(2):
        ends = play(job, tmp_path, ["A0", "A1"], [0], steps=3)
        assert [end[:2] for end in ends.values()] == [[[2.0], ""]] * 2
        for name in itertools.chain(tmp_path.glob("*.go"), tmp_path.glob("*.here")):
            name.unlink()
        job._processes.clear()
