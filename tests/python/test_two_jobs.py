"""Two jobs by hand at one MASTER_ADDR and MASTER_PORT, without a secret: their processes cannot be told apart.

What a user would lose: gradients of another job in the own sums, with no error at all.
"""

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from surroundings import clean_environment

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


def play(job, tmp_path, order, pauses, env=lambda _: {}, **arguments):
    """The processes go in this order, so many seconds after the one before; what became of each, by name."""
    for name in order:
        job.start_worker(take_part, int(name[1]), 2, {"name": name, "gates": str(tmp_path), **arguments}, env(name[0]))
    deadline = time.monotonic() + GATE_S
    while not all((tmp_path / f"{name}.here").exists() for name in order):
        assert time.monotonic() < deadline, "a process did not start"
        time.sleep(0.01)
    for name, pause in zip(order, [0, *pauses], strict=True):
        time.sleep(pause)
        (tmp_path / f"{name}.go").touch()
    return dict(zip(order, [outcome.result for outcome in job.finish(timeout=90)], strict=True))


def both_are_named(text, ends, remedy="MASTER_PORT of its own"):
    """A process of either job, by its pid, and what to do."""
    pids = [{f"pid {end[4]} " for name, end in ends.items() if name[0] == job} for job in "AB"]
    return all(any(pid in text for pid in side) for side in pids) and remedy in text


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
        assert not text.startswith("mismatch:"), text  # Errors at the start have no prefix (docs/errors.md).
        assert seconds < 6


def test_a_port_can_be_used_again_at_once(job, tmp_path):
    """A job that ends must not be taken for another one by the next at its port."""
    for _ in range(2):
        ends = play(job, tmp_path, ["A0", "A1"], [0], steps=3)
        assert [end[:2] for end in ends.values()] == [[[2.0], ""]] * 2
        for name in itertools.chain(tmp_path.glob("*.go"), tmp_path.glob("*.here")):
            name.unlink()
        job._processes.clear()


@pytest.mark.parametrize("order", ["A0 B1 A1 B0", "A0 B0 B1 A1", "B1 A0 A1 B0"])
def test_launchers_that_number_their_jobs_tell_them_apart(job, tmp_path, order):
    """Two Slurm jobs whose scripts have one MASTER_PORT. Here not even worker 1 of B that comes first is let in."""
    ids = {"A": "12", "B": "13"}
    ends = play(job, tmp_path, order.split(), [0.3] * 3, env=lambda name: {"SLURM_JOB_ID": ids[name]}, steps=300)
    for name in ("A0", "A1"):
        assert ends[name][:2] == [[2.0], ""], ends[name]
    for name in ("B0", "B1"):
        sums, error, text, seconds, _ = ends[name]
        assert (sums, error) == ([], "MismatchError"), text
        assert all(f"SLURM_JOB_ID={number}" in text for number in ids.values()), text
        assert both_are_named(text, ends), text
        assert seconds < 6


def test_one_job_of_two_launches_has_a_secret(job, tmp_path):
    """Two allocations, one job: HERRING_SECRET says so."""
    for rank in range(2):
        env = {"SLURM_JOB_ID": str(12 + rank), "HERRING_SECRET": "of both"}
        Path(tmp_path, f"A{rank}.go").touch()
        job.start_worker(take_part, rank, 2, {"name": f"A{rank}", "gates": str(tmp_path), "steps": 3}, env)
    assert [outcome.result[:2] for outcome in job.finish()] == [[[2.0], ""]] * 2


def say_launch(steps=3):
    """What the launcher calls its job, as every worker of one must see it alike."""
    from herring._placement import find_placement, launch_id

    herring.init()
    for _ in range(steps):
        assert herring.allreduce(np.ones(1), op="sum")[0] == herring.size()
    said = launch_id(find_placement()).replace("\n", " ")
    os.write(1, f"launch {said}\n".encode())  # In one write: nobody else's line gets between.
    herring.shutdown()
    return True


@pytest.mark.parametrize(
    ("prefix", "variable"),
    [
        pytest.param(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"], "PMIX_NAMESPACE=", id="mpirun"),
        pytest.param(
            ["torchrun", "--no-python", "--nproc-per-node=2", "--rdzv-id=7", "--rdzv-backend=c10d"],
            "TORCHELASTIC_RUN_ID=7",
            id="torchrun",
        ),
        pytest.param(["herringrun", "-np", "2"], "", id="herringrun"),
    ],
)
def test_a_launcher_calls_its_job_alike_for_all_ranks(job, prefix, variable):
    program = shutil.which(prefix[0], path=str(Path(sys.executable).parent)) or shutil.which(prefix[0])
    if program is None:
        pytest.skip(f"{prefix[0]} is not installed")
    if prefix[0] == "torchrun":
        prefix = [*prefix, f"--rdzv-endpoint=127.0.0.1:{job.port}"]
    env = job.master() if prefix[0] == "mpirun" else {}
    job.start(say_launch, env=env, prefix=(program, *prefix[1:]))
    (outcome,) = job.finish()
    said = [line.split("launch ", 1)[1].strip() for line in outcome.output.splitlines() if "launch" in line]
    assert len(said) == 2, outcome.output
    assert said[0] == said[1]
    assert said[0].startswith(variable), said


def rendezvous(port, workers=2):
    return subprocess.Popen(
        [sys.executable, "-m", "herring._cli", "rendezvous", "--workers", str(workers)],
        env={**clean_environment(), "HERRING_RENDEZVOUS": f"127.0.0.1:{port}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("is_elastic", [True, False], ids=["elastic", "not_elastic"])
def test_two_jobs_at_one_rendezvous(job, tmp_path, is_elastic):
    """A second rendezvous says what has its place; two workers for one place end the start of both jobs."""
    first = rendezvous(job.port)
    try:
        with socket.socket() as probe:
            deadline = time.monotonic() + 20
            while probe.connect_ex(("127.0.0.1", job.port)) != 0:
                assert time.monotonic() < deadline, "the rendezvous did not start"
                time.sleep(0.05)
        second = rendezvous(job.port)
        text = second.communicate(timeout=30)[1]
        assert second.returncode != 0
        assert "another job's rendezvous is there, with the same secret" in text, text
        assert "HERRING_RENDEZVOUS of its own" in text, text

        env = {"HERRING_RENDEZVOUS": f"127.0.0.1:{job.port}", "HERRING_INTERFACE": "lo"}
        if is_elastic:
            env["HERRING_ELASTIC"] = "on"
        ends = play(job, tmp_path, ["A0", "B0", "A1", "B1"], [0.3] * 3, env=lambda _: env)
        for name, (sums, error, _, _, _) in ends.items():
            assert sums == [], f"{name} got a sum"
            assert error, f"{name} ended without an error"
        for name in ("A0", "B0"):
            assert both_are_named(ends[name][2], ends, "HERRING_RENDEZVOUS of its own"), ends[name]
        first.communicate(timeout=20)
        assert first.returncode != 0
    finally:
        first.kill()
        first.communicate()
