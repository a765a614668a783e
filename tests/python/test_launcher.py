"""herringrun leaves nothing behind, ends as told, and says in one sentence why it cannot start."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from launcher import Launches, is_alive, state_of, wait_for

FAMILY = """
import subprocess
# As a shell script would: a child in the same group; one in a session of its own; one whose parent is gone at once.
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
child = subprocess.Popen(sleep)
alone = subprocess.Popen(sleep, start_new_session=True)
code = "import os, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\nif os.fork(): os._exit(0)\\n"
code += f"open('mark-{rank}-d.new', 'w').write(str(os.getpid()))\\n"
code += f"os.rename('mark-{rank}-d.new', 'mark-{rank}-d.txt')\\ntime.sleep(300)"
subprocess.run([sys.executable, "-S", "-c", code])
mark(f"{os.getpid()} {child.pid} {alone.pid}")
"""


def pids_of(launches: Launches) -> list[int]:
    """Two ranks with three relatives each."""
    return [int(word) for text in launches.marks(4) for word in text.split()]


def all_are_gone(pids: list[int], timeout: float = 8) -> None:
    wait_for(lambda: not any(is_alive(pid) for pid in pids), timeout, f"end of {[p for p in pids if is_alive(p)]}")


@pytest.mark.parametrize("strike", ["herringrun", "group", "keeper", "stopped", "stopped keeper"])
def test_whoever_of_the_launcher_is_killed_nothing_goes_on_training(launches, strike):
    """A job of which nobody knows any more would hold the machine's GPUs and ports until somebody finds it."""
    job = launches.start(FAMILY + "time.sleep(300)")
    pids = pids_of(launches)
    assert len(pids) == 8
    assert all(is_alive(pid) for pid in pids)

    if strike == "stopped":
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    if strike == "stopped keeper":
        os.kill(find_keeper(job.pid), signal.SIGSTOP)
    if strike == "keeper":
        os.kill(find_keeper(job.pid), signal.SIGKILL)
    elif strike == "group":
        os.killpg(job.pid, signal.SIGKILL)
    else:
        os.kill(job.pid, signal.SIGKILL)
    all_are_gone(pids)
    _, err = job.communicate(timeout=10)
    if strike == "keeper":
        assert job.returncode == 1
        assert b"was killed; all that it had started is ended" in err


def find_keeper(pid: int) -> int:
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_what_the_ranks_leave_running_ends_with_the_job(launches):
    code, _, err = launches.run(FAMILY, env={"PYTHONWARNINGS": "ignore"})
    assert code == 0, err
    all_are_gone(pids_of(launches), 1)
    assert "the job has ended; ending programs that it left running: python" in err


def test_a_rank_that_a_shell_started_has_time_to_save(launches):
    """SIGTERM ends the shell at once; the script below it saves a checkpoint."""
    code = """
def save(number, frame):
    time.sleep(0.7)
    mark("saved", "-saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
mark("ready")
time.sleep(60)
"""
    script = str(launches.folder / "script.py")
    job = launches.start(code, program=["sh", "-c", f"{sys.executable} -S {script}; true"])
    launches.marks(2)
    job.terminate()
    job.communicate(timeout=20)
    assert launches.marks(4).count("saved") == 2
    assert job.returncode == -signal.SIGTERM


STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
mark(os.getpid())
time.sleep(60)
"""


@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_is_taken_calmly(launches, second):
    """Schedulers send several; a traceback would hide why the job ended, and leave the rest of it undone."""
    job = launches.start(STUBBORN)
    pids = [int(text) for text in launches.marks(2)]
    begun = time.monotonic()
    os.kill(job.pid, signal.SIGTERM)
    time.sleep(0.6)
    os.kill(job.pid, second)
    _, err = job.communicate(timeout=30)
    assert job.returncode == -signal.SIGTERM
    assert b"Traceback" not in err
    assert b"SIGTERM: stopping the job" in err
    all_are_gone(pids, 1)
    # Ctrl-C after that is from somebody who waits.
    assert (time.monotonic() - begun < 4) == (second == signal.SIGINT)


def test_ctrl_c_twice_at_once_is_one(launches):
    """The terminal sends it, and so does a program in between that passes it on: ranks still have time to save."""
    code = """
def save(number, frame):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(0.5)
    mark("saved", "-saved")
    sys.exit(0)
signal.signal(signal.SIGINT, save)
mark(os.getpid())
time.sleep(60)
"""
    job = launches.start(code)
    launches.marks(2)
    for _ in range(2):
        os.kill(job.pid, signal.SIGINT)
        time.sleep(0.02)
    job.communicate(timeout=20)
    assert launches.marks(4).count("saved") == 2
    assert job.returncode == -signal.SIGINT  # Bash then ends its loop, too.


def test_nohup_and_background_stay_what_they_are(launches):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    job = launches.start("mark(os.getpid())\nwait_for_go()", preexec_fn=ignore)
    launches.marks(2)
    os.kill(job.pid, signal.SIGHUP)
    os.kill(job.pid, signal.SIGINT)
    time.sleep(0.3)
    launches.go()
    _, err = job.communicate(timeout=20)
    assert (job.returncode, err) == (0, b"")


def test_user_signals_reach_the_ranks(launches):
    """Slurm's --signal=USR1@60: the ranks save, and go on."""
    code = """
signal.signal(signal.SIGUSR1, lambda number, frame: mark("told", "-told"))
mark("ready")
wait_for_go()
"""
    job = launches.start(code)
    launches.marks(2)
    os.kill(job.pid, signal.SIGUSR1)
    assert launches.marks(4).count("told") == 2
    launches.go()
    job.communicate(timeout=20)
    assert job.returncode == 0


def test_who_stands_still_is_named(launches):
    """Where all ranks are stopped none of them can complain: herringrun stood there for ever and said nothing."""
    job = launches.start(
        "mark(os.getpid())\nwait_for_go()\nos.kill(os.getpid(), signal.SIGSTOP)",
        env={"HERRING_DEAD_AFTER_S": "0.5"},
    )
    pids = [int(text) for text in launches.marks(2)]
    launches.go()  # Both are there: they stop at one moment.
    line = job.stderr.readline().decode()
    assert "rank 0, rank 1 have been stopped" in line
    words = line.partition("kill -CONT ")[2].split()
    assert sorted(map(int, words)) == sorted(pids)
    time.sleep(0.8)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    _, err = job.communicate(timeout=20)
    assert (job.returncode, err) == (0, b""), "it is said once"


def test_who_stands_still_below_a_shell_is_named(launches):
    script = str(launches.folder / "script.py")
    job = launches.start(
        "mark(os.getpid())\nos.kill(os.getpid(), signal.SIGSTOP)",
        size=1,
        program=["sh", "-c", f"{sys.executable} -S {script}; true"],
        env={"HERRING_DEAD_AFTER_S": "0.5"},
    )
    assert b"rank 0 has been stopped" in job.stderr.readline()
    os.kill(int(launches.marks(1)[0]), signal.SIGCONT)
    job.communicate(timeout=20)
    assert job.returncode == 0


def test_ctrl_z_and_fg(launches):
    """The shell's prompt comes back, the machine is free, and fg goes on where it was."""
    job = launches.start(
        "mark(os.getpid())\nwait_for_go()",
        start_new_session=False,
        preexec_fn=os.setpgrp,  # As a shell does: the terminal's Ctrl-Z reaches this group.
        env={"HERRING_DEAD_AFTER_S": "0.3"},
    )
    pids = [int(text) for text in launches.marks(2)]
    for _ in range(2):
        os.kill(job.pid, signal.SIGTSTP)
        wait_for(lambda: {state_of(pid) for pid in [job.pid, *pids]} == {"T"}, 5, "pause of all")
        time.sleep(0.6)
        os.kill(job.pid, signal.SIGCONT)
        wait_for(lambda: "T" not in {state_of(pid) for pid in [job.pid, *pids]}, 5, "going on")
    launches.go()
    _, err = job.communicate(timeout=20)
    assert (job.returncode, err) == (0, b"")


EXITS = {
    "well": ("pass", 0, ""),
    "code": ("sys.exit(3 if rank == 1 else 0)", 3, "rank 1 ended with exit code 3; ending the job"),
    "signal": (
        "time.sleep(60) if rank == 0 else os.kill(os.getpid(), signal.SIGSEGV)",
        128 + signal.SIGSEGV,
        "rank 1 was killed by SIGSEGV; ending the job",
    ),
    "first": ("time.sleep(2 * rank); sys.exit(5 + rank)", 5, "rank 0 ended with exit code 5"),
}


@pytest.mark.parametrize("case", list(EXITS))
def test_the_exit_status_is_that_of_who_failed_first(launches, case):
    code, status, text = EXITS[case]
    ended, _, err = launches.run(code)
    assert ended == status, err
    assert text in err


# What comes first runs last: as with a program that has much to tidy up after Herring has told the others.
FAILS_AND_ENDS_LATE = """
import atexit
atexit.register(time.sleep, 1)
import numpy, herring
herring.init()
herring.allreduce(numpy.ones(4 + rank, dtype=numpy.float32))
"""
# Not before the other one is there: else that one fails, because it loses a rank while it joins.
ENDS_WELL_WITHOUT_A_WORD = """
from pathlib import Path
import herring
herring.init()
here = Path(__file__).parent
(here / f"joined-{herring.rank()}").touch()
while len(list(here.glob("joined-*"))) < herring.size():
    time.sleep(0.01)
os._exit(0)
"""


def run_with_packages(launches: Launches, code: str, servers: int) -> tuple[int, list[str]]:
    """The exit status and what herringrun said."""
    program = [sys.executable, str(launches.folder / "script.py")]
    status, _, err = launches.run(code, "--servers", str(servers), program=program)
    return status, [line for line in err.splitlines() if line.startswith("herringrun:")]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_ends_before_the_rank_that_failed_is_not_the_first(launches, servers):
    status, said = run_with_packages(launches, FAILS_AND_ENDS_LATE, servers)
    assert len(said) == 1, said
    assert said[0].startswith("herringrun: rank "), said
    assert said[0].endswith("ended with exit code 1; ending the job"), said
    assert status == 1


def test_a_server_that_misses_a_rank_which_ended_well_is_named(launches):
    status, said = run_with_packages(launches, ENDS_WELL_WITHOUT_A_WORD, 1)
    assert said == ["herringrun: server 0 ended with exit code 3; ending the job"]
    assert status == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--servers", "5000"], ["--servers 5000", "at most 4096"]),
        (["--servers", "-1"], ["--servers -1"]),
        (["--servers", "two"], ["--servers", "'two'"]),
        (["-np", "0"], ["-np 0", "at least one"]),
        (["-np", "99999999"], ["-np 99999999", "at most"]),
        (["--min-workers", "9", "--elastic"], ["--min-workers 9", "-np"]),
        (["--min-workers", "2"], ["--min-workers", "--elastic"]),
        (["--restart-workers", "2"], ["--restart-workers", "--elastic"]),
        (["--tag-ouput"], ["--tag-ouput"]),
        (["--server", "2"], ["--server", "; did you mean --servers?"]),
        (["--np", "2"], ["--np", "; did you mean -np?"]),
        (["--env", "NONAME"], ["--env NONAME", "NAME=VALUE"]),
        (["-x", "NO_SUCH_NAME"], ["-x NO_SUCH_NAME: ", "-x NO_SUCH_NAME=VALUE"]),
        (["--env", "NO_SUCH_NAME"], ["--env NO_SUCH_NAME: ", "--env NO_SUCH_NAME=VALUE"]),
        (["-x", "=1"], ["-x =1: "]),
        (["--wdir", "/no/such/folder"], ["--wdir /no/such/folder: No such file or directory"]),
        (["--wdir", "/dev/null"], ["--wdir /dev/null: Not a directory"]),
        (["--output-filename", "/dev/null/x"], ["--output-filename /dev/null/x: Not a directory"]),
        (["--hostfile", "/no/such/file"], ["--hostfile /no/such/file: No such file or directory"]),
        (["--env", "HERRING_LANES=many"], ["HERRING_LANES", "many"]),
        (["--env", "HERRING_LANE=2"], ["HERRING_LANE", "HERRING_LANES"]),
    ],
)
def test_a_wrong_command_line_starts_nothing(launches, options, words):
    """One sentence instead of one from each of 5,000 processes."""
    code, out, err = launches.run("mark('started')", *options)
    assert code == 2
    assert out == ""
    assert not list(launches.folder.glob("mark-*"))
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert all(word in last for word in words), err


def refused(launches: Launches, program: list[str], **more: object) -> str:
    """What herringrun says of a program that it cannot start; in one line."""
    code, _, err = launches.run("", program=program, **more)
    assert code == 2, err
    assert "Traceback" not in err
    assert err.count("\n") == 1, err
    return err


def test_what_cannot_be_run_is_said_in_a_sentence(launches):
    plain = launches.folder / "train"
    plain.write_text("echo hello\n")
    plain.chmod(0o755)
    assert "no #! line" in refused(launches, [str(plain)])
    plain.write_text("#!/no/such/python3\n")
    assert "'/no/such/python3'" in refused(launches, [str(plain)])
    plain.write_text("#!/bin/sh\r\necho hello\r\n")
    assert "'/bin/sh\\r'" in refused(launches, [str(plain)])
    plain.chmod(0o644)
    assert "not a file that can be run" in refused(launches, [str(plain)])
    assert "herringrun -np 2 python script.py" in refused(launches, ["script.py"])
    assert "no program 'nothing'" in refused(launches, ["nothing"])


def test_too_few_descriptors_are_found_before_the_start(launches):
    def limit():
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    code, _, err = launches.run("mark('started')", size=40, preexec_fn=limit)
    assert code == 2
    assert "-np 40: the processes' output needs 112 file descriptors, and the limit is 64" in err
    assert not list(launches.folder.glob("mark-*"))


@pytest.mark.root
@pytest.mark.parametrize(("most", "whose"), [(1, "a process"), (4, "rank 2")])
def test_too_few_processes_are_said_in_a_sentence(launches, most, whose):
    """`ulimit -u`; with 1 herringrun itself cannot begin."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become a user of whom nobody else is")
    launches.folder.chmod(0o777)
    right = "+dac_override"  # To read what root's Python is made of.
    other = ["setpriv", "--reuid", str(54000 + most), f"--inh-caps={right}", f"--ambient-caps={right}"]
    prefix = [*other, "prlimit", f"--nproc={most}"]
    code, _, err = launches.run("", size=8, program=["sleep", "60"], prefix=prefix)
    assert code == 1, err
    assert "Traceback" not in err
    assert f"cannot start {whose}" in err
    assert "`ulimit -u`" in err
    assert err.count("\n") == 1, err


def test_help_has_what_a_stranger_needs(launches):
    code, out, _ = launches.run("", "--help")
    assert code == 0
    for word in ("-np", "--servers", "--elastic", "--tag-output", "--env", "Exit status", "herringrun -np 4 python"):
        assert word in out


def test_an_elastic_rank_below_a_shell_does_not_go_on_beside_its_successor(launches):
    """The shell is killed; the script below it would stay in the job as a rank that herringrun takes for dead."""
    code = """
try:
    open("first", "x")
except FileExistsError:
    mark("second", f"-{os.getpid()}")
    wait_for_go()
else:
    mark(f"{os.getpid()} {os.getppid()}")
    time.sleep(60)
"""
    script = str(launches.folder / "script.py")
    # No rendezvous is asked for here, so that it waits; it ends with the job.
    job = launches.start(
        "if rank == 1: wait_for_go(); sys.exit(0)\n" + code,
        "--elastic",
        "--restart-workers",
        "1",
        program=["sh", "-c", f"{sys.executable} -S {script}; true"],
    )
    [text] = launches.marks(1)
    below, shell = map(int, text.split())
    os.kill(shell, signal.SIGKILL)
    assert (
        b"rank 0 was killed by SIGKILL; the job goes on with the other worker; restarting rank 0"
        in job.stderr.readline()
    )
    # It has been killed by now; to die takes a moment.
    wait_for(lambda: not is_alive(below), 5, "the script below the shell to end")
    assert launches.marks(2)[1] == "second"
    launches.go()
    job.terminate()
    job.communicate(timeout=30)


def test_a_server_that_was_killed_has_not_finished(launches):
    """The others miss a rank that stands still, and name it: the launcher does not end the job before they can."""
    job = launches.start(
        "mark(os.getpid())\nwait_for_go()", "--servers", "2", "--restart-servers", "1", "--verbose",
        env={"HERRING_DEAD_AFTER_S": "0.5", "HERRING_HEARTBEAT_S": "0.1"},
    )  # fmt: skip
    ranks = [int(pid) for pid in launches.marks(2)]
    said = read_line_with(job.stderr, "server 0 is process ")
    os.kill(int(said.split()[-1]), signal.SIGKILL)
    read_line_with(job.stderr, "server 0 is process ")
    os.kill(ranks[1], signal.SIGSTOP)
    try:
        said = read_line_with(job.stderr, "has been stopped")
        assert f"to go on: kill -CONT {ranks[1]}" in said
    finally:
        os.kill(ranks[1], signal.SIGCONT)
    launches.go()
    job.communicate(timeout=30)


def read_line_with(stream, text: str) -> str:
    """The next line that has it; those before are dropped."""
    for line in stream:
        if text in line.decode():
            return line.decode()
    pytest.fail(f"no line with {text!r}")
