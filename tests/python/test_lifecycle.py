"""init(), shutdown(), and everything around them that a script may get wrong."""

import gc
import importlib.metadata
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import herring
from herring._context import process


def test_a_job_of_one(bare_environment):
    assert not herring.is_initialized()
    herring.init()
    assert herring.is_initialized()
    assert (herring.rank(), herring.size(), herring.local_rank(), herring.local_size()) == (0, 1, 0, 1)
    assert herring.description()
    herring.barrier()
    assert herring.stats()["ops_failed"] == 0
    assert isinstance(herring.server_counters(), list)
    herring.shutdown()
    herring.shutdown()
    assert not herring.is_initialized()


CALLS = [
    herring.rank,
    herring.size,
    herring.local_rank,
    herring.local_size,
    herring.description,
    herring.stats,
    herring.server_counters,
    herring.barrier,
    lambda: herring.allreduce(np.zeros(1)),
    lambda: herring.allreduce_(np.zeros(1)),
    lambda: herring.broadcast(np.zeros(1)),
    lambda: herring.broadcast_(np.zeros(1)),
    lambda: herring.allgather(np.zeros(1)),
    lambda: herring.empty(1),
]


@pytest.mark.parametrize("call", CALLS)
def test_after_shutdown_every_call_says_what_to_do(bare_environment, call):
    herring.init()
    herring.shutdown()
    with pytest.raises(herring.ShutdownError, match=r"call herring\.init\(\)"):
        call()


def test_before_init_a_call_says_so(job):
    job.start(call_before_init)
    [outcome] = job.finish()
    assert "herring.init() has not been called" in outcome.result


def call_before_init():
    try:
        herring.rank()
    except herring.ShutdownError as error:
        return str(error)
    return "no error"


def test_init_again_with_the_same_or_nothing(bare_environment):
    herring.init(lanes=2, timeout=30)
    first = herring.description()
    herring.init(lanes=2, timeout=30)
    herring.init()
    herring.init(rank=0, size=1)
    assert herring.description() == first
    with pytest.raises(herring.InvalidArgumentError, match="HERRING_LANES=2, not 3"):
        herring.init(lanes=3)
    with pytest.raises(herring.InvalidArgumentError, match="size 1, not 2"):
        herring.init(rank=0, size=2)
    herring.shutdown()
    herring.init(lanes=3)
    herring.shutdown()


def test_a_hundred_times_leaks_nothing(bare_environment):
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    herring.init()
    herring.shutdown()
    before = descriptors()
    for step in range(100):
        herring.init()
        assert herring.allreduce(float(step)) == step
        herring.shutdown()
    assert descriptors() == before


def test_a_forked_child_is_told_and_harms_nobody(job):
    for outcome in job.run(fork_and_go_on, 2):
        pid, text, status, mean = outcome
        assert f"forked from process {pid}" in text
        assert "spawn" in text
        assert status == 0
        assert mean == 0.5


def fork_and_go_on():
    herring.init()
    held = herring.empty(1 << 16)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            herring.allreduce(np.zeros(1))
        except herring.ShutdownError as error:
            os.write(writer, str(error).encode())
        del held
        sys.exit(0)  # Runs the exit handlers: they must leave the parent's connections alone.
    os.close(writer)
    text = os.read(reader, 4096).decode()
    _, status = os.waitpid(child, 0)
    return [os.getpid(), text, status, float(herring.allreduce(float(herring.rank())))]


def test_exit_without_shutdown_is_clean(job):
    results = job.run(exit_without_shutdown, 2)
    assert results == [1.0, 1.0]


def exit_without_shutdown():
    herring.init()
    herring.allreduce_(np.ones(1000, np.float32), async_op=True)
    return float(herring.allreduce(1.0))


def test_exit_waits_for_a_callback_that_runs(job):
    job.start(exit_inside_a_callback)
    for outcome in job.finish():
        assert outcome.result == "left", outcome.error
        assert "the callback ended" in outcome.output


def exit_inside_a_callback():
    """An interpreter that ends while a callback sleeps would take the process down when the callback wakes up."""
    herring.init()

    def callback():
        time.sleep(0.5)
        print("the callback ended", flush=True)

    work = process.current().runtime.submit("all_reduce", None, np.ones(3, np.float32), op="sum", name="last")
    work.on_done(callback)
    assert work.wait(20)
    globals()["kept"] = work  # And with it all that its callbacks need.
    return "left"


def test_shutdown_and_init_again_in_a_job(job):
    assert job.run(start_over, 3, {"times": 5}) == [[1.0] * 5] * 3


def start_over(times):
    means = []
    for _ in range(times):
        herring.init()
        means.append(float(herring.allreduce(float(herring.rank()))))
        herring.shutdown()
    return means


def test_the_installed_version_is_the_packages():
    try:
        installed = importlib.metadata.version("herring")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("herring is not installed, only on the path")
    assert installed == herring.__version__


def test_what_a_process_still_owes_its_host_goes_out_before_it_leaves(job):
    # Each by itself: in a bucket together they need both ranks awake.
    alone = {"HERRING_FUSION_BYTES": "0"}
    assert job.run(owe_and_leave, 2, env=alone) == [[0.5] * (OWED + 1)] * 2


OWED = 40
"""All-reduces of 60 KB: ten times what finds room between two processes of a host."""


def owe_and_leave():
    """Rank 1 has got everything and shuts down while rank 0 is stopped, and has taken little of what rank 1 sent."""
    herring.init()
    [stopped, _] = herring.allgather(np.array([os.getpid()]))
    if herring.rank() == 0:
        handles = [*start_owed(), None]
        time.sleep(1)  # Rank 1 waits for the last, and takes what comes.
        handles[-1] = average_rank("last")
        time.sleep(1)
        os.kill(stopped, signal.SIGSTOP)
    else:
        last = average_rank("last")
        while Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        handles = [*start_owed(), last]
    means = [float(handle.wait(30)[-1]) for handle in handles]
    if herring.rank() == 1:
        threading.Timer(1, os.kill, (int(stopped), signal.SIGCONT)).start()
    herring.shutdown()
    return means


def start_owed():
    return [average_rank(f"owed{i}") for i in range(OWED)]


def average_rank(name):
    return herring.allreduce_(np.full(15_000, herring.rank(), np.float32), name=name, async_op=True)


def test_what_is_owed_to_a_process_that_has_left_holds_nobody_up(job):
    # A shutdown would wait 30 s for a neighbour that may still come.
    job.run(owe_to_one_that_leaves, 2, env={"HERRING_DEAD_AFTER_S": "2"}, timeout=20)


def owe_to_one_that_leaves():
    herring.init()
    if herring.rank() == 1:
        for handle in start_owed():
            with pytest.raises(herring.PeerLostError, match="has left the job"):
                handle.wait(15)
    herring.shutdown()
