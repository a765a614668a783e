"""What the launcher asks of Linux: who descends from this process, who stands still, and that none is left behind.

Nothing here knows of ranks. Where /proc is missing nobody is found, and what is left is the groups that the caller
knows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Found",
    "adopt_orphans",
    "call_self",
    "descendants",
    "end_with_parent",
    "is_stopped",
    "kill_descendants",
    "send",
]

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46  # In /proc/self/stat, counted from the state.
_GONE = "ZX"  # States of who has ended: nobody has asked yet how.
_STOPPED = "Tt"
_PAUSE_S = 0.01


@dataclass(frozen=True)
class Found:
    """A process as /proc shows it."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    started: int  # With the pid: this process and no later one of the same number.

    @property
    def has_ended(self) -> bool:
        """It is a zombie."""
        return self.state in _GONE


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """This process gets the signal when the one that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Descendants whose parents have ended become this process's children, not init's: they can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def call_self(name: str, title: str) -> None:
    """Another name in ps and for pkill: who kills by the name of herringrun, or of the script, misses this process."""
    _prctl(_PR_SET_NAME, name.encode()[:15])
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
        if 0 < begin < end:  # Python has long copied its arguments.
            ctypes.memset(begin, 0, end - begin)
            text = title.encode()[: end - begin - 1]
            ctypes.memmove(begin, text, len(text))


def _read(pid: int) -> Found | None:
    try:
        text = Path("/proc", str(pid), "stat").read_text(errors="replace")
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        name = head.partition("(")[2]
        return Found(pid, name, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def descendants() -> list[Found]:
    """Children, their children and so on, also zombies."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    children: dict[int, list[Found]] = {}
    for found in filter(None, map(_read, pids)):
        children.setdefault(found.parent, []).append(found)
    result: list[Found] = []
    to_do = [os.getpid()]
    while to_do:
        for found in children.pop(to_do.pop(), []):
            result.append(found)
            to_do.append(found.pid)
    return result


def send(found: Found, number: int) -> bool:
    """Signals that very process, and not another that has got its number since. False: nothing more can be done."""
    try:
        descriptor = os.pidfd_open(found.pid)
    except ProcessLookupError:
        return True
    except OSError:  # An old kernel, or no descriptor is left: a moment's risk is less than a process left behind.
        return _send_by_number(found, number)
    try:
        now = _read(found.pid)
        if now is None or now.started == found.started:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _send_by_number(found: Found, number: int) -> bool:
    now = _read(found.pid)
    if now is None or now.started != found.started:
        return True
    with contextlib.suppress(ProcessLookupError):
        try:
            os.kill(found.pid, number)
        except PermissionError:
            return False
    return True


def kill_descendants(limit_s: float) -> None:
    """SIGKILL to all of them, and to those that they start meanwhile, until none is left; reaps the own children.

    Gives up past the limit: a process may wait for a disk, or be another user's.
    """
    deadline = time.monotonic() + limit_s
    while True:
        alive = 0
        for found in descendants():
            if found.has_ended:
                continue
            alive += send(found, signal.SIGKILL)
        _reap_all()
        if not alive or time.monotonic() > deadline:
            return
        time.sleep(_PAUSE_S)


def _reap_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def is_stopped(pid: int) -> bool:
    """Whether the process stands still (SIGSTOP, a debugger), or the one that it waits for: a shell's only child."""
    for _ in range(4):
        found = _read(pid)
        if found is None:
            return False
        if found.state in _STOPPED:
            return True
        try:
            children = Path("/proc", str(pid), "task", str(pid), "children").read_text().split()
        except OSError:
            return False
        if len(children) != 1:
            return False
        pid = int(children[0])
    return False
