"""Bad input and lost processes end in an error on every rank, in seconds, that says who and what; never in a hang."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import herring

SHARED = {}
FABRIC = {"HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"}
WAYS = pytest.mark.parametrize("env", [SHARED, FABRIC], ids=["shared_memory", "fabric"])


def error_of(call):
    """The class and text of what `call` raises, and the seconds it took."""
    begun = time.monotonic()
    try:
        call()
    except herring.HerringError as error:
        return [type(error).__name__, str(error), time.monotonic() - begun]
    return ["no error", "", time.monotonic() - begun]


DISAGREEMENTS = {
    "shape": (["(3, 4)", "(4, 3)"], ["[3, 4]", "[4, 3]"]),
    "dtype": (["float32", "float64"], ["float32", "float64"]),
    "op": (["sum", "max"], ["sum", "max"]),
    "collective": (["allreduce", "broadcast"], ["all_reduce", "broadcast"]),
    "size": (["100", "300000"], ["100", "300000"]),
}


@WAYS
@pytest.mark.parametrize("kind", list(DISAGREEMENTS))
def test_who_said_what_is_in_the_error_of_every_rank(job, kind, env):
    says, named = DISAGREEMENTS[kind]
    for outcome in job.run(disagree, 3, {"kind": kind, "says": says}, env=env):
        (name, text, seconds), mean = outcome
        assert name == "MismatchError", text
        for word in [*named, "rank"]:
            assert word in text
        assert "1" in text
        assert seconds < 15
        assert mean == 1.0, "after a mismatch the job goes on"


def disagree(kind, says):
    herring.init(timeout=30)
    mine = says[1] if herring.rank() == 1 else says[0]
    shape = eval(mine) if kind == "shape" else int(mine) if kind == "size" else 12
    array = np.zeros(shape, mine if kind == "dtype" else "float32")
    if kind == "collective" and mine == "broadcast":
        failure = error_of(lambda: herring.broadcast_(array))
    else:
        failure = error_of(lambda: herring.allreduce(array, mine if kind == "op" else "sum"))
    return [failure, float(herring.allreduce(float(herring.rank()), name="after"))]


@WAYS
def test_a_rank_that_never_comes_is_named(job, env):
    results = job.run(all_but_one, 3, env=env)
    for rank in (0, 2):
        name, text, seconds = results[rank]
        assert name == "HerringTimeoutError", text
        assert "rank 1" in text
        assert 0.5 < seconds < 15


def all_but_one():
    herring.init()
    failure = None
    if herring.rank() != 1:
        failure = error_of(lambda: herring.allreduce(np.zeros(100_000), name="lonely", timeout=1))
    herring.barrier(name="end", timeout=60)
    return failure


def test_a_worker_that_never_starts_is_named(job):
    for rank in (0, 2):
        job.start_worker(join_incomplete, rank, 3, env={"HERRING_JOIN_TIMEOUT_S": "2"})
    for outcome in job.finish():
        name, text, seconds = outcome.result
        assert name == "HerringTimeoutError"
        assert re.search(r"waiting for workers? ([02], )?1\b", text), text
        assert seconds < 10


def join_incomplete():
    return error_of(herring.init)


def reduce_with_the_lost():
    """What survivors do. The loss may already be known when the barrier ends, and then fails that."""
    herring.barrier()
    herring.allreduce(np.zeros(300_000))


@WAYS
def test_an_uncaught_exception_reaches_the_others_at_once(job, env):
    for rank in range(3):
        job.start_worker(fail_on_rank_1, rank, 3, env=env)
    outcomes = job.finish(codes=[0, 1, 0])
    assert "ValueError: boom 42" in outcomes[1].errors
    assert "Traceback" in outcomes[1].errors
    for outcome in (outcomes[0], outcomes[2]):
        name, text, seconds = outcome.result
        assert name == "PeerLostError", text
        assert "worker 1" in text
        assert "boom 42" in text
        assert seconds < 5
    assert max(outcome.seconds for outcome in outcomes) < 30


def fail_on_rank_1():
    herring.init()
    if herring.rank() == 1:
        herring.barrier()
        raise ValueError("boom 42")
    return error_of(reduce_with_the_lost)


@WAYS
def test_a_killed_worker_is_named(job, env):
    for rank in range(3):
        job.start_worker(die_on_rank_2, rank, 3, env=env)
    outcomes = job.finish(codes=[0, 0, -signal.SIGKILL])
    for outcome in outcomes[:2]:
        name, text, seconds = outcome.result
        assert name == "PeerLostError", text
        assert "worker 2" in text
        assert seconds < 10


def die_on_rank_2():
    herring.init()
    if herring.rank() == 2:
        herring.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(reduce_with_the_lost)


@WAYS
def test_the_error_says_when_the_lost_was_last_heard_and_what_was_pending(job, env):
    for rank in range(2):
        job.start_worker(die_while_one_waits, rank, 2, env=env)
    outcomes = job.finish(codes=[0, -signal.SIGKILL])
    text = outcomes[0].result
    assert re.search(r"worker 1 \(pid \d+ on .+\) is lost: ", text), text
    assert re.search(r"last heard from \d+\.\d s before", text), text
    assert text.startswith("'never joined': "), text
    assert re.search(r"1 pending here: 'names of small tensors' all_reduce", text), text


def die_while_one_waits():
    herring.init()
    if herring.rank() == 1:
        herring.barrier(name="the other waits")
        os.kill(os.getpid(), signal.SIGKILL)
    handle = herring.allreduce(np.zeros(1000, "float32"), "sum", name="never joined", async_op=True)
    with contextlib.suppress(herring.PeerLostError):  # The loss may be known before the barrier ends here.
        herring.barrier(name="the other waits")
    with pytest.raises(herring.PeerLostError) as caught:
        handle.wait()
    return str(caught.value)


def test_the_hubs_own_worker_may_be_the_one_killed(job):
    for rank in range(2):
        job.start_worker(die_on_rank_0, rank, 2)
    outcomes = job.finish(codes=[-signal.SIGKILL, 0])
    name, text, seconds = outcomes[1].result
    assert name == "PeerLostError", text
    assert "worker 0" in text
    assert seconds < 10


def die_on_rank_0():
    herring.init()
    if herring.rank() == 0:
        herring.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(reduce_with_the_lost)


def test_a_signal_handler_ends_a_wait(job):
    """Ctrl-C in an allreduce that will not end must not have to wait for its deadline."""
    results = job.run(interrupted_wait, 2)
    assert results[0] < 5


def interrupted_wait():
    herring.init()
    seconds = 0.0
    if herring.rank() == 0:

        def interrupt(signum, frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        begun = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            herring.allreduce(np.zeros(10), name="late", timeout=60)
        except KeyboardInterrupt:
            seconds = time.monotonic() - begun
        else:
            raise AssertionError("the allreduce ended by itself")
    herring.barrier(name="interrupted")
    if herring.rank() == 1:
        herring.allreduce(np.zeros(10), name="late", timeout=60)
    return seconds


def test_a_wait_may_give_up_and_come_back(job):
    job.run(wait_twice, 2)


def wait_twice():
    herring.init()
    if herring.rank() == 0:
        handle = herring.allreduce(np.ones(1000), "sum", name="slow", async_op=True)
        with pytest.raises(herring.HerringTimeoutError, match="'slow' is not done after 0.05 s; it is still running"):
            handle.wait(0.05)
        assert not handle.done()
        herring.barrier(name="go")
        assert (handle.wait() == 2).all()
    else:
        herring.barrier(name="go")
        assert (herring.allreduce(np.ones(1000), "sum", name="slow") == 2).all()


def test_herringrun_does_not_wait_for_a_worker_that_was_stopped_while_others_finished(tmp_path):
    """The job is over, so nobody misses it any more: the launcher would stand there for ever."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, herring\n"
        "herring.init()\nrank = herring.rank()\nherring.shutdown()\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    env = dict(os.environ, HERRING_DEAD_AFTER_S="0.5", HERRING_HEARTBEAT_S="0.1")
    env["PYTHONPATH"] = str(Path(herring.__file__).resolve().parents[1])
    command = [sys.executable, "-m", "herring._launch", "-np", "2", "--verbose", sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "rank 1 has been stopped (SIGSTOP) for 0.5 s while others have finished" in done.stderr
    pid = int(re.search(r"rank 1 is process (\d+)", done.stderr)[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
