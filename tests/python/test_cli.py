"""What the commands say to somebody who has not used them before."""

import os
import subprocess
import sys

import pytest

CLI = [sys.executable, "-m", "herring._cli"]


def run(arguments, env, **more):
    return subprocess.run([*CLI, *arguments], env=env, capture_output=True, text=True, timeout=30, check=False, **more)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rendezvous", "--workers", "0"], ["--workers 0", "at least 1"]),
        (["rendezvous", "--workers", "2", "--min-workers", "3"], ["--min-workers 3"]),
        (["rendezvous", "--workers", "2", "--servers", "5000"], ["--servers 5000", "0 to 4096"]),
        (["rendezvous", "--workers", "2"], ["HERRING_RENDEZVOUS=host:port"]),
        (["server"], ["--rank"]),
        (["bench", "nothing"], ["nothing"]),
        (["bench"], ["herring bench allreduce or replay"]),
        (["bench", "allreduce", "--op", "band"], ["--op band", "integers"]),
        (["nothing"], ["nothing", "server"]),
        ([], ["no command", "herring doctor"]),
        (["build"], ["required: torch"]),
        (["doctor", "--jsno"], ["--jsno; did you mean --json?"]),
        (["bench", "allreduce", "--szies=8"], ["--szies=8; did you mean --sizes?"]),
        (["config", "--zzz"], ["unrecognized arguments: --zzz"]),
    ],
)
def test_a_wrong_command_is_a_sentence_and_ends(clean_env, arguments, words):
    """It stood there for two minutes, waiting for no workers."""
    if "HERRING_RENDEZVOUS" not in " ".join(words) and "rendezvous" in arguments:
        clean_env = {**clean_env, "HERRING_RENDEZVOUS": "127.0.0.1:1"}
    done = run(arguments, clean_env)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), done.stderr


def test_without_a_command_all_commands_are_listed(clean_env):
    said = run([], clean_env).stderr
    assert all(f"\n    {command}" in said for command in ("server", "doctor", "config", "bench", "kubernetes"))


RUN = "import sys; from herring.{} import main; sys.exit(main(sys.argv[1:]))"
PRINTING = [
    ("herring config", "_cli", ["config"]),
    ("herring doctor", "_cli", ["doctor"]),
    ("herring", "_cli", ["--version"]),
    ("herring", "_cli", ["server", "--help"]),
    ("herringrun", "_launch", ["--version"]),
    ("herring-horovodrun", "_launch._horovodrun", ["--check-build"]),
    ("herring-horovodrun", "_launch._horovodrun", ["--help"]),
]


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(("name", "module", "arguments"), PRINTING)
def test_output_that_is_lost_is_a_sentence_and_a_status(clean_env, name, module, arguments, unbuffered):
    """A script that keeps a report must not take half of one, or none, for a good one."""
    env = {**clean_env, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-c", RUN.format(module), *arguments]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.stderr.decode() == f"{name}: stdout: No space left on device; a part of the output is lost\n"
    assert done.returncode == 1


@pytest.mark.parametrize(("name", "module", "arguments"), PRINTING)
def test_a_closed_stdout_is_a_sentence_and_a_status(clean_env, name, module, arguments):
    """herring doctor >&-"""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", RUN.format(module), *arguments]
    done = subprocess.run(command, env=clean_env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, f"{name}: stdout is closed; a part of the output is lost\n")


@pytest.mark.parametrize(("name", "module", "arguments"), PRINTING)
def test_no_reader_is_no_traceback_for_any_of_them(clean_env, name, module, arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", RUN.format(module), *arguments]
    done = subprocess.run(command, env=clean_env, stdout=write, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + 13, b""), name


def test_a_rendezvous_says_whom_it_waits_for(clean_env, job):
    """It stood there without a word, whatever address it had been given."""
    env = {**clean_env, "HERRING_RENDEZVOUS": f"127.0.0.1:{job.port}", "HERRING_JOIN_TIMEOUT_S": "0.5"}
    command = [*CLI, "rendezvous", "--workers", "2", "--servers", "1"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    first, second = process.stderr.readline(), process.stderr.readline()
    process.terminate()
    assert process.communicate(timeout=20)[1] == ""
    place = f"127.0.0.1:{job.port}"
    assert first == f"herring rendezvous: at {place}, waiting for 2 workers and 1 server\n"
    assert second == (
        f"herring rendezvous: the job has not begun after 0.5 s (HERRING_JOIN_TIMEOUT_S); still waiting at {place}: do "
        "all processes have this HERRING_RENDEZVOUS and the same HERRING_SECRET?\n"
    )


def test_a_locale_without_a_character_is_no_traceback(clean_env):
    """Settings hold what a user has typed."""
    env = {**clean_env, "PYTHONIOENCODING": "ascii", "HERRING_SECRET": "geheim", "HERRING_INTERFACE": "\u00e9th0"}
    done = run(["config"], env)
    assert done.returncode == 0, done.stderr
    assert "\\xe9th0" in done.stdout


def test_versions_are_told(clean_env):
    assert run(["--version"], clean_env).stdout.startswith("herring ")
    command = [sys.executable, "-m", "herring._launch", "--version"]
    done = subprocess.run(command, env=clean_env, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith("herringrun ")


def test_python_m_herring_is_the_command(clean_env):
    done = subprocess.run(
        [sys.executable, "-m", "herring", "--version"],
        env=clean_env,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.startswith("herring ")


@pytest.mark.parametrize(
    ("module", "line", "completed"),
    [
        ("herring", "herring ben", ["bench"]),
        ("herring", "herring bench --pe", ["--peers"]),
        ("herring._launch", "herringrun --server", ["--servers", "--server-hosts", "--server-hostfile"]),
    ],
)
def test_a_shell_can_complete_them(clean_env, tmp_path, module, line, completed):
    pytest.importorskip("argcomplete", reason="argcomplete is not installed")
    output = tmp_path / "completions"
    asks = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(output), "_ARGCOMPLETE_IFS": " "}
    env = {**clean_env, **asks, "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    subprocess.run([sys.executable, "-m", module], env=env, timeout=30, check=False, capture_output=True)
    assert output.read_text().split() == completed


def test_without_argcomplete_nothing_is_completed_and_nothing_breaks(clean_env):
    code = "import sys; sys.modules['argcomplete'] = None; from herring._cli import main; sys.exit(main(['--version']))"
    env = {**clean_env, "_ARGCOMPLETE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout.startswith("herring ")) == (0, True), done.stderr
