"""The processes of one job: started together, looked after, ended together with all that they have started."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from herring._launch import _processes
from herring._launch._commands import Command

__all__ = ["Interrupted", "Job", "Member", "Outlets", "Process", "Requests", "StartError", "how_it_ended", "interrupts"]

# After SIGINT or SIGTERM, before SIGKILL.
STOP_GRACE_S = 5.0
# The ranks have ended: their helpers notice by themselves, then they are asked to end, then made to.
LEAVE_S = 1.0
# Another SIGINT so soon is the same Ctrl-C, which came twice: from the terminal, and from a program in between.
SAME_INTERRUPT_S = 0.3
# How often children are looked for that came from processes that are gone.
_REAP_S = 30.0
_LOOK_S = 0.05


class Interrupted(Exception):
    """The user, or who started herringrun, wants the job to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StartError(Exception):
    """A process could not be started; the text says which, why, and what to do. `code` is what herringrun ends with."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Outlets(Protocol):
    """Where what the processes print goes."""

    def open(self, name: str) -> tuple[int, int]:
        """What a process is to have as stdout and stderr."""

    def say(self, text: str) -> None:
        """A line of the launcher's own."""

    def turn(self, seconds: float) -> list[int]:
        """Forwards what there is, waiting for something at most this long; which watched descriptors are ready."""

    def drain(self, limit_s: float, reader_limit_s: float, go_on: Callable[[list[int]], None]) -> None:
        """Forwards what is left when the processes have ended."""

    def resize(self) -> None:
        """The terminal has another size."""


class Requests(Protocol):
    """What the user asks for meanwhile."""

    def requests(self, ready: list[int]) -> list[int]:
        """Signals that have come. Raises EOFError where nobody is there any more."""

    def await_resume(self) -> None:
        """After SIGTSTP, until SIGCONT."""


@dataclass(eq=False)
class Member:
    """A rank, a server or the rendezvous, here or on another host."""

    name: str
    code: int | None = None  # Once it has ended; negative: killed by that signal.
    stopped_since: float | None = None
    stop_is_said: bool = False

    @property
    def how(self) -> str:
        """In words, how it ended."""
        return how_it_ended(self.code or 0)

    @property
    def pid(self) -> int:
        """On its host."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """Empty here, else " on HOST"."""
        return ""

    def note_stopped(self, now: float) -> float:
        """For how long it has been stopped; 0 where it runs."""
        raise NotImplementedError

    @property
    def is_server(self) -> bool:
        """A server process."""
        return self.name.startswith("server ")

    @property
    def is_worker(self) -> bool:
        """A rank."""
        return self.name.startswith("rank ")


class Process(Member):
    """A process of this machine; leads a session of its own."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        super().__init__(name)
        self.popen = popen
        self.is_reaped = False  # Until then no other process can get its number, nor its group's.

    @property
    def pid(self) -> int:
        """Also of its group and session."""
        return self.popen.pid

    def note_stopped(self, now: float) -> float:
        """For how long it has been stopped; 0 where it runs."""
        if not _processes.is_stopped(self.pid):
            self.stopped_since, self.stop_is_said = None, False
            return 0.0
        self.stopped_since = self.stopped_since or now
        return now - self.stopped_since


class Job:
    """Owns the processes, their output, and what the user asks for meanwhile."""

    def __init__(self, outputs: Outlets, control: Requests, verbose: bool) -> None:
        self.outputs = outputs
        self._control = control
        self._verbose = verbose
        self._processes: list[Process] = []
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._next_reap = time.monotonic() + _REAP_S
        self._interrupted_at: float | None = None
        hard = self._limits[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def say(self, text: str) -> None:
        """A line on stderr."""
        self.outputs.say(text)

    def start(self, name: str, command: Command, stdin: int | None = None) -> Process:
        """Starts one, with herringrun's stdin where the command takes input, or the given one. Raises StartError."""
        if stdin is None:
            stdin = 0 if command.takes_input else subprocess.DEVNULL
        try:
            out, err = self.outputs.open(name)
        except OSError as error:
            raise _start_error(name, command, error) from error
        try:
            popen = subprocess.Popen(
                command.arguments,
                env=command.environment,
                cwd=command.folder,
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=self._prepare_child,  # noqa: PLW1509 (the launcher has no threads)
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise _start_error(name, command, error) from error
        finally:
            for fd in {out, err}:
                os.close(fd)
        process = Process(name, popen)
        self._processes.append(process)
        if self._verbose:
            self.say(f"{name} is process {popen.pid}")
        return process

    def may_start(self, name: str) -> bool:
        """Whether that one can be started again."""
        return True

    @property
    def processes(self) -> list[Process]:
        """All that were started."""
        return self._processes

    def _prepare_child(self) -> None:
        _processes.end_with_parent()
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)

    def running(self) -> list[Process]:
        """Who has not ended."""
        return [process for process in self._processes if process.code is None]

    def forward(self) -> None:
        """Looks at what was printed and asked for, and waits for nothing. Raises Interrupted."""
        self._heed(self.outputs.turn(0))

    def poll(self, seconds: float) -> list[Process]:
        """Waits at most this long, forwarding output; returns the processes that ended, the killed ones first: theirs
        is why the others failed. Raises Interrupted."""
        self._heed(self.outputs.turn(seconds))
        ended = []
        for process in self.running():
            # Seen, not reaped: while its number is taken, signals to its group reach nobody else.
            with contextlib.suppress(ChildProcessError):
                status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if status is None:
                    continue
                process.code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
                ended.append(process)
                if self._verbose:
                    self.say(f"{process.name} {process.how}")
        if time.monotonic() > self._next_reap:
            self._reap_strangers()
        return sorted(ended, key=lambda process: process.code is not None and process.code >= 0)

    def _reap_strangers(self) -> None:
        self._next_reap = time.monotonic() + _REAP_S
        own = {process.pid for process in self._processes}
        for found in _processes.descendants():
            if found.has_ended and found.parent == os.getpid() and found.pid not in own:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(found.pid, os.WNOHANG)

    def _heed(self, ready: list[int]) -> None:
        for number in self._control.requests(ready):
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self.send_signal(number)
            elif number == signal.SIGWINCH:
                self.outputs.resize()
            elif number == signal.SIGTSTP:
                self._pause()
            elif number != signal.SIGCONT:
                first, self._interrupted_at = self._interrupted_at, self._interrupted_at or time.monotonic()
                if interrupts(first):
                    raise Interrupted(number)

    def _pause(self) -> None:
        """Ctrl-Z, until fg or bg."""
        self.stand_still()
        self._control.await_resume()
        self.go_on()

    def stand_still(self) -> None:
        """Stops all that descend from this process."""
        self._signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        """After stand_still()."""
        self._signal_all(signal.SIGCONT)
        for process in self._processes:
            process.stopped_since = None

    def _signal_all(self, number: int) -> None:
        """To all that descend from this process. Those in sessions of their own take no SIGTSTP, but SIGSTOP."""
        self.send_signal(number)
        for found in _processes.descendants():
            if not found.has_ended:
                _processes.send(found, number)

    def send_signal(self, number: int, only: Iterable[Process] | None = None) -> None:
        """To the processes and their children: each one's group."""
        for process in self._processes if only is None else only:
            if not process.is_reaped:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)

    def bury(self, process: Process) -> None:
        """It has failed or must not go on: ends what is left of it, also where a shell had started the real one."""
        self.send_signal(signal.SIGKILL, [process])
        for found in _processes.descendants():
            if found.session == process.pid and found.pid != process.pid and not found.has_ended:
                _processes.send(found, signal.SIGKILL)
        if process.code is not None and not process.is_reaped:
            process.popen.wait()
            process.is_reaped = True

    def stop(self, first: int = signal.SIGTERM) -> None:
        """Asks all to end, and makes them after STOP_GRACE_S, or at once where the user says so again."""
        if self.running():
            self.send_signal(first)
            self.send_signal(signal.SIGCONT)  # Who is stopped takes no other signal until then.
            self._await_all(STOP_GRACE_S)
        self.kill()

    def leave(self) -> None:
        """All have ended by themselves; what they have left running ends too."""
        self._await_all(LEAVE_S)
        left = _alive()
        if left:
            names = ", ".join(f"{found.name} ({found.pid})" for found in left[:8])
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            self.say(f"the job has ended; ending programs that it left running: {names}{more}")
            for found in left:
                _processes.send(found, signal.SIGTERM)
                _processes.send(found, signal.SIGCONT)
            self._await_all(STOP_GRACE_S)
        self.kill()

    def _await_all(self, seconds: float) -> None:
        """Until no process of the job is left, also none below the ranks: those may be saving a checkpoint. Less where
        the user wants it now."""
        deadline = time.monotonic() + seconds
        while _alive() and time.monotonic() < deadline:
            try:
                self.poll(_LOOK_S)
            except Interrupted as again:
                if again.number == signal.SIGINT:
                    self.say("SIGINT again: killing the processes that are left")
                    return

    def kill(self) -> None:
        """Ends everything at once."""
        self.send_signal(signal.SIGKILL)
        _processes.kill_descendants(STOP_GRACE_S)
        for process in self._processes:
            process.is_reaped = True
            if process.code is None:
                process.code = process.popen.returncode = -signal.SIGKILL
            else:
                process.popen.returncode = process.code

    def finish_output(self, reader_limit_s: float) -> None:
        """What is in the pipes goes out, as far as it is read in time. Raises Interrupted where the user waits no
        longer."""
        self.outputs.drain(LEAVE_S, reader_limit_s, self._heed)


def interrupts(first: float | None) -> bool:
    """Whether a signal now is another one than that of the time `first`."""
    return first is None or time.monotonic() - first > SAME_INTERRUPT_S


def _alive() -> list[_processes.Found]:
    return [found for found in _processes.descendants() if not found.has_ended]


def how_it_ended(code: int) -> str:
    """In words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _start_error(name: str, command: Command, error: Exception) -> StartError:
    """One sentence: who, why, what to do."""
    program = command.arguments[0]
    number = error.errno if isinstance(error, OSError) else None
    found = shutil.which(program, path=command.environment.get("PATH")) or program
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    most = "unlimited" if processes == resource.RLIM_INFINITY else str(processes)
    of_program = {
        errno.ENOEXEC: f"{found} is not a program and has no #! line; write the program that runs it in front, "
        f"such as `herringrun -np 2 sh {program}`",
        errno.ENOENT: f"{found}, or the interpreter in its #! line, is not there{_interpreter_hint(found)}",
        errno.EACCES: f"{found}, or the interpreter in its #! line, is not allowed to run (chmod +x, mount options)",
        errno.E2BIG: "its arguments and its environment together are too long; shorten them",
    }
    of_machine = {
        errno.EAGAIN: f"no more processes may be started. `ulimit -u` is {most} for all threads and processes of this "
        "user, and a container has a limit of its own (pids.max): start fewer, or raise it",
        errno.EMFILE: "no more files may be open: raise `ulimit -Hn`, or start fewer",
        errno.ENFILE: "no more files may be open on this machine (fs.file-max): start fewer",
        errno.ENOMEM: "the machine has no memory left for it; start fewer, or free memory",
    }
    if number in of_program:
        return StartError(f"cannot start {name}: {of_program[number]}", 2)
    return StartError(f"cannot start {name}: {of_machine.get(number or 0, str(error))}", 1)


def _interpreter_hint(path: str) -> str:
    with contextlib.suppress(OSError):
        with open(path, "rb") as file:
            line = file.readline(256)
        if line.startswith(b"#!"):
            text = line[2:].decode(errors="replace").rstrip("\n")
            return f": it says {text.strip(' ')!r}"
    return ""
