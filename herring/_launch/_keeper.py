"""Two processes, so that no job is left behind when one of them is killed.

* The *front* is what the user has started. It passes signals on, and ends as the job has ended.
* The *keeper* is its child, in a session of its own; it starts the processes, forwards their output and ends them.

Between them is a socket. Where the front is gone, the keeper reads the socket's end and kills the job. Where the keeper
is killed, the front does: both have asked Linux for their descendants' orphans, so that whatever a rank has started is
below one of them and is found, also what has a session of its own. A signal to herringrun's group, or to all of the
name herringrun, does not reach the keeper. Who kills both at one moment leaves what the ranks had started (the ranks
themselves end with the keeper).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from herring._launch import _processes

__all__ = ["Control", "run"]

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGTSTP,
)
_KILL_S = 5.0
_MESSAGE = 64
_PAUSED = b"paused"
_PAUSE_S = 2.0


class Control:
    """The keeper's end: the signals that came to the front, and those that came to the keeper itself."""

    def __init__(self, connection: socket.socket, pending: list[int]) -> None:
        self._connection = connection
        self._own = pending  # What came before the front knew of a keeper.
        self._wakeup, write = socket.socketpair()
        for end in (self._wakeup, write):
            end.setblocking(False)
        self._write = write
        self.descriptors = (connection.fileno(), self._wakeup.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # Wakes up.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGWINCH):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._own.append(number)

    def requests(self, ready: list[int]) -> list[int]:
        """What has come. Raises EOFError where the front is gone."""
        with contextlib.suppress(BlockingIOError):
            while len(self._wakeup.recv(4096)) == 4096:
                pass
        result, self._own = self._own, []
        if self._connection.fileno() in ready:
            result.append(self._receive())
        return result

    def _receive(self) -> int:
        message = self._connection.recv(_MESSAGE)
        if not message:
            raise EOFError
        return int(message)

    def await_resume(self) -> None:
        """All stand still, and so may the front; until it goes on."""
        self._connection.send(_PAUSED)
        while (number := self._receive()) != signal.SIGCONT:
            self._own.append(number)

    def finish(self, code: int) -> None:
        """The job has ended. Negative: the front ends by that signal."""
        with contextlib.suppress(OSError):
            self._connection.send(str(code).encode())


def run(keep: Callable[[Control], int]) -> int:
    """Calls keep() in the keeper; returns the exit code that it returns. A negative one is a signal: this process ends
    by it, as the shell that started it expects (a script stops at Ctrl-C), or where it cannot, with 128 + signal."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pending: list[int] = []
    wakeup, write = os.pipe()
    for fd in (wakeup, write):
        os.set_blocking(fd, False)
    for number in FORWARDED:
        # nohup, and shells that start jobs in the background: what they ignore stays ignored.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda got, frame: pending.append(got))
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    front = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    try:
        keeper = os.fork()
    except OSError as error:
        print(
            f"herringrun: cannot start a process: {error.strerror}; a limit is reached (`ulimit -u`, a container's "
            "pids.max, or memory)",
            file=sys.stderr,
        )
        return 1
    if keeper == 0:
        here.close()
        signal.set_wakeup_fd(-1)
        for fd in (wakeup, write):
            os.close(fd)
        _be_keeper(there, front, keep, pending)
    there.close()
    _processes.adopt_orphans()
    code = _Front(here, keeper, wakeup, pending).stand()
    if code >= 0:
        return code
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


def _be_keeper(connection: socket.socket, front: int, keep: Callable[[Control], int], pending: list[int]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _processes.adopt_orphans()
        _processes.end_with_parent(signal.SIGCONT)  # So that a stopped keeper reads the socket's end, too.
        _processes.call_self("herring-keeper", f"herring-keeper of process {front}")
        control = Control(connection, pending)
        code = keep(control)
        control.finish(code)
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        _processes.kill_descendants(_KILL_S)
        os._exit(code if code >= 0 else 1)


class _Front:
    def __init__(self, connection: socket.socket, keeper: int, wakeup: int, pending: list[int]) -> None:
        self._connection = connection
        self._keeper = keeper
        self._wakeup = wakeup
        self._pending = pending

    def stand(self) -> int:
        """Until the job has ended; its exit code."""
        import select

        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            while self._pending:
                self._pass_on(self._pending.pop(0))
            ready = [fd for fd, _ in poll.poll()]
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
            if self._connection.fileno() in ready:
                message = self._connection.recv(_MESSAGE)
                if not message:
                    return self._replace_keeper()
                if message != _PAUSED:
                    self._reap()
                    return int(message)

    def _send(self, number: int) -> None:
        with contextlib.suppress(OSError):  # The keeper is gone; its end of the socket says so next.
            self._connection.send(str(int(number)).encode())

    def _pass_on(self, number: int) -> None:
        self._send(number)
        if number != signal.SIGTSTP:
            return
        self._connection.settimeout(_PAUSE_S)
        with contextlib.suppress(OSError):
            message = self._connection.recv(_MESSAGE, socket.MSG_PEEK)
            if message == _PAUSED:
                self._connection.recv(_MESSAGE)
        self._connection.settimeout(None)
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # Here it stands still, until fg or bg.
        signal.signal(signal.SIGTSTP, handler)
        self._send(signal.SIGCONT)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._keeper, 0)

    def _replace_keeper(self) -> int:
        """The keeper was killed: its processes are this one's now."""
        self._reap()
        _processes.kill_descendants(_KILL_S)
        print(
            f"herringrun: the process that looks after the job ({self._keeper}) was killed; all that it had started is "
            "ended",
            file=sys.stderr,
        )
        return 1
