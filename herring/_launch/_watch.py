"""What becomes of a job when one of its processes ends, fails or stands still."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from herring._errors import SERVER_LOST_PEER
from herring._launch._commands import Command
from herring._launch._job import Member

__all__ = ["Policy", "dead_after_s", "watch"]

# After a rank has failed, the others get this long to notice by themselves and print their own errors.
FAILURE_GRACE_S = 10.0
# A server often ends before the rank that it ended for. So long it is not called the first that failed.
_EFFECT_GRACE_S = 3.0
# How often processes are looked at, whether they stand still (SIGSTOP, a debugger).
_STOPPED_CHECK_S = 0.5
_DEAD_AFTER_S = 5.0
_TURN_S = 0.05
# What is left of an elastic job's other workers.
_LAST = ("no other worker: the others have finished", "the other worker")


def dead_after_s(env: Mapping[str, str]) -> float:
    """How long the job waits for who stands still."""
    try:
        return float(env.get("HERRING_DEAD_AFTER_S", _DEAD_AFTER_S))
    except ValueError:
        return _DEAD_AFTER_S  # The workers say that it is bad.


class Supervised(Protocol):
    """What is asked of a job, on this machine or over several (Job, HostsJob)."""

    def say(self, text: str) -> None: ...
    def start(self, name: str, command: Command) -> Any: ...
    def may_start(self, name: str) -> bool: ...
    def running(self) -> Sequence[Member]: ...
    def forward(self) -> None: ...
    def poll(self, seconds: float) -> Sequence[Member]: ...
    def bury(self, process: Any) -> None: ...
    def stop(self, first: int = ...) -> None: ...
    def leave(self) -> None: ...
    def finish_output(self, reader_limit_s: float) -> None: ...


@dataclass
class Policy:
    """What the job can do without, and who is started again."""

    failover: bool
    elastic: bool
    min_workers: int
    restart_workers: int
    restart_servers: int
    dead_after_s: float
    commands: dict[str, Command]  # By name: how it was started.
    most_losses: int | None = None  # So many workers may be lost, in all.
    finished: int = 0  # Workers that ended well.
    losses: int = 0
    ends_with_workers: bool = True  # All the job's workers are here: servers end soon after them.

    def note(self, process: Member) -> None:
        """It has ended."""
        if process.is_worker and process.code == 0:
            self.finished += 1

    def may_go_on(self, process: Member, running: Sequence[Member]) -> str:
        """With whom the workers can do without it; empty where they cannot."""
        if process.is_worker and self.elastic:
            left = sum(other.is_worker for other in running)
            self.losses += 1
            if self.most_losses is not None and self.losses > self.most_losses:
                return ""
            # Where some have finished, who is left goes on by itself.
            if self.finished or left >= self.min_workers:
                return f"the other {left} workers" if left > 1 else _LAST[left]
        if process.is_server and (self.failover or self.restart_servers or self.elastic):
            if not running or any(other.is_server for other in running):
                return "the other servers" if self.failover else "restarted servers"
            if self.elastic or self.restart_servers:
                return "servers inside the workers" if self.elastic else ""
        return ""

    def takes_back(self, process: Member, running: Sequence[Member]) -> bool:
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


def _look_at_stopped(job: Supervised, policy: Policy, some_have_finished: bool) -> bool:
    """Who stands still is named, in an elastic job ended. True where the job must end: nobody would miss the process
    any more, as it has ended for the others."""
    now = time.monotonic()
    long = [process for process in job.running() if process.note_stopped(now) > policy.dead_after_s]
    if policy.elastic:
        for process in long:
            if process.is_worker:
                job.say(f"{process.name} has been stopped (SIGSTOP) for {policy.dead_after_s:g} s")
                job.bury(process)
    elif some_have_finished:
        for process in long:
            if not (policy.failover and process.is_server):
                job.say(
                    f"{process.name} has been stopped (SIGSTOP) for {policy.dead_after_s:g} s while others have "
                    "finished; ending the job"
                )
                return True
    new = [process for process in long if not process.stop_is_said]
    if new and not policy.elastic:
        for process in new:
            process.stop_is_said = True
        names = _names(new)
        has = "have" if len(new) > 1 else "has"
        job.say(
            f"{names} {has} been stopped (SIGSTOP, SIGTSTP or a debugger) for {policy.dead_after_s:g} s; "
            f"to go on: {_resume_command(new)}"
        )
    return False


def _resume_command(processes: Sequence[Member]) -> str:
    pids: dict[str, list[str]] = {}
    for process in processes:
        pids.setdefault(process.place, []).append(str(process.pid))
    return ", ".join(f"kill -CONT {' '.join(each)}{place}" for place, each in pids.items())


def _names(processes: Sequence[Member]) -> str:
    return ", ".join(process.name for process in processes)


def _goes_on(job: Supervised, process: Member, policy: Policy) -> bool:
    """Whether the job goes on though this process failed; starts it again where that is wanted."""
    how = process.how
    running = job.running()
    whom = policy.may_go_on(process, running)
    if not whom:
        return False
    job.bury(process)
    again = job.may_start(process.name) and policy.takes_back(process, running)
    more = f"; restarting {process.name}" if again else ""
    job.say(f"{process.name} {how}; the job goes on with {whom}{more}")
    if again:
        job.start(process.name, policy.commands[process.name])
    return True


class _Effects:
    """Servers that have ended because of another process: that one may end later than they do."""

    def __init__(self, job: Supervised) -> None:
        self._job = job
        self._waiting: list[tuple[float, Member]] = []

    def keeps(self, process: Member) -> bool:
        """Whether it is one of them."""
        is_one = process.is_server and process.code == SERVER_LOST_PEER
        if is_one:
            self._waiting.append((time.monotonic() + _EFFECT_GRACE_S, process))
        return is_one

    def take_due(self) -> list[Member]:
        """Those that have waited long enough, or for whom nobody is left to wait for."""
        is_over = not any(other.is_worker for other in self._job.running())
        due = [process for when, process in self._waiting if is_over or time.monotonic() > when]
        self._waiting = [one for one in self._waiting if one[1] not in due]
        return due


def watch(job: Supervised, policy: Policy) -> int:
    """Until all are gone; ends the job when one fails that is needed. Returns the exit code: 128 + signal where the
    first that failed was killed."""
    failed: Member | None = None
    effects = _Effects(job)
    give_up = float("inf")
    some_have_finished, next_look = False, 0.0
    while job.running():
        if failed is None and time.monotonic() >= next_look:
            next_look = time.monotonic() + _STOPPED_CHECK_S
            if _look_at_stopped(job, policy, some_have_finished):
                job.stop()
                return 1
        ended = []
        for process in job.poll(_TURN_S):
            some_have_finished = some_have_finished or process.code == 0
            policy.note(process)
            if process.code != 0 and not effects.keeps(process):
                ended.append(process)
        for process in ended + effects.take_due():
            if failed is not None or _goes_on(job, process, policy):
                continue
            failed = process
            give_up = time.monotonic() + FAILURE_GRACE_S
            job.say(f"{process.name} {process.how}; ending the job")
        no_worker = policy.ends_with_workers and not any(process.is_worker for process in job.running())
        if give_up == float("inf") and no_worker:
            # Servers leave when the last worker has; one that is stopped never would.
            give_up = time.monotonic() + FAILURE_GRACE_S
        if time.monotonic() > give_up and job.running():
            job.say(f"stopping {_names(job.running())}")
            job.stop()
    job.leave()
    code = 0 if failed is None else failed.code or 0
    return code if code >= 0 else 128 - code
