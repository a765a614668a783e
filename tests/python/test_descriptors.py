"""File descriptors: what a planned job takes is what a real one has, and too few of them are said at the start."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import herring
from herring import _core, _doctor_job
from herring._job import join_as_server, read_settings

DOCTOR = [sys.executable, "-m", "herring._cli", "doctor"]


def doctor(env, *options):
    return subprocess.run([*DOCTOR, *options], env=env, capture_output=True, text=True, timeout=60, check=False)


def texts(run):
    return {finding["subject"].strip(): finding["text"] for finding in json.loads(run.stdout)}


def test_a_planned_job_is_computed(clean_env):
    run = doctor(clean_env, "--workers", "2048", "--hosts", "256", "--servers", "256")
    assert run.returncode in (0, 1), run.stderr
    lines = {line[4:20].strip(): line for line in run.stdout.splitlines()}
    assert lines["job"].endswith("2,048 workers on 256 hosts, 256 server processes on 256 hosts of their own")
    assert "256; each worker has at most 2 chunks of 32 KiB" in lines["server lanes"]
    assert "at most 32,768 on an endpoint" in lines["network posts"]
    assert "4 operations ahead on each lane (32 in a small job)" in lines["made smaller"]
    assert "2,304 connections and at most 5,120 open files" in lines["worker"]
    assert "2,304 connections" in lines["worker 0"]
    assert "2,049 connections" in lines["server process"]
    assert "MiB of it pinned with EFA or verbs" in lines["server process"]


def test_the_settings_count(clean_env):
    shape = ["--workers", "64", "--servers", "8", "--json"]
    on, off = (texts(doctor({**clean_env, "HERRING_FAILOVER": value}, *shape)) for value in ("auto", "off"))
    assert "Failover is on" in on["server lanes"]
    assert "Failover is off" in off["server lanes"]
    assert on["worker"] != off["worker"]


@pytest.mark.parametrize("settings", [{"HERRING_FAILOVER": "on"}, {"HERRING_BACKUP_WORKERS": "9"}])
def test_settings_that_a_small_job_could_not_have(clean_env, settings):
    run = doctor({**clean_env, **settings}, "--workers", "2048", "--hosts", "256", "--servers", "256")
    assert run.returncode in (0, 1), run.stderr
    assert "(64 KiB in a small job)" in run.stdout


def test_one_host_needs_no_lane(clean_env):
    run = doctor(clean_env, "--workers", "4", "--hosts", "1", "--json")
    assert run.returncode == 0, run.stderr
    assert texts(run)["server lanes"].startswith("none: all workers are on one host")
    assert "network posts" not in texts(run)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--hosts", "4"], "--hosts describes a planned job: add --workers N"),
        (["--workers", "0"], "--workers is 0, and must be 1 to 1000000"),
        (["--workers", "4", "--servers", "-1"], "--servers is -1, and must be 0 to 1000000"),
        (["--workers", "2", "--hosts", "4"], "use at most 2 hosts"),
        (["--workers", "4", "--server-hosts", "2"], "0 server processes on 2 hosts"),
        (["--workers", "20000", "--servers", "64"], "Start at most about"),
    ],
)
def test_no_such_job(clean_env, options, text):
    run = doctor(clean_env, *options)
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stdout == ""
    assert text in run.stderr
    assert "Traceback" not in run.stderr


def test_machines_with_too_few_open_files_are_a_problem(clean_env):
    command = f"ulimit -n 2000; exec {sys.executable} -m herring._cli doctor --workers 2048 --servers 256"
    run = subprocess.run(
        ["bash", "-c", command], env=clean_env, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 1, run.stderr
    problems = [line for line in run.stdout.splitlines() if line.startswith("!!")]
    assert len(problems) == 1, run.stdout
    assert "this machine allows 2,000 in a process" in problems[0]
    assert "raise the hard limit" in problems[0]


def test_a_card_that_pins_memory_is_asked_for_its_limit(monkeypatch):
    needs = _core.job_needs(read_settings({}), workers=8, hosts=8, servers=0, server_hosts=0)
    assert _doctor_job._pinned(needs) == [], "no such card here"
    monkeypatch.setattr(_doctor_job, "rdma_devices", lambda: ["rdmap0s6"])
    limits = {"few": (1 << 20, 1 << 20), "any": (resource.RLIM_INFINITY, resource.RLIM_INFINITY)}
    said = {}
    for name, limit in limits.items():
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: limit)
        [said[name]] = _doctor_job._pinned(needs)
    assert (said["few"].state, said["any"].state) == ("problem", "ok")
    assert "allows 1.0 MiB in a process: EFA and verbs need ulimit -l unlimited" in said["few"].text


def connections():
    """Established TCP connections of this process."""
    mine = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and f"socket:[{row[9]}]" in mine for row in rows)


def work():
    herring.init(intra_node="off")
    for _ in range(3):
        herring.allreduce(np.ones(1 << 20, np.float32))
        herring.alltoall(np.ones(herring.size() * 1000, np.float32))
    herring.barrier()
    had = connections()
    herring.barrier()
    herring.shutdown()
    return had


def serve(rank, limit=None):
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    job = join_as_server(rank)
    try:
        server = job.start()
    except herring.HerringError as error:
        return str(error)
    had = []
    stopped = threading.Event()

    def look():
        while not stopped.wait(0.01):
            had.append(connections())

    looking = threading.Thread(target=look)
    looking.start()
    server.run()
    stopped.set()
    looking.join()
    server.close()
    job.close()
    return max(had)


def test_a_real_job_has_the_connections_of_the_planned_one(job):
    settings = {"HERRING_SERVERS": "2", "HERRING_INTRA_NODE": "off"}
    for rank in range(4):
        job.start_worker(work, rank, 4, env=settings)
    for rank in range(2):
        job.start(serve, {"rank": rank}, {**job.master(), **settings})
    had = [outcome.result for outcome in job.finish()]
    config = read_settings({"intra_node": "off"})
    needs = _core.job_needs(config, workers=4, hosts=1, servers=2, server_hosts=0)
    # All workers have sent to each other and to all servers. Two that connect to each other at once have two.
    hub = needs["hub_connections"]
    planned = [needs["worker"]["connections"] + (hub if rank == 0 else 0) for rank in range(4)]
    planned += [needs["server"]["connections"]] * 2
    for rank, (count, least) in enumerate(zip(had, planned, strict=True)):
        alone = 1 + (hub if rank == 0 else 0)  # Nobody connects to a member from the hub.
        assert least <= count <= alone + 2 * (least - alone), had


def join_and_fail():
    try:
        herring.init(intra_node="off")
    except herring.HerringError as error:
        return str(error)
    herring.shutdown()
    return "started"


def test_a_server_that_cannot_have_its_connections_says_so_to_all(job):
    """It closed connections of workers at random, and they were told to look at the network between their hosts."""
    settings = {"HERRING_SERVERS": "1", "HERRING_INTRA_NODE": "off"}
    for rank in range(12):
        job.start_worker(join_and_fail, rank, 12, env=settings)
    job.start(serve, {"rank": 0, "limit": 32}, {**job.master(), **settings})
    said = [outcome.result for outcome in job.finish()]
    for text in said:
        assert "server 0 of this job (12 workers, 1 server lane) needs 12 file descriptors" in text
        assert "may have 32 in all" in text


def lead():
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    return join_and_fail()


def test_a_hub_that_cannot_have_its_connections_does_not_start(job):
    place = {"RANK": "0", "WORLD_SIZE": "64", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "64"}
    job.start(lead, None, {**place, **job.master()})
    [outcome] = job.finish()
    assert "the hub, which 64 processes connect to, needs 64 file descriptors" in outcome.result
