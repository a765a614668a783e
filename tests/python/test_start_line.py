"""Worker 0 says one line when a job starts; a job of one in sight of a scheduler says that it is one."""

from __future__ import annotations

import logging
import os

import pytest

import herring


def starts(rounds=1, logger_level=None, configure=None, **settings):
    """What a user's script does."""
    if configure is not None:
        logging.basicConfig(level=configure, format="USER %(levelname)s %(name)s %(message)s")
    if logger_level is not None:
        logging.getLogger("herring").setLevel(logger_level)
    for _ in range(rounds):
        herring.init(join_timeout_s=30, **settings)
        herring.init()
        herring.shutdown()


def lines(outcome):
    return [line for line in outcome.errors.splitlines() if "worker" in line]


def test_worker_0_alone_says_who_how_many_and_how(job):
    for rank in range(2):
        job.start_worker(starts, rank, 2)
    first, second = job.finish()
    assert "worker" not in first.output + second.output, "stdout is the script's"
    (line,) = lines(first)
    assert line.startswith("herring[rank 0] info: rank 0 of 2 workers on 1 host (RANK and WORLD_SIZE), no server proc")
    assert "shared memory" in line
    assert lines(second) == []


def test_server_processes_are_counted(job):
    job.start_worker(starts, 0, 1, env={"HERRING_SERVERS": "1"})
    job.start(serves, env={**job.master(), "HERRING_SERVERS": "1", "SLURM_PROCID": "0", **STEP})
    first, server = job.finish()
    assert ", 1 server process: " in lines(first)[0]
    assert server.result == 0


def serves():
    from herring import _cli

    return _cli.main(["server", "--rank", "auto", "--quiet"])


STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "9"}


@pytest.mark.parametrize(
    ("arguments", "env"),
    [({"log": "error"}, {}), ({}, {"HERRING_LOG": "error"}), ({"logger_level": "WARNING"}, {})],
)
def test_it_can_be_turned_off(job, arguments, env):
    job.start(starts, arguments, env)
    (outcome,) = job.finish()
    assert outcome.errors == ""


@pytest.mark.parametrize(("level", "count"), [("INFO", 1), ("WARNING", 0)])
def test_a_users_logging_has_it_once_and_by_its_own_rules(job, level, count):
    job.start(starts, {"configure": level})
    (outcome,) = job.finish()
    said = lines(outcome)
    assert len(said) == count
    assert all(line.startswith("USER INFO herring rank 0 of 1 worker") for line in said)


@pytest.mark.parametrize("level", ["info", "debug"])
def test_settings_are_said_where_asked_for(job, level):
    """Which of two values counts is what one looks for when a setting seems to do nothing."""
    env = {"HERRING_LOG": level, "HERRING_TIMEOUT_S": "60", "HERRING_SECRET": "hush"}
    for rank in range(2):
        job.start_worker(starts, rank, 2, {"spin_us": 3}, env)
    first, second = job.finish()
    (line,) = [line for line in first.errors.splitlines() if "settings: " in line]
    assert line.startswith("herring[rank 0] info: settings: ")
    for word in (
        "HERRING_TIMEOUT_S=60 (environment)",
        f"HERRING_LOG={level} (environment)",
        "HERRING_SPIN_US=3 (argument)",
    ):
        assert word in line
    assert "HERRING_LANES" not in line, "a default"
    assert "hush" not in first.errors + second.errors
    assert "settings: " not in second.errors


def test_settings_are_not_said_where_not_asked_for(job):
    job.start(starts, env={"HERRING_TIMEOUT_S": "60"})
    assert "settings: " not in job.finish()[0].errors


def test_each_start_says_it(job):
    job.start(starts, {"rounds": 2})
    assert len(lines(job.finish()[0])) == 2


def test_a_batch_script_that_trains_by_itself_says_what_it_is(job):
    batch = {"SLURM_JOB_ID": "8", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "w[0-1]"}
    job.start(starts, env=batch)
    (line,) = lines(job.finish()[0])
    assert line.startswith("herring[rank 0] warning: rank 0 of 1 worker")
    assert "Slurm's job 8 has 4 tasks" in line
    assert "start with srun" in line


def test_srun_alone_places_a_job(job):
    """No RANK, no MASTER_ADDR: each task trained alone and said nothing."""
    for rank in range(2):
        step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node7"}
        task = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        count = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
        job.start(places, env={**step, **task, **count})
    assert [outcome.result for outcome in job.finish()] == [[0, 2, 0, 2], [1, 2, 1, 2]]


def places():
    herring.init(join_timeout_s=30)
    herring.barrier()
    return [herring.rank(), herring.size(), herring.local_rank(), herring.local_size()]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, ["no variable says which server this is", "--rank"]),
        ({"JOB_COMPLETION_INDEX": "2"}, ["server rank 2 is not from 0 to 1"]),
        (
            {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "5", "SLURM_NTASKS": "5"},
            ["HERRING_SERVERS is 2, but 5 processes"],
        ),
    ],
)
def test_a_server_that_cannot_count_itself_says_what_to_do(job, env, words):
    job.start(serves, env={**job.master(), "HERRING_SERVERS": "2", "WORLD_SIZE": "1", **env})
    (outcome,) = job.finish()
    assert outcome.result == 2
    assert all(word in outcome.errors for word in words), outcome.errors
