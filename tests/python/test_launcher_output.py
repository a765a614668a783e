"""What the ranks print comes out whole, at once, and unchanged; who does not read it costs output, not the job."""

from __future__ import annotations

import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import time

import pytest
from launcher import wait_for

from herring._launch._output import LONG_LINE, Destination, Source


def read_until(fd: int, wanted: bytes, seconds: float) -> bytes:
    """Everything up to and with `wanted`; what there was when the time was over."""
    text, deadline = b"", time.monotonic() + seconds
    while wanted not in text and time.monotonic() < deadline:
        if select.select([fd], [], [], 0.1)[0]:
            try:
                more = os.read(fd, 65536)
            except OSError:
                break
            if not more:
                break
            text += more
    return text


@pytest.mark.parametrize("options", [[], ["--tag-output"]], ids=["untagged", "tagged"])
def test_lines_of_several_ranks_never_mix(launches, options):
    """A log line that is two halves of two ranks is found by no grep. stderr goes where stdout goes, as under tee."""
    code = """
import random
dice = random.Random(rank)
for number in range(150):
    line = f"<{rank} {number} {'x' * dice.randrange(3000)}>\\n".encode()
    cut = dice.randrange(len(line))
    to = 1 + number % 2
    os.write(to, line[:cut])
    if number % 10 == 0: time.sleep(0.002)
    os.write(to, line[cut:])
"""
    job = launches.start(code, *options, size=4, stderr=subprocess.STDOUT)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0
    seen: dict[int, list[int]] = {}
    for line in out.decode().splitlines():
        match = re.fullmatch(r"(?:\[rank (\d)\] )?<(\d) (\d+) x*>", line)
        assert match, line[:200]
        assert (match[1] == match[2]) if options else match[1] is None
        seen.setdefault(int(match[2]), []).append(int(match[3]))
    assert seen == {rank: list(range(150)) for rank in range(4)}, "also in order, over stdout and stderr"


def test_bytes_pass_unchanged(launches):
    """A terminal or locale that lacks a character must not end a training job."""
    code = (
        "os.write(1, bytes(each for each in range(256) if each not in (10, 13)) + b'\\n\\xff\\xfe caf\\xc3\\xa9\\r\\n')"
    )
    locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    job = launches.start(code, "--tag-output", size=1, env=locale)
    out, err = job.communicate(timeout=30)
    assert (job.returncode, err) == (0, b"")
    everything = bytes(each for each in range(256) if each not in (10, 13))
    assert out == b"[rank 0] " + everything + b"\n[rank 0] \xff\xfe caf\xc3\xa9\r\n"


@pytest.mark.parametrize("options", [[], ["--tag-output"]], ids=["untagged", "tagged"])
def test_who_stops_reading_does_not_end_the_job(launches, options):
    """herringrun ... | head -1, or a tee that was killed."""
    code = """
print("first", flush=True)
wait_for_go()
for number in range(20000): print("more", number)
mark("done")
"""
    job = launches.start(code, *options)
    assert b"first\n" in read_until(job.stdout.fileno(), b"first\n", 20)
    job.stdout.close()
    job.stdout = None
    launches.go()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0
    assert launches.marks(2) == ["done", "done"]
    assert err.decode() == (
        "herringrun: stdout: nobody reads it any more; the job goes on, and its output there is dropped\n"
    )


def test_a_full_disk_is_told_once(launches):
    """A sentence for each line that is lost would bury what the ranks say on stderr."""
    code = """
for number in range(200):
    print("more", number, flush=True)
    time.sleep(0.002)
mark("done")
"""
    with open("/dev/full", "wb") as full:
        job = launches.start(code, stdout=full)
        _, err = job.communicate(timeout=60)
    assert (job.returncode, launches.marks(2)) == (0, ["done", "done"])
    assert err.decode() == (
        "herringrun: stdout: No space left on device; the job goes on, and a part of its output there is lost\n"
    )


def test_a_reader_that_pauses_does_not_stop_ctrl_c(launches):
    """`| less` waits at its first page; the launcher must still hear what the user wants."""
    job = launches.start("mark('up')\nwhile True: print('x' * 1000)")
    launches.marks(2)
    time.sleep(0.5)
    os.kill(job.pid, signal.SIGINT)
    wait_for(lambda: job.poll() is not None, 10, "end")
    assert job.returncode == -signal.SIGINT
    assert b"SIGINT: stopping the job" in job.stderr.read()


def test_a_reader_that_takes_its_time_gets_everything(launches):
    job = launches.start("for number in range(3000): print('x' * 1000)", size=1)
    time.sleep(2)
    assert job.poll() is None
    assert job.stdout.read().count(b"\n") == 3000
    assert job.wait(20) == 0


def test_sixty_megabytes_on_one_line(launches):
    """Joining what has come so far anew for each piece took half a minute."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    code, out, err = launches.run(
        "os.write(1, b'') or sys.stdout.write('x' * 60_000_000 + '\\n')", "--tag-output", size=1
    )
    assert code == 0, err
    assert len(out) == 60_000_000 + len("[rank 0] \n")
    assert out.startswith("[rank 0] xxx")
    # Of the processor: other jobs on this machine cost none of it.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 8


@pytest.mark.parametrize("pause_s", [0, 2.5])
def test_a_long_line_is_whole_beside_others(launches, pause_s):
    """Also where the reader pauses in the middle of it: it is not the rank that has paused then."""
    code = """
if rank == 0:
    sys.stdout.write("x" * 8_000_000 + "\\n")
else:
    wait_for_go()
    for number in range(3000): print("y" * 100)
"""
    job = launches.start(code, "--tag-output")
    begin = read_until(job.stdout.fileno(), b"xxx", 20)
    launches.go()
    time.sleep(pause_s)
    out, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    lines = (begin + out).splitlines()
    assert lines.count(b"[rank 1] " + b"y" * 100) == 3000
    assert lines.count(b"[rank 0] " + b"x" * 8_000_000) == 1
    assert len(lines) == 3001


@pytest.mark.parametrize("options", [[], ["--tag-output"]], ids=["untagged", "tagged"])
def test_a_progress_bar_is_seen_while_it_moves(launches, options):
    job = launches.start("sys.stdout.write('\\r 10% |#   |'); sys.stdout.flush()\nwait_for_go()", *options, size=1)
    seen = read_until(job.stdout.fileno(), b"|#   |", 10)
    tag = b"[rank 0] " if options else b""
    assert seen == b"\r" + tag + b" 10% |#   |"
    launches.go()
    job.communicate(timeout=20)
    assert job.returncode == 0


def test_the_last_words_of_a_killed_rank_are_there(launches):
    code, out, _ = launches.run(
        "print('loss nan', end='')\nos.kill(os.getpid(), signal.SIGKILL)", "--tag-output", size=1
    )
    assert code == 128 + 9
    assert out == "[rank 0] loss nan\n"


@pytest.mark.parametrize("options", [[], ["--tag-output"]], ids=["untagged", "tagged"])
def test_on_a_terminal_ranks_have_a_terminal(launches, options):
    """Colours, bars and prompt lines as without a launcher; its size, too."""
    import fcntl
    import struct
    import termios

    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    code = """
size = os.get_terminal_size(1)
print("size", size.lines, size.columns, sys.stderr.isatty())
sys.stdout.write("loading ")
sys.stdout.flush()
wait_for_go()
print("done")
"""
    job = launches.start(code, *options, size=1, stdout=slave, stderr=slave)
    os.close(slave)
    tag = b"[rank 0] " if options else b""
    assert read_until(master, b"loading ", 20) == tag + b"size 33 77 True\r\n" + tag + b"loading "
    launches.go()
    assert read_until(master, b"\n", 20) == b"done\r\n"
    assert job.wait(20) == 0
    os.close(master)


def test_sixty_four_ranks(launches):
    code, out, err = launches.run("print('hello', rank)", "--tag-output", size=64, timeout=120)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == sorted(f"[rank {rank}] hello {rank}" for rank in range(64))


def test_without_standard_descriptors(launches):
    """Started by a service manager that closes them: a rank's pipe must not take their place."""

    def close():
        for fd in (0, 1, 2):
            os.close(fd)

    job = launches.start("print('hello'); mark('done')", stdout=None, stderr=None, stdin=None, preexec_fn=close)
    assert job.wait(20) == 0
    assert launches.marks(2) == ["done", "done"]


@pytest.mark.parametrize("seed", range(20))
def test_any_way_of_cutting_gives_the_same_lines(tmp_path, seed):
    """Reads end anywhere; progress bars and unfinished text come and go."""
    dice = random.Random(seed)
    print("seed", seed)
    tags = [b"[a] ", b"[b] "] if seed % 2 else [b"", b""]
    path = tmp_path / "out"
    with open(path, "wb") as file:
        to = Destination(file.fileno(), "stdout")
        sources = [Source(-1, tag, to) for tag in tags]
        lines = [[b"%d.%d " % (at, n) + b"z" * dice.randrange(30) + b"\n" for n in range(40)] for at in range(2)]
        texts = [b"".join(each) for each in lines]
        now = 0.0
        while any(texts):
            at = dice.randrange(2)
            size = dice.randrange(1, 60)
            piece, texts[at] = texts[at][:size], texts[at][size:]
            if piece:
                sources[at].take(piece, now)
            now += dice.random()
            for source in sources:
                due = source.due()
                if due is not None and due <= now:
                    source.show()
        for source in sources:
            source.finish()
    got = path.read_bytes().splitlines(keepends=True)
    for at, tag in enumerate(tags):
        assert [line for line in got if line.removeprefix(tag).startswith(b"%d." % at)] == [tag + x for x in lines[at]]
    assert len(got) == 80


def test_two_long_lines_that_are_ready_in_one_turn_stay_whole(tmp_path):
    """The first to be long has the stream; what is ready beside it, a progress bar too, waits until it ends."""
    path = tmp_path / "out"
    with open(path, "wb") as file:
        to = Destination(file.fileno(), "stdout")
        pipes = [os.pipe() for _ in range(2)]
        one, other = (Source(read, b"", to) for read, _ in pipes)
        bar = Source(-1, b"", to)
        for (_, write), source, byte in zip(pipes, (one, other), (b"a", b"b"), strict=True):
            source.take(byte * LONG_LINE, 0.0)
            os.write(write, byte + b"\n" if source is other else byte)
        bar.take(b"\r5 %", 0.0)
        one.read()
        other.read()
        assert bar.due() is None
        one.take(b"\n", 1.0)
        other.read()
        assert bar.due() is not None
        bar.show()
    for fd in sum(pipes, ()):
        os.close(fd)
    assert path.read_bytes() == b"a" * (LONG_LINE + 1) + b"\n" + b"b" * (LONG_LINE + 1) + b"\n" + b"\r5 %"


def test_bars_of_two_ranks_in_a_file_leave_lines_alone(tmp_path):
    path = tmp_path / "out"
    with open(path, "wb") as file:
        to = Destination(file.fileno(), "stdout")
        a, b = Source(-1, b"[a] ", to), Source(-1, b"[b] ", to)
        a.take(b"\r 1%", 0)
        a.show()
        a.take(b"\r 2%", 1)
        a.show()
        b.take(b"a line\n", 2)
        a.take(b"\r 3%\n", 3)
        b.take(b"10%\r20%\r30%\r\n", 4)
        a.finish()
        b.finish()
    assert path.read_bytes() == (b"\r[a]  1%\r[a]  2%\n[b] a line\n\r[a]  3%\n[b] 10%\r[b] 20%\r[b] 30%\r\n")


@pytest.mark.parametrize("options", [[], ["--stdin", "none"]], ids=["rank 0", "none"])
def test_stdin_is_rank_0s(launches, options):
    """A script that asks, `herringrun ... < data`: one rank gets it, and the others do not wait for it."""
    (launches.folder / "input").write_bytes(b"typed\n")
    with (launches.folder / "input").open() as file:
        status, out, err = launches.run("print(rank, repr(sys.stdin.read()))", *options, stdin=file)
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"0 {'' if options else chr(10).join(['typed', ''])!r}", "1 ''"]


def test_a_breakpoint_of_one_process_can_be_used(launches):
    """pdb reads the terminal and shows its prompt there."""
    master, slave = os.openpty()
    script = launches.folder / "debug.py"
    script.write_text("value = 40\nbreakpoint()\nprint('went on', value)\n")
    program = [sys.executable, str(script)]
    env = {"TERM": "dumb", "PYTHON_BASIC_REPL": "1"}
    job = launches.start("", size=1, program=program, stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    shown = read_until(master, b"(Pdb) ", 20)
    assert shown.endswith(b"(Pdb) "), shown
    os.write(master, b"p value + 2\n")
    shown = read_until(master, b"42", 20)
    assert b"42" in shown
    if b"(Pdb) " not in shown:
        read_until(master, b"(Pdb) ", 20)
    os.write(master, b"c\n")
    shown = read_until(master, b"went on 40", 20)
    assert b"went on 40" in shown
    assert job.wait(20) == 0
    os.close(master)


def test_files_with_each_ranks_own_output(launches):
    folder = launches.folder / "logs"
    code = "print('out', rank, flush=True); print('err', rank, file=sys.stderr, flush=True)"
    status, out, _ = launches.run(code, "--output-filename", str(folder), size=11)
    assert status == 0
    assert len(out.splitlines()) == 11
    assert (folder / "rank.03" / "stdout").read_text() == "out 3\n", "with leading zeros, as Horovod has them"
    assert (folder / "rank.10" / "stderr").read_text() == "err 10\n"
