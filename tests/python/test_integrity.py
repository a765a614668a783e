"""Data that is damaged or not finite is found, in jobs of real processes: HERRING_CHECKSUM, HERRING_CHECK_FINITE."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import herring


def launch(env, program, size=2, servers=2, settings=()):
    """`herringrun` with a function of this file as the program."""
    options = [f"--env={setting}" for setting in ("HERRING_INTERFACE=lo", *settings)]
    command = [sys.executable, "-m", "herring._launch", "-np", str(size), "--servers", str(servers), *options]
    done = subprocess.run(
        [*command, sys.executable, str(Path(__file__).resolve()), program],
        env=env,
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    return done, done.stdout + done.stderr


@pytest.mark.parametrize("failover", ["on", "off"])
def test_results_are_the_same_with_checksums(clean_env, failover):
    done, report = launch(clean_env, "sums", 3, 2, ["HERRING_CHECKSUM=on", f"HERRING_FAILOVER={failover}"])
    assert done.returncode == 0, report
    assert done.stdout.count("all sums are right, 0 damaged") == 3, report


def test_processes_that_disagree_about_checksums_are_told(job):
    for rank in range(2):
        settings = {"HERRING_INTERFACE": "lo", "HERRING_INTRA_NODE": "off"}
        job.start_worker(start_and_leave, rank, 2, env={**settings, "HERRING_CHECKSUM": ("off", "on")[rank]})
    texts = [outcome.result for outcome in job.finish()]
    assert any("HERRING_CHECKSUM" in text and "settings differ" in text for text in texts), texts


def start_and_leave():
    try:
        herring.init(join_timeout_s=30)
    except herring.HerringError as error:
        return str(error)
    herring.shutdown()
    return "started"


@pytest.mark.parametrize("servers", [0, 2])
def test_nan_is_named_on_every_rank_and_the_job_goes_on(clean_env, servers):
    done, report = launch(clean_env, "not_finite", 3, servers, ["HERRING_CHECK_FINITE=on", "HERRING_PART_BYTES=1MB"])
    assert done.returncode == 0, report
    assert done.stdout.count("named, and the next sum is right") == 3, report


def sums():
    herring.init()
    rank, size = herring.rank(), herring.size()
    for step in range(5):
        for count in (1, 1000, 30_000, 2_000_000):
            values = np.arange(count, dtype=np.float32) % 1000 + rank + step
            result = herring.allreduce(values, op="sum")
            wanted = size * (np.arange(count, dtype=np.float32) % 1000 + step) + size * (size - 1) / 2
            assert np.array_equal(result, wanted), (step, count)
        values = np.full(70_000, rank, np.int32)
        assert herring.broadcast(values, root=1)[-1] == 1
        assert herring.allgather(values).sum() == 70_000 * size * (size - 1) // 2
    late = herring.stragglers()
    # Somebody is the last in every operation, and everybody is told the same.
    assert sorted(one["rank"] for one in late) == list(range(size)), late
    assert len({one["announces"] for one in late}) == 1, late
    assert late[0]["announces"] > 0, late
    assert abs(sum(one["last_share"] for one in late) - 1) < 1e-9, late
    assert [one["mean_late_s"] for one in late] == sorted((one["mean_late_s"] for one in late), reverse=True), late
    print(f"all sums are right, {herring.stats()['damaged_messages']} damaged", flush=True)
    herring.shutdown()


def not_finite():
    herring.init()
    rank, size = herring.rank(), herring.size()
    # Inside an announce or message; one part; several parts, many times: what one of them failed with ends the others
    # too, and a rank may hear that of another part first.
    for count, bad in ((10, 3), (200_000, 150_000), *[(900_000, 650_001)] * 40):
        values = np.full(count, rank + 1, np.float32)
        if rank == 1:
            values[bad] = np.nan
        try:
            herring.allreduce(values, op="sum", name=f"grad/{count}")
            raise AssertionError("it went unnoticed")
        except herring.NotFiniteError as error:
            text = str(error)
        part = int(text.split("begins at element ")[1].split(" ")[0]) if "begins at element " in text else 0
        element = int(text.split("first seen at element ")[1].split(")")[0])
        assert "rank 1 (" in text, text
        assert text.count(f"'grad/{count}'") == 1, text
        assert part + element == bad, text
        values[:] = rank + 1
        assert herring.allreduce(values, op="sum", name=f"again/{count}")[bad] == size * (size + 1) / 2
    print("named, and the next sum is right", flush=True)
    herring.shutdown()


if __name__ == "__main__":
    {"sums": sums, "not_finite": not_finite}[sys.argv[1]]()
