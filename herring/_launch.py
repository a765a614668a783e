"""``herringrun``: starts the workers and servers of a job on this machine and looks after them."""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

__all__ = ["main"]

# After a rank has failed, the others get this long to notice by themselves and print their own errors.
FAILURE_GRACE_S = 10.0
# After SIGINT or SIGTERM, before SIGKILL.
STOP_GRACE_S = 5.0
# Where some have finished, who is stopped (SIGSTOP, a debugger) for longer than the job would have waited for it.
STOPPED_CHECK_S = 0.5
DEAD_AFTER_S = 5.0
PR_SET_PDEATHSIG = 1

DESCRIPTION = "Run a training script in several processes on this machine, averaging gradients with Herring."
EPILOG = """\
examples:
  herringrun -np 4 python train.py
  herringrun -np 2 --servers 2 python train.py --epochs 3
  herringrun -np 4 --elastic --restart-workers 3 python train.py

Every process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.
Several machines: start the workers with torchrun or mpirun, and servers with `herring server` (see docs/launching.md).
"""


@dataclass
class _Process:
    name: str
    popen: subprocess.Popen[bytes]
    code: int | None = None
    stopped_since: float | None = None

    def note_stopped(self, now: float) -> float:
        """For how long it has been stopped; 0 where it runs."""
        try:
            state = Path("/proc", str(self.popen.pid), "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = ""
        self.stopped_since = (self.stopped_since or now) if state in {"T", "t"} else None
        return 0.0 if self.stopped_since is None else now - self.stopped_since

    @property
    def is_server(self) -> bool:
        return self.name.startswith("server ")

    @property
    def is_worker(self) -> bool:
        return self.name.startswith("rank ")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="herringrun", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-np", "-n", "--num-proc", type=int, required=True, metavar="N", help="number of workers")
    parser.add_argument(
        "--servers",
        type=int,
        default=0,
        metavar="K",
        help="server processes (default 0: servers are inside the workers)",
    )
    parser.add_argument("--elastic", action="store_true", help="go on without a worker that dies (docs/reliability.md)")
    parser.add_argument(
        "--min-workers", type=int, default=1, metavar="M", help="--elastic: with fewer the job ends (default 1)"
    )
    parser.add_argument(
        "--restart-workers",
        type=int,
        default=0,
        metavar="R",
        help="--elastic: start a worker that died again, so often in all (default 0)",
    )
    parser.add_argument(
        "--restart-servers",
        type=int,
        default=0,
        metavar="R",
        help="start a server that died again, so often in all (default 0); training goes on meanwhile",
    )
    parser.add_argument("--tag-output", action="store_true", help="put [rank N] or [server N] in front of each line")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable for every process (repeatable)"
    )
    parser.add_argument("--verbose", action="store_true", help="say what is started and how it ended")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="command", help="the program and its arguments")
    return parser


def _fail(message: str) -> int:
    print(f"herringrun: {message}", file=sys.stderr)
    return 2


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return int(port)


def _die_with_parent() -> None:
    # A launcher that is killed outright must not leave a job behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Job:
    """The processes of one job: started together, ended together."""

    def __init__(self, tag_output: bool, verbose: bool) -> None:
        self._tag_output = tag_output
        self._verbose = verbose
        self._processes: list[_Process] = []
        self._selector = selectors.DefaultSelector()
        self._partial: dict[int, bytes] = {}  # the unfinished last line of each pipe

    def start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        pipe = subprocess.PIPE if self._tag_output else None
        popen = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 (the launcher has no threads)
        )
        process = _Process(name, popen)
        for stream, target in ((popen.stdout, sys.stdout), (popen.stderr, sys.stderr)):
            if stream is not None:
                self._selector.register(stream, selectors.EVENT_READ, (name, target))
        self._processes.append(process)
        if self._verbose:
            print(f"herringrun: {name} is process {popen.pid}", file=sys.stderr)

    def running(self) -> list[_Process]:
        return [process for process in self._processes if process.code is None]

    def poll(self, seconds: float) -> list[_Process]:
        """Waits at most this long; returns the processes that ended."""
        if self._tag_output and self._selector.get_map():
            for key, _ in self._selector.select(seconds):
                self._forward(key)
        else:
            time.sleep(seconds)
        ended = []
        for process in self.running():
            code = process.popen.poll()
            if code is None:
                continue
            process.code = code
            ended.append(process)
            if self._verbose:
                print(f"herringrun: {process.name} {_how_it_ended(code)}", file=sys.stderr)
        return ended

    def _forward(self, key: selectors.SelectorKey) -> None:
        name, target = key.data
        read = os.read(key.fd, 65536)
        *lines, rest = (self._partial.pop(key.fd, b"") + read).split(b"\n")
        if not read:
            self._selector.unregister(key.fileobj)
            lines = [rest] if rest else []
        elif rest:
            self._partial[key.fd] = rest
        for line in lines:
            target.write(f"[{name}] {line.decode(errors='replace').rstrip()}\n")
        target.flush()

    def drain_output(self) -> None:
        deadline = time.monotonic() + 1.0
        while self._tag_output and self._selector.get_map() and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.1):
                self._forward(key)

    def send_signal(self, number: int) -> None:
        for process in self._processes:
            # The whole session: data loaders and other children of a rank go too, also where the rank is gone already.
            try:
                os.killpg(process.popen.pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            self.poll(0.05)

    def stop(self, first: int = signal.SIGTERM) -> None:
        if self.running():
            self.send_signal(first)
            self.send_signal(signal.SIGCONT)  # Who is stopped takes no other signal until then.
            self.wait(STOP_GRACE_S)
        self.send_signal(signal.SIGKILL)
        self.wait(STOP_GRACE_S)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _has_rendezvous(args: argparse.Namespace) -> bool:
    return bool(args.elastic or args.restart_servers)


def _environments(args: argparse.Namespace, extra: dict[str, str]) -> tuple[list[dict[str, str]], dict[str, str]]:
    base = dict(os.environ)
    base.update(extra)
    base["MASTER_ADDR"] = "127.0.0.1"
    base["MASTER_PORT"] = str(_free_port())
    base["WORLD_SIZE"] = str(args.num_proc)
    base["HERRING_SERVERS"] = str(args.servers)
    base["HERRING_HUB"] = f"127.0.0.1:{_free_port()}"
    if _has_rendezvous(args):
        base["HERRING_RENDEZVOUS"] = f"127.0.0.1:{_free_port()}"
        base["HERRING_ELASTIC"] = "on" if args.elastic else "off"
    base.setdefault("HERRING_SECRET", secrets.token_hex(16))
    cores = len(os.sched_getaffinity(0))
    base.setdefault("OMP_NUM_THREADS", str(max(1, cores // args.num_proc)))
    workers = []
    for rank in range(args.num_proc):
        env = dict(base, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(args.num_proc))
        workers.append(env)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        base.pop(name, None)
    return workers, base


class _Interrupted(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _on_signal(number: int, frame: FrameType | None) -> None:
    raise _Interrupted(number)


def _find_stopped(job: _Job, patience_s: float, failover: bool) -> _Process | None:
    """A process that has stood still for too long. Nobody else would miss it: the job has ended for the others."""
    now = time.monotonic()
    for process in job.running():
        if process.note_stopped(now) > patience_s and not (failover and process.is_server):
            return process
    return None


def _dead_after_s(env: Mapping[str, str]) -> float:
    try:
        return float(env.get("HERRING_DEAD_AFTER_S", DEAD_AFTER_S))
    except ValueError:
        return DEAD_AFTER_S  # The workers say that it is bad.


@dataclass
class _Policy:
    """What the job can do without, and who is started again."""

    failover: bool
    elastic: bool
    min_workers: int
    restart_workers: int
    restart_servers: int
    commands: dict[str, tuple[list[str], dict[str, str]]]  # By name: how it was started.
    finished: int = 0  # Workers that ended well.

    def note(self, process: _Process) -> None:
        """It has ended."""
        if process.is_worker and process.code == 0:
            self.finished += 1

    def may_go_on(self, process: _Process, running: list[_Process]) -> str:
        """With whom the workers can do without it; empty where they cannot."""
        if process.is_worker and self.elastic:
            left = sum(other.is_worker for other in running)
            # Where some have finished, who is left goes on by itself.
            if self.finished or left >= self.min_workers:
                return f"the other {left} workers" if left else "nobody: the others have finished"
        if process.is_server and (self.failover or self.restart_servers or self.elastic):
            if not running or any(other.is_server for other in running):
                return "the other servers" if self.failover else "servers that come back"
            if self.elastic or self.restart_servers:
                return "servers inside the workers" if self.elastic else ""
        return ""

    def takes_back(self, process: _Process, running: list[_Process]) -> bool:
        """Whether to start it again; counts."""
        if not any(other.is_worker for other in running):
            return False
        if process.is_server and self.restart_servers > 0:
            self.restart_servers -= 1
            return True
        if process.is_worker and self.elastic and self.restart_workers > 0 and not self.finished:
            self.restart_workers -= 1
            return True
        return False


def _kill_stopped(job: _Job, dead_after_s: float) -> None:
    """An elastic job goes on without a worker that stands still; it may be started again, but never go on itself."""
    now = time.monotonic()
    for process in job.running():
        if process.is_worker and process.note_stopped(now) > dead_after_s:
            print(f"herringrun: {process.name} has been stopped (SIGSTOP) for {dead_after_s:g} s", file=sys.stderr)
            process.popen.kill()


def _report_stopped(job: _Job, dead_after_s: float, failover: bool) -> bool:
    """True where a process stood still while others had finished: the job is ended."""
    stopped = _find_stopped(job, dead_after_s, failover)
    if stopped is None:
        return False
    print(
        f"herringrun: {stopped.name} has been stopped (SIGSTOP) for {dead_after_s:g} s while others have finished; "
        "ending the job",
        file=sys.stderr,
    )
    job.stop()
    job.drain_output()
    return True


def _goes_on(job: _Job, process: _Process, policy: _Policy) -> bool:
    """Whether the job goes on though this process failed; starts it again where that is wanted."""
    how = _how_it_ended(process.code or 0)
    running = job.running()
    whom = policy.may_go_on(process, running)
    if not whom:
        return False
    again = policy.takes_back(process, running)
    more = "; it is started again" if again else ""
    print(f"herringrun: {process.name} {how}; the job goes on with {whom}{more}", file=sys.stderr)
    if again:
        job.start(process.name, *policy.commands[process.name])
    return True


def _watch(job: _Job, dead_after_s: float, policy: _Policy) -> int:
    """Until all are gone; ends the job when one fails that is needed. Returns the exit code."""
    failed: _Process | None = None
    give_up = float("inf")
    some_have_finished, next_look = False, 0.0
    while job.running():
        if (some_have_finished or policy.elastic) and failed is None and time.monotonic() >= next_look:
            next_look = time.monotonic() + STOPPED_CHECK_S
            if policy.elastic:
                _kill_stopped(job, dead_after_s)
            elif _report_stopped(job, dead_after_s, policy.failover):
                return 1
        for process in job.poll(0.05):
            some_have_finished = True
            policy.note(process)
            if process.code == 0 or failed is not None or _goes_on(job, process, policy):
                continue
            failed = process
            give_up = time.monotonic() + FAILURE_GRACE_S
            print(f"herringrun: {process.name} {_how_it_ended(process.code or 0)}; ending the job", file=sys.stderr)
        if give_up == float("inf") and not any(process.is_worker for process in job.running()):
            # Servers leave when the last worker has; one that is stopped never would.
            give_up = time.monotonic() + FAILURE_GRACE_S
        if time.monotonic() > give_up and job.running():
            names = ", ".join(process.name for process in job.running())
            print(f"herringrun: stopping {names}", file=sys.stderr)
            job.stop()
    job.drain_output()
    return 0 if failed is None else _exit_code(failed.code or 0)


def _commands(
    args: argparse.Namespace, extra: dict[str, str], command: list[str]
) -> dict[str, tuple[list[str], dict[str, str]]]:
    """How each process is started, by its name, in order."""
    worker_envs, server_env = _environments(args, extra)
    herring = [sys.executable, "-m", "herring._cli"]
    commands: dict[str, tuple[list[str], dict[str, str]]] = {}
    if _has_rendezvous(args):
        sizes = ["--workers", str(args.num_proc), "--servers", str(args.servers)]
        least = ["--min-workers", str(args.min_workers)]
        commands["rendezvous"] = ([*herring, "rendezvous", *sizes, *least], server_env)
    for rank, env in enumerate(worker_envs):
        commands[f"rank {rank}"] = (command, env)
    for index in range(args.servers):
        commands[f"server {index}"] = ([*herring, "server", "--rank", str(index)], server_env)
    return commands


def _run(args: argparse.Namespace, extra: dict[str, str], command: list[str]) -> int:
    job = _Job(args.tag_output, args.verbose)
    commands = _commands(args, extra, command)
    try:
        for name, (arguments, env) in commands.items():
            job.start(name, arguments, env)
        env = next(iter(commands.values()))[1]
        policy = _Policy(
            failover=args.servers > 1 and env.get("HERRING_FAILOVER", "auto").lower() != "off",
            elastic=args.elastic,
            min_workers=args.min_workers,
            restart_workers=args.restart_workers,
            restart_servers=args.restart_servers,
            commands=commands,
        )
        return _watch(job, _dead_after_s(env), policy)
    except _Interrupted as interrupted:
        print(f"herringrun: {signal.Signals(interrupted.number).name}: stopping the job", file=sys.stderr)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        job.stop(interrupted.number)
        return 128 + interrupted.number
    finally:
        job.send_signal(signal.SIGKILL)


def _problem_of(args: argparse.Namespace) -> str:
    """What is wrong with the numbers; empty for nothing."""
    if args.num_proc < 1:
        return f"-np {args.num_proc}: at least one worker is needed"
    for name in ("servers", "restart_servers", "restart_workers"):
        if getattr(args, name) < 0:
            return f"--{name.replace('_', '-')} {getattr(args, name)}: a number, 0 or more"
    if not 1 <= args.min_workers <= args.num_proc:
        return f"--min-workers {args.min_workers}: from 1 to -np ({args.num_proc})"
    if args.restart_workers and not args.elastic:
        return "--restart-workers: only with --elastic; else a worker's death ends the job"
    return ""


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``herringrun``. Returns the exit code: that of the first process that failed, else 0."""
    parser = _parser()
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    problem = _problem_of(args)
    if problem:
        return _fail(problem)
    if not command:
        return _fail("no program to run; for example: herringrun -np 2 python train.py")
    if shutil.which(command[0]) is None:
        return _fail(f"there is no program {command[0]!r} (not a file that can be run, and not on PATH)")
    extra = {}
    for setting in args.env:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            return _fail(f"--env {setting}: takes NAME=VALUE")
        extra[name] = value
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    return _run(args, extra, command)


if __name__ == "__main__":
    sys.exit(main())
