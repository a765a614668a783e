"""herringrun over real ssh: what only ssh can do or refuse. The rest is in tests/python/test_launcher_hosts.py."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import is_alive, wait_for
from surroundings import clean_environment
from test_launcher import FAMILY, all_are_gone, find_keeper, pids_of

pytestmark = pytest.mark.root

TRAIN = """
import numpy, herring
herring.init()
total = float(herring.allreduce(numpy.ones(100_000, numpy.float32), op="sum")[-1])
print(f"{herring.rank()} of {herring.size()}: {total}", flush=True)
herring.shutdown()
"""


def test_two_hosts_train(ssh_hosts, launches):
    options = [*ssh_hosts.options(2, 2), "-x", "HERRING_INTERFACE=eth0"]
    env = ssh_hosts.environment(HERRING_SECRET="a secret that nobody sees")
    status, out, err = launches.run("", *options, size=4, program=[sys.executable, "-c", TRAIN], env=env)
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"{rank} of 4: 4.0" for rank in range(4)]
    assert "rank 0 of 4 workers on 2 hosts" in err
    log = (ssh_hosts.folder / "ssh.log").read_text()
    assert "secret that" not in log
    assert "BatchMode=yes" in log


def test_a_user_in_front_and_a_server_host(ssh_hosts, launches):
    a, b, _ = ssh_hosts.addresses
    options = ["--ssh-port", "2222", "-H", f"root@{a}", "--server-hosts", f"root@{b}", "-x", "HERRING_INTERFACE=eth0"]
    program = [sys.executable, "-c", TRAIN]
    status, out, err = launches.run("", *options, size=1, program=program, env=ssh_hosts.environment())
    assert (status, out) == (0, "0 of 1: 1.0\n"), err
    assert "herring server 0: " in err


def test_stdin_signals_and_the_exit_status(ssh_hosts, launches):
    code = "print(sys.stdin.read(), end='', flush=True)\nif rank == 1: sys.exit(5)\nelse: time.sleep(0.3)"
    (launches.folder / "input").write_bytes(b"typed\n")
    with (launches.folder / "input").open() as file:
        status, out, err = launches.run(code, *ssh_hosts.options(1, 1), env=ssh_hosts.environment(), stdin=file)
    assert (status, out) == (5, "typed\n"), err
    job = launches.start("mark(os.getpid())\ntime.sleep(60)", *ssh_hosts.options(1, 1), env=ssh_hosts.environment())
    pids = [int(text) for text in launches.marks(2)]
    os.kill(job.pid, signal.SIGINT)
    job.communicate(timeout=20)
    assert job.returncode == -signal.SIGINT
    all_are_gone(pids, 2)


@pytest.mark.parametrize("strike", ["herringrun", "herringrun and its keeper", "ssh", "network"])
def test_no_orphan_whatever_breaks(ssh_hosts, launches, strike):
    env = ssh_hosts.environment(HERRING_DEAD_AFTER_S="0.7")
    # Where the other host is lost rank 0 ends by itself soon, as one in an operation does.
    code = FAMILY + f"time.sleep({3 if strike in ('ssh', 'network') else 300} if rank == 0 else 300)"
    job = launches.start(code, *ssh_hosts.options(1, 1), env=env)
    pids = pids_of(launches)
    keeper = find_keeper(job.pid)
    if strike == "network":
        ssh_hosts.hosts.cut(1)
    elif strike == "ssh":
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
    else:
        for pid in (job.pid, keeper)[: 1 if strike == "herringrun" else 2]:
            os.kill(pid, signal.SIGKILL)
    try:
        all_are_gone(pids, 25)
        _, err = job.communicate(timeout=20)
    finally:
        ssh_hosts.hosts.cut(1, is_up=True)
    if strike in ("ssh", "network"):
        assert job.returncode == 1, err
        assert f"was lost with its host {ssh_hosts.addresses[1]}" in err.decode()
    wait_for(lambda: not [pid for pid in pids if is_alive(pid)], 2, "end")


def refusal(ssh_hosts, launches, hosts: str, *options: str, port: str = "2222", **more: str) -> str:
    command = [
        sys.executable,
        "-m",
        "herring._launch",
        "--ssh-port",
        port,
        "-H",
        hosts,
        "--start-timeout",
        "6",
        *options,
    ]
    env = {**clean_environment(), **ssh_hosts.environment(), **more}
    done = subprocess.run(
        [*command, "true"], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_what_ssh_refuses_is_a_sentence(ssh_hosts, launches):
    a, b, c = ssh_hosts.addresses
    assert f"{c}: ssh cannot reach it" in refusal(ssh_hosts, launches, f"{a},{c}")
    assert "Connection refused" in refusal(ssh_hosts, launches, f"{a},{c}")
    # Over what is in ssh_config comes what is on the command line.
    authorized = ssh_hosts.folder / "authorized"
    kept = authorized.read_text()
    shutil.copy(ssh_hosts.folder / "stranger.pub", authorized)
    try:
        said = refusal(ssh_hosts, launches, f"{a},{b}")
        assert "ssh needs a key that it can use without asking for a password" in said
    finally:
        authorized.write_text(kept)
    known = ssh_hosts.folder / "known"
    kept = known.read_text()
    known.write_text("")
    try:
        assert "ssh does not know that host's key" in refusal(ssh_hosts, launches, f"{a},{b}")
    finally:
        known.write_text(kept)


def test_a_python_without_herring_and_no_python(ssh_hosts, launches):
    a, b, _ = ssh_hosts.addresses
    said = refusal(ssh_hosts, launches, f"{a},{b}", "--python", "/usr/bin/python3", PYTHONPATH="")
    assert "has no Herring" in said
    assert "--python" in said
    assert "there is no /no/python" in refusal(ssh_hosts, launches, f"{a},{b}", "--python", "/no/python")


def test_another_version_there_is_named(ssh_hosts, launches, tmp_path):
    """The other host's Herring says another version: a Python that has it."""
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c \"import herring._version as v; v.__version__ = '0.0.9'; import sys;"
        'from herring._launch._agent import main; sys.exit(main())"\n'
    )
    python.chmod(0o755)
    a, b, _ = ssh_hosts.addresses
    said = refusal(ssh_hosts, launches, f"{a},{b}", "--python", str(python))
    assert "has Herring 0.0.9 and this machine has" in said
