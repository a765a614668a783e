"""herringrun as a user starts it: with scripts that need no Herring, so that they start at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from surroundings import clean_environment

HERRINGRUN = [sys.executable, "-m", "herring._launch"]


def as_from_a_terminal() -> None:
    """Whoever runs the tests may ignore these (nohup, a shell's background), which a job would inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Launches:
    """Starts herringrun with small scripts in one folder, where these leave their marks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        code: str,
        *options: str,
        size: int = 2,
        program: list[str] | None = None,
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
        **popen: object,
    ) -> subprocess.Popen[bytes]:
        """`code` is Python in every rank: `rank` and `mark(text)` are there."""
        script = self.folder / "script.py"
        script.write_text(PRELUDE + code)
        settings: dict[str, object] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
            "cwd": self.folder,
            "start_new_session": True,
            "preexec_fn": as_from_a_terminal,
            **popen,
        }
        command = [*prefix, *HERRINGRUN, "-np", str(size), *options, *(program or [sys.executable, "-S", str(script)])]
        started = subprocess.Popen(command, env={**clean_environment(), **(env or {})}, **settings)  # type: ignore[call-overload]
        self._started.append(started)
        return started

    def run(self, code: str, *options: str, timeout: float = 60, **more: object) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        started = self.start(code, *options, **more)  # type: ignore[arg-type]
        out, err = started.communicate(timeout=timeout)
        return started.returncode, out.decode(errors="replace"), err.decode(errors="replace")

    def marks(self, count: int, timeout: float = 20) -> list[str]:
        """The marks' texts, once there are so many."""
        wait_for(lambda: len(list(self.folder.glob("mark-*.txt"))) >= count, timeout, f"{count} marks")
        return sorted(path.read_text() for path in self.folder.glob("mark-*.txt"))

    def go(self) -> None:
        """What wait_for_go() in the scripts waits for."""
        (self.folder / "go").touch()

    def stop(self) -> None:
        """Ends what a test has left, by the pids that it knows."""
        for path in self.folder.glob("mark-*.txt"):
            for word in path.read_text().split():
                if word.isdigit() and is_alive(int(word)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(word), signal.SIGKILL)
        for started in self._started:
            if started.poll() is None:
                os.kill(started.pid, signal.SIGKILL)
            started.communicate()


PRELUDE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def mark(text, name=""):
    path = f"mark-{rank}{name}"
    with open(path + ".new", "w") as file: file.write(str(text))
    os.rename(path + ".new", path + ".txt")
def wait_for_go():
    while not os.path.exists("go"): time.sleep(0.01)
"""


def wait_for(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Fails the test where it does not come true in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"no {what} within {timeout:g} s")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """There is such a process, and it is no zombie."""
    return state_of(pid) not in {"", "Z", "X"}


def state_of(pid: int) -> str:
    """As in /proc; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
