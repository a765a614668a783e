"""A server process that dies, or stops answering, in the middle of a training loop costs no step and no bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from surroundings import server_pids

import herring

STEPS = 12
# Inside an announce, one chunk, and many parts of many chunks; counted in float32.
SIZES = (100, 20_000, 3_000_000)


def run_job(env, servers, losses, size=2, settings=()):
    """`herringrun` with this file as the program; `losses` are "signal:server:step"."""
    options = [f"--env={setting}" for setting in ("HERRING_INTERFACE=lo", "HERRING_DEAD_AFTER_S=1.5", *settings)]
    command = [sys.executable, "-m", "herring._launch", "-np", str(size), "--servers", str(servers), *options]
    return subprocess.run(
        [*command, sys.executable, str(Path(__file__).resolve()), *losses],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("servers", "losses", "size"),
    [
        pytest.param(2, ["SIGKILL:1:3"], 3, id="killed"),
        pytest.param(2, ["SIGSTOP:0:3"], 2, id="stopped"),
        pytest.param(3, ["SIGKILL:2:2", "SIGKILL:0:6"], 2, id="two_killed"),
    ],
)
def test_losing_servers_costs_no_step(clean_env, servers, losses, size):
    done = run_job(clean_env, servers, losses, size)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert done.stdout.count(f"{STEPS} steps, every bit as it should be") == size, report
    for loss in losses:
        server = loss.split(":")[1]
        assert f"server {server} " in done.stderr, report
        assert "is lost" in done.stderr, report


def test_without_failover_a_lost_server_ends_the_job(clean_env):
    done = run_job(clean_env, 2, ["SIGKILL:1:3"], 2, ["HERRING_FAILOVER=off"])
    assert done.returncode != 0
    assert "PeerLostError" in done.stderr
    assert "server 1" in done.stderr


def inputs(step, size, rank):
    return np.random.default_rng([step, size, rank]).standard_normal(size, np.float32) * np.float32(1 + rank * 1e-4)


def tree(values):
    """The order in which Herring adds: a balanced binary tree over ranks."""
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    return tree(values[:half]) + tree(values[half:])


def main(losses):
    herring.init()
    rank, ranks = herring.rank(), range(herring.size())
    victims = {int(step): (name, int(server)) for name, server, step in (loss.split(":") for loss in losses)}
    pids = server_pids()
    for step in range(STEPS):
        mine = [inputs(step, size, rank) for size in SIZES]
        handles = [
            herring.allreduce_(array, "sum", name=f"gradient {i}", async_op=True) for i, array in enumerate(mine)
        ]
        if rank == 0 and step in victims:
            name, server = victims[step]
            os.kill(pids[server], getattr(signal, name))
        for handle in handles:
            handle.wait()
        for size, array in zip(SIZES, mine, strict=True):
            expected = tree([inputs(step, size, other) for other in ranks])
            assert np.array_equal(array, expected), f"rank {rank}, step {step}, {size} elements"
        root = step % herring.size()
        (block,) = (herring.broadcast(inputs(step, SIZES[1], rank), root),)
        assert np.array_equal(block, inputs(step, SIZES[1], root)), f"rank {rank}, step {step}: broadcast"
        gathered = herring.allgather(np.full(3, rank, np.int32))
        assert gathered.reshape(-1, 3)[:, 0].tolist() == list(ranks)
        herring.barrier()
    os.write(1, f"rank {rank}: {STEPS} steps, every bit as it should be\n".encode())
    herring.shutdown()


if __name__ == "__main__":
    begun = time.monotonic()
    main(sys.argv[1:])
    assert time.monotonic() - begun < 100
