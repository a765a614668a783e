"""`herring server --stay` serves job after job, and no job, good or bad, ends it or leaves something in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from launcher import as_from_a_terminal
from surroundings import clean_environment

import herring

NETWORK = {"HERRING_SERVERS": "1", "HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo", "HERRING_SECRET": "s"}
ROUNDS = 5


def averages(die=False, wait_for="", settings=None):
    """Returns whether all results are right; where it shall die, rank 1 does so between two operations."""
    herring.init(**{"join_timeout_s": 15, **(settings or {})})
    right = True
    for step in range(ROUNDS):
        result = herring.allreduce(np.full(50_000, herring.rank() + step, np.float32))
        right = right and bool((result == 0.5 + step).all())
        if die and herring.rank() == 1:
            os._exit(9)
    while wait_for and not Path(wait_for).exists():
        herring.allreduce(np.zeros(4, np.float32))
    herring.shutdown()
    return right


def waits_for_two_servers():
    """A job of other numbers, at the server's port: it cannot begin."""
    herring.init(join_timeout_s=4, servers=2)


class Server:
    """`herring server --rank 0 --stay`."""

    def __init__(self, port, log, *options, **env):
        self.master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "herring", "server", "--rank", "0", "--stay", *options],
                env={**clean_environment(), **self.master, **NETWORK, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                preexec_fn=as_from_a_terminal,
            )

    def lines(self):
        return self.log.read_text().splitlines()

    def await_line(self, text, count=1):
        deadline = time.monotonic() + 30
        while sum(text in line for line in self.lines()) < count:
            assert time.monotonic() < deadline, f"{text!r} did not come {count} times: {self.lines()}"
            assert self.process.poll() is None, self.lines()
            time.sleep(0.05)

    def held(self):
        """Open files and threads."""
        place = Path("/proc", str(self.process.pid))
        return len(list((place / "fd").iterdir())), len(list((place / "task").iterdir()))

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def start(job, tmp_path):
    """Servers at the port of `job`, which end with the test."""
    started = []

    def start_server(*options, **env):
        started.append(Server(job.port, tmp_path / "server.log", *options, **env))
        return started[-1]

    yield start_server
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.fixture
def server(start):
    """It waits for a job."""
    started = start()
    started.await_line("waiting for a job")
    return started


@pytest.fixture
def run_job(new_job):
    """Two workers at a server's place, and what they returned."""

    def run(server, function=averages, codes=None, **arguments):
        job = new_job()
        job.port = int(server.master["MASTER_PORT"])
        return job.run(function, 2, arguments, env=NETWORK, codes=codes)

    return run


def test_it_serves_job_after_job_and_keeps_nothing_of_them(server, run_job):
    idle = server.held()
    for count in (1, 2, 3):
        assert run_job(server) == [True, True]
        server.await_line(f"herring server 0: {ROUNDS} operations", count)
    deadline = time.monotonic() + 10
    while server.held() != idle and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.held() == idle
    assert server.end() == -signal.SIGTERM
    assert len(server.lines()) == 4, server.lines()


def test_what_it_says_of_a_job_is_all_of_the_job(start, run_job):
    """Also where the lane's thread has had no pause since the last operation."""
    server = start(HERRING_SPIN_US="1000000")
    server.await_line("waiting for a job")
    assert run_job(server) == [True, True]
    server.await_line("herring server 0: ", 2)
    assert f"herring server 0: {ROUNDS} operations" in server.lines()[1]


def test_a_lost_worker_and_a_job_that_refuses_it_do_not_end_it(server, run_job):
    run_job(server, codes=[1, 9], die=True)
    server.await_line("worker 1 (pid")
    run_job(server, waits_for_two_servers, codes=[1, 1])
    server.await_line("2 workers and 2 servers; start all processes with the same numbers. Still waiting for a job")
    assert run_job(server) == [True, True]
    server.await_line(f"herring server 0: {ROUNDS} operations")
    assert len(server.lines()) == 4, "it says the same refusal once"


def test_a_job_with_another_secret_does_not_end_it(server, run_job):
    with pytest.raises(pytest.fail.Exception, match="gave up joining the job"):
        run_job(server, settings={"secret": "another", "join_timeout_s": 5})
    server.await_line("the secret differs")
    assert run_job(server) == [True, True]


def test_it_waits_longer_than_the_time_to_join_and_says_so_once(start, run_job):
    server = start(HERRING_JOIN_TIMEOUT_S="1")
    server.await_line("Still waiting for a job")
    time.sleep(3)
    assert len(server.lines()) == 2, server.lines()
    assert run_job(server) == [True, True]
    assert server.end(signal.SIGINT) != 0


def test_a_signal_ends_it_in_the_middle_of_a_job(server, job, tmp_path):
    goes_on = tmp_path / "goes on"
    idle = server.held()
    for rank in range(2):
        job.start_worker(averages, rank, 2, {"wait_for": str(goes_on)}, NETWORK)
    deadline = time.monotonic() + 30
    while server.held() == idle and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    assert server.end() == 1
    assert server.lines()[1:] == ["herring server 0: stopped by a signal"]
    for outcome in job.finish([1, 1]):
        assert "server 0" in outcome.errors


@pytest.mark.parametrize(
    ("env", "text"),
    [({"HERRING_SERVERS": "0"}, "HERRING_SERVERS is 0"), ({"HERRING_HUB": "nowhere"}, "HERRING_HUB")],
)
def test_what_no_job_can_mend_ends_it_at_once(start, env, text):
    server = start(**env)
    assert server.process.wait(30) == 2
    assert text in server.lines()[-1]


def test_quiet_prints_errors_only(start, run_job):
    server = start("--quiet")
    assert run_job(server) == [True, True]
    run_job(server, codes=[1, 9], die=True)
    server.await_line("worker 1 (pid")
    assert len(server.lines()) == 1
