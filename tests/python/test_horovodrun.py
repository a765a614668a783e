"""horovodrun's command line: followed, or ignored with a line, or refused with Herring's way."""

from __future__ import annotations

import subprocess
import sys

import pytest
from surroundings import clean_environment

from herring import HerringError
from herring._launch._horovodrun import _parser, herringrun_arguments, notes

HOROVODRUN = [sys.executable, "-m", "herring._launch._horovodrun"]

FOLLOWED = {
    "-np 4 -H a:2,b:2": "--hosts a:2,b:2 -np 4",
    "-np 4 --hosts a:4 -p 2222 -i key": "--hosts a:4 --ssh-port 2222 --ssh-identity-file key -np 4",
    "-np 2 --hostfile f --start-timeout 30": "--hostfile f --start-timeout 30.0 -np 2",
    "-np 2 --output-filename o --verbose": "--output-filename o -np 2 --verbose",
    "-np 2 --network-interfaces eth1": "-np 2 -x HERRING_INTERFACE=eth1",
    "-np 2 --network-interfaces eth1,eth2": "-np 2 -x HERRING_INTERFACE=eth1,eth2",
    "-np 2 --timeline-filename t.json": "-np 2 -x HOROVOD_TIMELINE=t.json",
    "-np 2 --stall-check-shutdown-time-seconds 90": "-np 2 -x HERRING_TIMEOUT_S=90",
    "-np 2 --stall-check-warning-time-seconds 20": "-np 2 -x HOROVOD_STALL_CHECK_TIME_SECONDS=20",
    "-np 2 --no-stall-check --timeline-mark-cycles": (
        "-np 2 -x HOROVOD_TIMELINE_MARK_CYCLES=1 -x HOROVOD_STALL_CHECK_DISABLE=1"
    ),
    "-np 2 --log-level DEBUG --gloo": "-np 2 -x HERRING_LOG=debug",
    "-np 2 --fusion-threshold-mb 32 --cycle-time-ms 3.6": (
        "-np 2 -x HERRING_FUSION_BYTES=32MB -x HERRING_FUSION_CYCLE_MS=4"
    ),
    "-np 2 --fusion-threshold-mb 0": "-np 2 -x HERRING_FUSION_BYTES=0",
    "-np 4 --min-np 2 --reset-limit 3": "-np 4 --elastic --min-workers 2 --reset-limit 3",
    "-np 4 --min-np 2 --max-np 4 --slots-per-host 2 -H a,b": (
        "--hosts a,b --slots-per-host 2 -np 4 --elastic --min-workers 2"
    ),
    "--min-np 2": "--elastic --min-workers 2 -np 2",
}


@pytest.mark.parametrize("given", list(FOLLOWED))
def test_what_is_followed(given):
    args = _parser().parse_args([*given.split(), "python", "train.py", "-x"])
    assert herringrun_arguments(args) == ["--tag-output", *FOLLOWED[given].split(), "--", "python", "train.py", "-x"]
    assert notes(args) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "--cache-capacity 32 --no-timeline-mark-cycles",
            ["--cache-capacity", "--no-timeline-mark-cycles", "cycles are marked only"],
        ),
        ("--autotune --autotune-log-file a", ["--autotune, --autotune-log-file: ignored", "no autotuning"]),
        ("--stall-check", ["the stall check is on"]),
        ("--mpi", ["ssh"]),
    ],
)
def test_what_has_no_meaning_is_said_and_does_no_harm(given, words):
    args = _parser().parse_args(["-np", "2", *given.split(), "true"])
    text = "\n".join(notes(args))
    assert all(word in text for word in words), text
    assert args.command == ["true"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--config-file c.yaml", "HERRING_"),
        ("--host-discovery-script d.sh", "-H"),
        ("--mpi-args=--oversubscribe", "mpirun"),
        ("--jsrun", "jsrun"),
        ("--max-np 8", "--max-np 8: the job starts with 2 workers"),
        ("--reset-limit 1", "--min-np"),
    ],
)
def test_what_is_refused_names_another_way(given, words):
    done = subprocess.run(
        [*HOROVODRUN, "-np", "2", *given.split(), "true"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_it_starts_a_job():
    code = "import os; print(os.environ['HOROVOD_RANK'], os.environ['HOROVOD_SIZE'], os.environ['HOROVOD_LOCAL_SIZE'])"
    done = subprocess.run(
        [*HOROVODRUN, "-np", "2", "--cache-capacity", "1", sys.executable, "-S", "-c", code],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 2 2", "[rank 1] 1 2 2"]
    assert done.stderr.startswith("herring-horovodrun: --cache-capacity: ignored: ")


def test_more_workers_lost_than_the_limit_end_the_job(launches):
    """Horovod's --reset-limit."""
    code = "mark(os.getpid())\nif rank < 2:\n    time.sleep(0.3 * (rank + 1))\n    sys.exit(3)\ntime.sleep(2)"
    for limit, wanted in (("2", 0), ("1", 3)):
        status, _, err = launches.run(code, "--elastic", "--reset-limit", limit, size=3)
        assert status == wanted, err


def test_bad_numbers_of_herringrun_are_refused():
    from herring._launch._options import parse, problem_of

    assert "--reset-limit" in problem_of(parse(["-np", "2", "--reset-limit", "1", "true"]))
    with pytest.raises(HerringError):
        herringrun_arguments(_parser().parse_args(["-np", "2", "--reset-limit", "1", "true"]))
