"""In processes that others have prepared badly: closed standard streams, a script that starts itself again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest
from surroundings import clean_environment

import herring

STEPS = 20


@pytest.mark.parametrize("over_network", [False, True], ids=["shared_memory", "network"])
def test_what_is_written_to_closed_standard_streams_does_not_reach_the_job(job, tmp_path, over_network):
    """Else it could be bytes of a gradient."""
    env = {"HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"} if over_network else {}
    for rank in range(2):
        job.start_worker(sums_without_streams, rank, 2, {"report": str(tmp_path / f"{rank}")}, env)
    job.finish([7, 7], timeout=60)
    for rank in range(2):
        assert (tmp_path / f"{rank}").read_text() == f"{[2.0] * STEPS}"


def sums_without_streams(report):
    for descriptor in range(3):
        os.close(descriptor)
    import numpy as np

    herring.init()
    sums = []
    for step in range(STEPS):
        handle = herring.allreduce(np.ones(200_000, np.float32), "sum", name=f"step {step}", async_op=True)
        for descriptor in range(3):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"what a library has to say" * 10)
        sums.append(float(handle.wait().mean()))
    herring.shutdown()
    with open(report, "w") as file:
        file.write(f"{sums}")
    os._exit(7)


SPAWNS = """
import multiprocessing, os, sys
import herring

herring.init()
print("sum", float(herring.allreduce(1.0, "sum")), flush=True)
child = multiprocessing.get_context("spawn").Process(target=print, args=("never",))
if os.environ["RANK"] == "1":
    child.start()
    child.join()
    print("child", child.exitcode, flush=True)
print("sum", float(herring.allreduce(1.0, "sum")), flush=True)
"""


def test_a_child_that_runs_the_script_again_does_not_join_in_its_parents_place(tmp_path):
    """A spawned child imports the script. Without `if __name__ == "__main__"` it would be a second worker 1."""
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    command = [sys.executable, "-m", "herring._launch", "-np", "2", "--", sys.executable, str(script)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sum 2.0") == 4, done.stdout + done.stderr
    assert 'if __name__ == "__main__"' in done.stderr, done.stderr


@pytest.mark.parametrize("kind", ["allreduce", "in the background", "alltoall", "grouped", "uneven"])
def test_after_a_time_out_of_one_rank_alone_all_calls_meet_their_own(job, kind):
    """Rank 0 gives its second call up before rank 1 makes it. Every later sum is of one and the same call."""
    told = job.run(calls_with_an_early_time_out, 2, {"kind": kind})
    assert told[0] == told[1], "a call ends alike on all ranks"
    assert told[0][0] == "right"
    assert "HerringTimeoutError" in told[0][1]
    assert "rank 0 waits for rank 1" in told[0][1], told[0][1]
    assert told[0][2:] == ["right"] * 3


def calls_with_an_early_time_out(kind):
    import numpy as np

    herring.init(timeout=30)
    rank, ends = herring.rank(), []
    calls = {
        "allreduce": lambda x, t: herring.allreduce(x, "sum", timeout=t),
        "in the background": lambda x, t: herring.allreduce(x, "sum", timeout=t, async_op=True).wait(),
        "alltoall": lambda x, t: herring.alltoall(x, timeout=t).reshape(2, 2).sum(axis=0),
        "grouped": lambda x, t: herring.grouped_allreduce([x, x], "sum", timeout=t)[1],
        "uneven": lambda x, t: herring.allgather(x[: 2 + rank], uneven=True, timeout=t)[[0, 2]].sum(),
    }
    for step in range(1, 6):
        if step == 2 and rank == 1:
            time.sleep(2)
        try:
            got = calls[kind](np.full(4, float(step * 10**rank)), 0.5 if (step, rank) == (2, 0) else None)
            ends.append("right" if (got == 11 * step).all() else f"{got} in step {step}")
        except herring.HerringTimeoutError as error:
            ends.append(f"{type(error).__name__}: {error}")
    herring.shutdown()
    return ends
