"""herringrun over several hosts, which are network namespaces here: the same promises as on one machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import emulated
import pytest
import test_elastic
from launcher import is_alive, state_of, wait_for
from surroundings import clean_environment
from test_launcher import FAMILY, all_are_gone, find_keeper, pids_of
from test_launcher_output import read_until

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    yield from emulated.made(3, tmp_path_factory.mktemp("hosts"))


def over(hosts, *slots: int) -> list[str]:
    return ["--rsh", str(hosts.rsh), "-H", hosts.names(*slots)]


def where(text: str) -> str:
    """Code: the address of this process's host."""
    return f"""
import subprocess
address = subprocess.run(["ip", "-4", "-o", "addr", "show", "eth0"], capture_output=True, text=True).stdout.split()[3]
{text}
"""


PLACES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE "
    "HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME"
)


def test_ranks_fill_hosts_in_order(hosts, launches):
    code = where(f"print(address.partition('/')[0], *(os.environ[name] for name in {PLACES.split()}))")
    done = launches.run(code, *over(hosts, 2, 1, 1), size=3)
    assert (done[0], done[2]) == (0, "")
    a, b, _ = hosts.addresses
    assert sorted(done[1].splitlines(), key=lambda line: line.split()[1]) == [
        f"{a} 0 3 0 2 0 3 0 2 0 2 {a}",
        f"{a} 1 3 1 2 1 3 1 2 0 1 {a}",
        f"{b} 2 3 0 1 2 3 0 1 1 2 {b}",
    ]


def test_tf_config_is_that_of_the_job(hosts, launches):
    """Scripts ask it who is chief; TensorFlow's own servers, where a script starts some, each have a port."""
    done = launches.run("import os; print(os.environ['TF_CONFIG'])", *over(hosts, 2, 1, 1), size=4)
    assert (done[0], done[2]) == (0, "")
    said = [json.loads(line) for line in done[1].splitlines()]
    assert sorted(each["task"]["index"] for each in said) == [0, 1, 2, 3]
    assert {each["task"]["type"] for each in said} == {"worker"}
    workers = said[0]["cluster"]["worker"]
    assert all(each["cluster"]["worker"] == workers for each in said)
    a, b, c = hosts.addresses
    assert [each.rpartition(":")[0] for each in workers] == [a, a, b, c]
    assert len(set(workers)) == 4


def test_the_environment_and_the_secret_are_on_no_command_line(hosts, launches):
    """Everybody on a machine can read what stands in `ps`."""
    code = """
mark(os.getpid())
wait_for_go()
print(rank, ascii([os.environ[name] for name in ("ONE", "TWO", "HOME", "HERRING_SECRET")] + [os.getcwd()]))
"""
    log = launches.folder / "log"
    secret = "a-secret-for-this-test"
    env = {"HERRING_SECRET": secret, "ONE": "1 '$x\nline", "HOME": "/of/herringrun", "RSH_LOG": str(log)}
    job = launches.start(code, *over(hosts, 1, 1), "-x", "TWO=zwei", "-x", "ONE", env=env)
    launches.marks(2)
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if is_alive(int(path.parent.name))]
    assert not [line for line in lines if secret.encode() in line or (b"zwei" in line and b"-x" not in line)]
    launches.go()
    out, err = job.communicate(timeout=30)
    assert (job.returncode, err) == (0, b"")
    values = ascii(["1 '$x\nline", "zwei", str(hosts.home), secret, str(launches.folder)])
    # On one line each: lines are whole, but a value of two lines is not.
    expected = [f"{rank} {values}" for rank in (0, 1)]
    assert out.decode() in ("\n".join(order) + "\n" for order in (expected, expected[::-1]))
    assert len(log.read_text().splitlines()) == 2, "two hosts were asked for what is in the log"
    assert secret not in log.read_text()


@pytest.mark.parametrize("size", ["small", "large"])
def test_rank_0_reads_stdin(hosts, launches, size):
    data = b"one\ntwo" if size == "small" else bytes(range(256)) * 8192
    (launches.folder / "input").write_bytes(data)
    code = "import hashlib; print(rank, hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    with (launches.folder / "input").open("rb") as file:
        _, out, _ = launches.run(code, *over(hosts, 1, 1), stdin=file)
    lines = sorted(out.splitlines())
    assert lines == [f"0 {hashlib.sha256(data).hexdigest()}", f"1 {hashlib.sha256(b'').hexdigest()}"]


def test_lines_are_whole_and_files_have_each_ranks_own(hosts, launches):
    """40 MB of two ranks on two hosts, through windows of 256 KB, in halves of lines."""
    code = """
for number in range(400):
    line = f"<{rank} {number} {'x' * 50000}>\\n".encode()
    os.write(1, line[:20000])
    os.write(1, line[20000:])
os.write(2, b"last\\n")
"""
    options = [*over(hosts, 1, 1), "--tag-output", "--output-filename", str(launches.folder / "out")]
    status, out, err = launches.run(code, *options)
    assert status == 0
    assert sorted(err.splitlines()) == ["[rank 0] last", "[rank 1] last"]
    seen = {0: 0, 1: 0}
    for line in out.splitlines():
        match = re.fullmatch(r"\[rank (\d)\] <(\d) (\d+) x{50000}>", line)
        assert match, line[:100]
        assert match[1] == match[2]
        assert int(match[3]) == seen[int(match[1])]
        seen[int(match[1])] += 1
    assert seen == {0: 400, 1: 400}
    for rank in (0, 1):
        folder = launches.folder / "out" / f"rank.{rank}"
        assert (folder / "stdout").read_text().count(f"<{rank} ") == 400
        assert (folder / "stderr").read_text() == "last\n"


EXITS = {
    "the first that failed": (
        "sys.exit(7) if rank == 1 else time.sleep(0.2)",
        7,
        "rank 1 ({1}) ended with exit code 7",
    ),
    "killed": ("os.kill(os.getpid(), 9) if rank == 0 else time.sleep(0.2)", 137, "rank 0 ({0}) was killed by SIGKILL"),
}


@pytest.mark.parametrize("case", list(EXITS))
def test_the_exit_status(hosts, launches, case):
    code, wanted, words = EXITS[case]
    status, _, err = launches.run(code, *over(hosts, 1, 1))
    assert status == wanted
    assert words.format(*hosts.addresses) in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_job_with_time_to_save(hosts, launches, number):
    code = """
def save(number, frame):
    time.sleep(0.5)
    mark("saved", "-saved")
    sys.exit(0)
for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, save)
mark(os.getpid())
time.sleep(60)
"""
    job = launches.start(code, *over(hosts, 1, 1))
    launches.marks(2)
    os.kill(job.pid, number)
    job.communicate(timeout=20)
    assert launches.marks(4).count("saved") == 2
    assert job.returncode == -number


def test_user_signals_reach_the_ranks(hosts, launches):
    code = """
signal.signal(signal.SIGUSR1, lambda number, frame: mark("heard", "-heard"))
mark("ready")
wait_for_go()
"""
    job = launches.start(code, *over(hosts, 1, 1))
    launches.marks(2)
    os.kill(job.pid, signal.SIGUSR1)
    assert launches.marks(4).count("heard") == 2
    launches.go()
    job.communicate(timeout=20)
    assert job.returncode == 0


@pytest.mark.parametrize("strike", ["both", "silence", "agent", "agent's keeper"])
def test_nothing_goes_on_training_without_herringrun(hosts, launches, strike):
    """Of a job that is left on another machine nobody knows: its ports and devices are missed until somebody looks."""
    is_agent = strike.startswith("agent")
    code = (
        FAMILY + f"time.sleep({3 if is_agent else 300} if rank == 0 else 300)"
    )  # Rank 0 ends by itself, as errors do.
    job = launches.start(code, *over(hosts, 1, 1), env={"HERRING_DEAD_AFTER_S": "0.4"})
    pids = pids_of(launches)
    keeper = find_keeper(job.pid)
    agent = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[1])
    if strike == "silence":
        for pid in (job.pid, keeper):
            os.kill(pid, signal.SIGSTOP)
    elif strike == "both":
        for pid in (job.pid, keeper):
            os.kill(pid, signal.SIGKILL)
    else:
        os.kill(agent if strike == "agent" else find_keeper(agent), signal.SIGKILL)
    all_are_gone(pids, 20)
    if strike == "silence":
        for pid in (job.pid, keeper):
            os.kill(pid, signal.SIGCONT)
    _, err = job.communicate(timeout=20)
    assert job.returncode not in (0, None)
    if is_agent:
        assert f"{hosts.addresses[1]}: " in err.decode()
        assert "was lost with its host" in err.decode()


REFUSED = {
    "slots": (["-np", "4"], 2, ["-np 4", "3 slots", "more slots"]),
    "program": (["program-that-is-not-there"], 2, ["{0}: ", "program-that-is-not-there"]),
    "python": (["--python", "/no/python", "true"], 1, ["{0}: there is no /no/python", "--python"]),
    "folder": (["--wdir", "/no/folder", "true"], 2, ["{0}: ", "/no/folder", "--wdir"]),
    "master": (["--master-addr", "no..such", "true"], 2, ["no..such", "--master-addr"]),
    "not Herring": (["--python", "/bin/sh", "true"], 1, ["{0}: ", "before Herring was started there"]),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_is_a_sentence_and_starts_nothing(hosts, launches, case):
    options, wanted, words = REFUSED[case]
    program = [] if options[-1] in ("true", "program-that-is-not-there") else ["true"]
    given = [] if "-np" in options else ["-np", "2"]
    command = [sys.executable, "-m", "herring._launch", *over(hosts, 2, 1), *given, *options, *program]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=30, check=False, cwd=launches.folder
    )
    assert done.returncode == wanted, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(word.format(*hosts.addresses) in last for word in words), done.stderr


def test_a_login_that_talks_is_no_agent_but_does_no_harm(hosts, launches):
    loud = launches.folder / "loud"
    loud.write_text(f'#!/bin/sh\necho Welcome\nexec {hosts.rsh} "$@"\n')
    loud.chmod(0o755)
    done = launches.run("print(rank)", "--rsh", str(loud), "-H", hosts.names(1, 1))
    assert (done[0], sorted(done[1].split()), done[2]) == (0, ["0", "1"], "")


def test_a_reader_that_pauses_loses_no_host_and_nothing_of_the_end(hosts, launches):
    """`| less` is left alone for longer than a host may be silent, while the job ends."""
    code = "os.write(1, b'x' * 3_000_000 + b'\\n')"
    job = launches.start(code, *over(hosts, 1, 1), env={"HERRING_DEAD_AFTER_S": "0.3", "HERRING_HEARTBEAT_S": "0.1"})
    time.sleep(4)
    out, err = job.communicate(timeout=30)
    assert (job.returncode, err) == (0, b"")
    assert [len(line) for line in out.splitlines()] == [3_000_000] * 2


def test_a_reader_that_pauses_does_not_stop_ctrl_c_over_hosts(hosts, launches):
    job = launches.start("mark('')\nwhile True: os.write(1, b'y' * 99 + b'\\n')", *over(hosts, 1, 1))
    launches.marks(2)
    time.sleep(1)
    begun = time.monotonic()
    os.kill(job.pid, signal.SIGINT)
    wait_for(lambda: state_of(job.pid) in ("Z", ""), 6, "end of herringrun")
    job.communicate(timeout=10)
    assert job.returncode == -signal.SIGINT
    assert time.monotonic() - begun < 6


def test_folders_are_those_of_the_command_line(hosts, launches):
    """Relative ones begin where herringrun was started."""
    (launches.folder / "sub").mkdir()
    for options in ([], over(hosts, 1, 1)):
        code = "print(os.path.basename(os.getcwd()))"
        more = ["--wdir", "sub", "--output-filename", "logs"]
        status, out, err = launches.run(code, *options, *more)
        assert (status, out.split(), err) == (0, ["sub", "sub"], "")
    assert (launches.folder / "logs" / "rank.1" / "stdout").read_text() == "sub\nsub\n"


def test_who_stands_still_is_named_with_its_host(hosts, launches):
    code = "mark(os.getpid())\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nwait_for_go()"
    job = launches.start(code, *over(hosts, 1, 1), env={"HERRING_DEAD_AFTER_S": "1.2"}, stderr=-1)
    launches.marks(2)
    line = job.stderr.readline().decode()
    pid = Path(launches.folder / "mark-1.txt").read_text()
    assert "rank 1 has been stopped" in line
    assert f"kill -CONT {pid} on {hosts.addresses[1]}" in line
    os.kill(int(pid), signal.SIGCONT)
    launches.go()
    job.communicate(timeout=20)
    assert job.returncode == 0


TRAIN = """
import numpy, herring
herring.init()
total = float(herring.allreduce(numpy.ones(100_000, numpy.float32), op="sum")[-1])
print(f"{herring.rank()} of {herring.size()}: {total}", flush=True)
herring.shutdown()
"""


def trains(hosts) -> list[str]:
    return [sys.executable, "-c", TRAIN]


def test_servers_on_hosts_of_their_own(hosts, launches):
    options = [*over(hosts, 2, 1), "--server-hosts", hosts.addresses[2], "-x", "HERRING_INTERFACE=eth0"]
    status, out, err = launches.run("", *options, size=3, program=trains(hosts))
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"{rank} of 3: 3.0" for rank in range(3)]
    assert "rank 0 of 3 workers on 2 hosts (RANK and WORLD_SIZE), 1 server process: " in err
    assert "tcp (" in err


ELASTIC = """
import numpy, herring, os, time
rank = int(os.environ["RANK"])
herring.init()
seen = []
for step in range(4000):
    total = float(herring.allreduce(numpy.ones(1000, numpy.float32), op="sum")[0])
    if not seen or seen[-1] != total:
        seen.append(total)
        open(f"mark-{rank}-{len(seen)}.txt", "w").write(str(os.getpid()))
    if seen[0] == 2.0 and total == 1.0: break
    time.sleep(0.005)
print("seen", seen, flush=True)
herring.shutdown()
"""


def test_an_elastic_job_goes_on_without_a_host(hosts, launches):
    """The host of rank 1 is gone with its agent; rank 0 goes on alone and ends well."""
    options = [*over(hosts, 1, 1), "--elastic", "-x", "HERRING_INTERFACE=eth0", "-x", "HERRING_DEAD_AFTER_S=1.5"]
    job = launches.start("", *options, program=[sys.executable, "-c", ELASTIC])
    wait_for(lambda: (launches.folder / "mark-1-1.txt").exists(), 30, "first step")
    keeper = find_keeper(job.pid)
    agent = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[1])
    os.kill(agent, signal.SIGKILL)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err.decode()
    assert out.decode().split() == ["seen", "[2.0,", "1.0]"]
    assert "rank 1 was lost with its host" in err.decode()


def test_a_worker_is_started_again_on_its_host(hosts, launches):
    options = [*over(hosts, 1, 1), "--elastic", "--restart-workers", "1", "-x", "HERRING_INTERFACE=eth0", "--verbose"]
    grow = [sys.executable, test_elastic.__file__, "grow", str(launches.folder / "killed"), "2"]
    status, out, err = launches.run("", *options, "-x", "HERRING_DEAD_AFTER_S=1.5", program=grow)
    assert status == 0, err
    assert out.count("is whole again with 2") == 2
    assert len(re.findall(rf"rank 1 is process \d+ on {hosts.addresses[1]}", err)) == 2
    assert "; restarting rank " in err


def test_a_server_that_dies_is_replaced_by_the_other_and_comes_back(hosts, launches):
    code = """
import numpy, herring, os, signal, time
herring.init()
rank = int(os.environ["RANK"])
for step in range(300):
    assert float(herring.allreduce(numpy.ones(1000, numpy.float32), op="sum")[0]) == 2.0
    if step == 20: open(f"mark-{rank}.txt", "w").close()
    time.sleep(0.005)
herring.shutdown()
print("done")
"""
    options = [*over(hosts, 1, 1), "--server-hosts", f"{hosts.addresses[2]}:2", "--restart-servers", "1", "--verbose"]
    program = [sys.executable, "-c", code]
    job = launches.start("", *options, "-x", "HERRING_INTERFACE=eth0", program=program, stderr=subprocess.STDOUT)
    launches.marks(2)
    shown = []
    for line in job.stdout:
        shown.append(line.decode())
        match = re.match(r"herringrun: server 1 is process (\d+) on", shown[-1])
        if match:
            os.kill(int(match[1]), signal.SIGKILL)
            break
    rest, _ = job.communicate(timeout=60)
    text = "".join(shown) + rest.decode()
    assert job.returncode == 0, text
    assert text.count("done") == 2
    assert "server 1 (" in text
    assert "the job goes on with" in text
    assert len(re.findall(rf"server 1 is process \d+ on {hosts.addresses[2]}", text)) == 2


WORK = """
def work(factor, more):
    import os
    return factor * int(os.environ["RANK"]) + more, os.environ["HOROVOD_HOSTNAME"], b"x" * 3_000_000
"""


def test_horovod_run_brings_results_back_from_all_hosts(hosts, launches):
    """run() does not count on a shared folder: function and results go over the connection."""
    (launches.folder / "there.py").write_text(WORK)
    a, b, _ = hosts.addresses
    code = (
        "import herring.horovod, there\n"
        f"got = herring.horovod.run(there.work, (10,), {{'more': 1}}, hosts='{a}:2,{b}:1', rsh='{hosts.rsh}')\n"
        "print([(value, host, len(data)) for value, host, data in got])\n"
    )
    env = {**clean_environment(), "PYTHONPATH": f"{launches.folder}:{clean_environment()['PYTHONPATH']}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([(1, a, 3_000_000), (11, a, 3_000_000), (21, b, 3_000_000)])
    assert not list(Path(tempfile.gettempdir()).glob("herringrun-*")), "copies are removed on every host"


def test_on_a_terminal_ranks_of_other_hosts_have_one(hosts, launches):
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    code = "size = os.get_terminal_size(1)\nprint('size', size.lines, size.columns, sys.stderr.isatty())"
    job = launches.start(code, *over(hosts, 1), size=1, stdout=slave, stderr=slave)
    os.close(slave)
    assert read_until(master, b"\n", 20) == b"size 33 77 True\r\n"
    assert job.wait(20) == 0
    os.close(master)
