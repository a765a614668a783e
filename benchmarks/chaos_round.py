"""One round of chaos.py on real processes: starts the job, strikes, waits, and judges how everybody ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_plan import LASTING, LAUNCHER, PASSING_SHARE, Plan, Strike
from chaos_site import ROUND_MARK, Site, marked_processes
from chaos_worker import MARK

WORKER = Path(__file__).with_name("chaos_worker.py")
# What a loaded machine may take for starting, for noticing beside the silence, and for ending after an error.
START_S = 20.0
SLACK_S = 1.0
MOST_READING_S = 2.0  # For what a process said before it exited.
HUB_GRACE_S = 2.0  # Worker 0 waits so long at the end of a failed start, so that the others hear who was missing.
LAUNCHER_GRACE_S = 16.0
GOING_ON_S = 10.0  # For the rest of the steps, where the job goes on without the lost.


@dataclass
class Process:
    """A process of the job, followed by two reader threads. Times are time.monotonic()."""

    index: int
    popen: subprocess.Popen[bytes]
    began: float
    exited: float | None = None
    has_ended: bool = False  # It has exited, and all that it said has been read.
    readers: list[threading.Thread] = field(default_factory=list)


@dataclass
class Heard:
    """What one process said: the worker's own reports, and its stderr."""

    events: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    first_error_at: float | None = None

    def find(self, what: str, step: int | None = None) -> dict[str, Any] | None:
        for event in self.events:
            if event["what"] == what and (step is None or event["step"] >= step):
                return event
        return None


@dataclass
class Verdict:
    """How a round came out. `problems` is empty where Herring kept its word."""

    name: str
    summary: str
    outcome: str = ""
    problems: list[str] = field(default_factory=list)
    detections: list[tuple[str, float, float]] = field(default_factory=list)  # (kind, dead_after_s, seconds)
    seconds: float = 0.0
    output: str = ""


TAG = re.compile(r"^\[(rank|server) (\d+)\] ")
NEVER_JOINED = re.compile("gave up joining|found no hub|did not admit this worker|did not begin in time")
SERVER_ERROR = re.compile(r"herring server( \d+)?: (?!\d+ operations?\b)")


class Job:
    """The processes of one start of the job."""

    def __init__(self, plan: Plan, site: Site, token: str, port: int, number: int = 0) -> None:
        """`number`: which of two jobs side by side; their processes are started one by one, by start()."""
        self.plan, self.site = plan, site
        self.heard = {index: Heard() for index in (LAUNCHER, *range(plan.processes()))}
        self.processes: list[Process] = []
        self.pids: dict[int, int] = {}
        self._changed = threading.Condition()
        self._env = self._environment(token, port)
        if plan.launcher:
            self._start(LAUNCHER, 0, [*self._launch_command(), *self._worker_command()], self._env)
        elif plan.twin:
            # What keeps apart jobs that have a secret is no question here.
            self._env.pop("HERRING_SECRET")
            self._env["CHAOS_JOB"] = str(number)
        else:
            for index in range(plan.processes()):
                self.start(index)

    def start(self, index: int) -> None:
        """One process of a job that no launcher starts."""
        plan, env = self.plan, self._env
        if index >= plan.workers:
            command = [sys.executable, "-m", "herring._cli", "server", "--rank", str(index - plan.workers)]
            self._start(index, plan.hosts[index], command, env)
            return
        here = [i for i in range(plan.workers) if plan.hosts[i] == plan.hosts[index]]
        own = {"RANK": str(index), "LOCAL_RANK": str(here.index(index)), "LOCAL_WORLD_SIZE": str(len(here))}
        self._start(index, plan.hosts[index], self._worker_command(), {**env, **own})

    def _worker_command(self) -> list[str]:
        sizes = ",".join(map(str, self.plan.sizes))
        return [sys.executable, str(WORKER), str(self.plan.steps), sizes]

    def _launch_command(self) -> list[str]:
        sizes = ["-np", str(self.plan.workers), "--servers", str(self.plan.servers)]
        if self.plan.mode != "plain":
            sizes += ["--restart-servers", "3"]
        if self.plan.mode == "elastic":
            sizes.append("--elastic")
        return [sys.executable, "-m", "herring._launch", *sizes, "--tag-output", "--verbose", "--"]

    def _environment(self, token: str, port: int) -> dict[str, str]:
        plan = self.plan
        env = {name: value for name, value in os.environ.items() if not name.startswith("HERRING_")}
        env.update(
            MASTER_ADDR=self.site.address,
            MASTER_PORT=str(port),
            WORLD_SIZE=str(plan.workers),
            HERRING_SERVERS=str(plan.servers),
            HERRING_INTERFACE=self.site.interface,
            HERRING_INTRA_NODE=plan.intra_node,
            HERRING_DEAD_AFTER_S=str(plan.dead_after_s),
            HERRING_HEARTBEAT_S=str(plan.heartbeat_s),
            HERRING_JOIN_TIMEOUT_S=str(plan.join_timeout_s),
            HERRING_SECRET="chaos" + plan.name,
            HERRING_CHECKSUM="on" if plan.checksum else "off",
            HERRING_PROVIDER=plan.provider if self.site.has_libfabric else "auto",
            CHAOS_DEEDS=",".join(plan.deeds),
            OMP_NUM_THREADS="1",
            OPENBLAS_NUM_THREADS="1",
            PYTHONUNBUFFERED="1",
            **{ROUND_MARK: token},
        )
        if plan.strict and self.site.strict_library:
            env["LD_PRELOAD"] = str(self.site.strict_library)
        return env

    def _start(self, index: int, host: int, command: list[str], env: dict[str, str]) -> None:
        popen = subprocess.Popen(
            self.site.enter(host, command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        process = Process(index, popen, time.monotonic())
        self.processes.append(process)
        self.pids[index] = popen.pid
        for stream, is_error in ((popen.stdout, False), (popen.stderr, True)):
            reader = threading.Thread(target=self._read, args=(process, stream, is_error), daemon=True)
            process.readers.append(reader)
            reader.start()

    def _read(self, process: Process, stream: Any, is_error: bool) -> None:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\n")
            with self._changed:
                self._take(process.index, line, is_error)
                self._changed.notify_all()

    def _take(self, index: int, line: str, is_error: bool) -> None:
        tag = TAG.match(line)
        if tag:
            index = int(tag[2]) + (self.plan.workers if tag[1] == "server" else 0)
            line = line[tag.end() :]
        heard = self.heard[index]
        if line.startswith(MARK):
            event = json.loads(line.removeprefix(MARK))
            heard.events.append(event)
            self.pids[index] = event["pid"]
            if event["what"] == "error" and heard.first_error_at is None:
                heard.first_error_at = event["at"]
            return
        started = re.match(r"herringrun: (rank|server) (\d+) is process (\d+)", line)
        if started:
            self.pids[int(started[2]) + (self.plan.workers if started[1] == "server" else 0)] = int(started[3])
        if is_error and heard.first_error_at is None and SERVER_ERROR.match(line):
            heard.first_error_at = time.monotonic()
        heard.errors.append(line)

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """False at the deadline. Also looks at who has ended."""
        with self._changed:
            while not condition():
                if time.monotonic() > deadline:
                    return False
                self._changed.wait(0.02)
                self.look()
            return True

    def look(self) -> None:
        """Who has ended. A process's children may keep its pipes open."""
        for process in self.processes:
            if process.has_ended or process.popen.poll() is None:
                continue
            process.exited = process.exited or time.monotonic()
            is_read = not any(reader.is_alive() for reader in process.readers)
            process.has_ended = is_read or time.monotonic() > process.exited + MOST_READING_S

    def has_ended(self, indices: set[int]) -> bool:
        return all(process.has_ended for process in self.processes if process.index in indices)

    def last_step_at(self) -> float:
        """When a worker began its latest step; 0 before the first."""
        steps = (event["at"] for heard in self.heard.values() for event in heard.events if event["what"] == "step")
        return max(steps, default=0.0)

    def running(self) -> set[int]:
        self.look()
        return {process.index for process in self.processes if not process.has_ended}

    def code_of(self, index: int) -> int | None:
        return next(process.popen.returncode for process in self.processes if process.index == index)

    def signal(self, index: int, number: int) -> bool:
        """To that process alone. False where it is gone."""
        pid = self.pids.get(index)
        process = next((process for process in self.processes if process.index == index), None)
        if pid is None or (process is not None and process.popen.poll() is not None):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def finish(self) -> None:
        """Ends what still runs, and its readers."""
        for process in self.processes:
            if process.popen.poll() is None:
                for number in (signal.SIGCONT, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.popen.pid, number)
            process.popen.wait()
        deadline = time.monotonic() + MOST_READING_S
        for reader in (reader for process in self.processes for reader in process.readers):
            reader.join(max(deadline - time.monotonic(), 0.0))

    def output(self) -> str:
        lines = []
        for index, heard in self.heard.items():
            if not heard.events and not heard.errors:
                continue
            code = f" exit {self.code_of(index)}" if any(p.index == index for p in self.processes) else ""
            lines.append(f"--- {self.plan.name_of(index)}{code}")
            lines += [json.dumps(event) for event in heard.events[-6:]]
            lines += heard.errors[-25:]
        return "\n".join(lines)


class Round:
    """Runs a plan and says what was wrong."""

    def __init__(self, plan: Plan, site: Site, port: int, margin_s: float) -> None:
        self.plan, self.site, self.port, self.margin_s = plan, site, port, margin_s
        self.token = secrets.token_hex(8)
        self.verdict = Verdict(plan.name, plan.summary())
        self.struck: dict[int, str] = {}  # Process: kind, for what lasts.
        self.cut_hosts: set[int] = set()
        self.lost_ways: set[tuple[int, int]] = set()  # From host, to host.
        self.has_half = False  # There was one, healed by now or not.
        self.first_strike: float | None = None
        self.last_strike = 0.0
        self.had_started = False  # Everybody had joined before the first strike.
        self.victim_was_done: set[int] = set()

    def run(self) -> Verdict:
        began = time.monotonic()
        before = self.site.leftovers()
        job = Job(self.plan, self.site, self.token, self.port)
        try:
            for number, strike in enumerate(self.plan.strikes):
                self._strike(job, strike, number)
            self._await_survivors(job)
            self._heal()
            if self.plan.again and not self.plan.launcher:
                self._once_more()
            self._settle_stopped(job)
            self._judge(job)
        finally:
            self._heal()
            job.finish()
        self._look_for_remains(before)
        self.verdict.seconds = time.monotonic() - began
        if self.verdict.problems:
            self.verdict.output = job.output()
        return self.verdict

    def _heal(self) -> None:
        for host in self.cut_hosts:
            self.site.heal(host)
        for sender, receiver in self.lost_ways:
            self.site.find(sender, receiver)
        self.lost_ways.clear()

    # --- Striking ---

    def _strike(self, job: Job, strike: Strike, number: int) -> None:
        if number == 0 and not self._reach(job, strike):
            return
        time.sleep(strike.delay_s)
        if number == 0:
            self.had_started = all(job.heard[rank].find("connected") for rank in range(self.plan.workers))
        if strike.target != LAUNCHER and job.heard[strike.target].find("done"):
            return
        lasting = strike.kind in LASTING
        at = time.monotonic()
        if not self._hit(job, strike):
            return
        if not lasting:
            time.sleep(self.plan.dead_after_s * PASSING_SHARE)
            job.signal(strike.target, signal.SIGCONT)
            self.site.heal(self.plan.hosts[strike.target])
            return
        self.first_strike = at if self.first_strike is None else self.first_strike
        self.last_strike = time.monotonic()

    def _reach(self, job: Job, strike: Strike) -> bool:
        """Waits for the moment; servers and the launcher go by worker 0."""
        if strike.phase == "start" and not self.plan.launcher:
            return True
        teller = strike.target if 0 <= strike.target < self.plan.workers else 0
        step = strike.step if strike.phase == "step" else None

        def reached() -> bool:
            return job.heard[teller].find(strike.phase, step) is not None

        deadline = time.monotonic() + START_S
        return job.wait_for(lambda: reached() or not job.running(), deadline) and reached()

    def _hit(self, job: Job, strike: Strike) -> bool:
        if strike.kind in ("cut", "flap"):
            host = self.plan.hosts[strike.target]
            self.site.cut(host)
            if strike.kind == "cut":
                self.cut_hosts.add(host)
                for index, where in enumerate(self.plan.hosts):
                    if where == host:
                        self._cut_off(index)
            return True
        if strike.kind == "half":
            way = (self.plan.hosts[strike.target], self.plan.hosts[strike.other])
            self.site.lose(*way)
            self.lost_ways.add(way)
            self.has_half = True
            for index, where in enumerate(self.plan.hosts):
                if where in way:
                    self.struck.setdefault(index, "half")
            return True
        number = signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP
        if not job.signal(strike.target, number):
            return False
        if strike.kind in LASTING:
            self.struck[strike.target] = strike.kind
        return True

    def _cut_off(self, index: int) -> None:
        """It hears of nobody any more, whatever befell its links before; but who does not run stays so."""
        if self.struck.get(index, "half") == "half":
            self.struck[index] = "cut"

    # --- Waiting ---

    def _silence_s(self) -> float:
        """A process's silence is known to the hub; a link's, whose ends live, only to those who wait for it."""
        return self.plan.dead_after_s * (2 if self.has_half else 1)

    def _start_limit_s(self) -> float:
        return self.plan.join_timeout_s + START_S + self.margin_s

    def _limit(self) -> float:
        """By when everybody must have ended."""
        if self.first_strike is None:
            return time.monotonic() + self._start_limit_s()
        wait = self._silence_s() if self.had_started else self.plan.join_timeout_s
        grace = LAUNCHER_GRACE_S if self.plan.launcher and LAUNCHER not in self.struck else 0.0
        grace += GOING_ON_S if self.plan.mode != "plain" else 0.0
        return self.last_strike + wait + self.margin_s + grace

    def _await_survivors(self, job: Job) -> None:
        waited = {process.index for process in job.processes}
        if not self.plan.launcher:
            waited -= {index for index, kind in self.struck.items() if kind == "stop"}
        hanging = set() if self._all_end(job, waited, self._limit()) else waited & job.running()
        if not hanging:
            return
        for index in hanging:
            job.signal(index, signal.SIGUSR1)  # Its threads' stacks go to stderr.
        time.sleep(0.5)
        names = ", ".join(self.plan.name_of(index) for index in sorted(hanging))
        self.verdict.problems.append(f"hang: {names} did not end")

    def _all_end(self, job: Job, waited: set[int], limit: float) -> bool:
        while not job.wait_for(lambda: job.has_ended(waited), limit):
            # Who still takes steps does not hang: a busy machine is slow.
            limit = job.last_step_at() + self._silence_s() + self.margin_s
            if limit <= time.monotonic():
                return False
        return True

    def _once_more(self) -> None:
        job = Job(self.plan, self.site, self.token, self.port)
        try:
            everybody = {process.index for process in job.processes}
            ended = self._all_end(job, everybody, time.monotonic() + self._start_limit_s())
            codes = {self.plan.name_of(index): job.code_of(index) for index in everybody}
            if not ended or any(codes.values()):
                self.verdict.problems.append(f"again: the job that was started next ended with {codes}\n{job.output()}")
        finally:
            job.finish()

    def _settle_stopped(self, job: Job) -> None:
        stopped = {index for index, kind in self.struck.items() if kind == "stop"} & job.running()
        if not stopped:
            return
        if not self.plan.resume:
            for index in stopped:
                job.signal(index, signal.SIGKILL)
            return
        for index in stopped:
            job.signal(index, signal.SIGCONT)
        limit = time.monotonic() + self.plan.join_timeout_s + self.margin_s
        if not job.wait_for(lambda: job.has_ended(stopped), limit):
            for index in stopped & job.running():
                job.signal(index, signal.SIGUSR1)
            time.sleep(0.5)
            names = ", ".join(self.plan.name_of(index) for index in sorted(stopped & job.running()))
            self.verdict.problems.append(f"hang: {names} did not end after it was resumed")

    # --- Judging ---

    def _judge(self, job: Job) -> None:
        problems = self.verdict.problems
        for index in range(self.plan.processes()):
            if job.heard[index].find("wrong"):
                problems.append(f"wrong sum: {self.plan.name_of(index)}: {job.heard[index].find('wrong')}")
        if self.first_strike is None:
            self._judge_unharmed(job)
            return
        if LAUNCHER in self.struck:
            self.verdict.outcome = "the launcher's death ended all"
            return
        if self._must_go_on():
            self._judge_going_on(job)
            return
        if self.plan.launcher and job.code_of(LAUNCHER) == 0 and not self._all_done(job):
            problems.append("status: herringrun ended with 0")
        failed = 0
        for index in range(self.plan.processes()):
            if self.struck.get(index) in ("kill", "stop"):
                continue
            failed += self._judge_survivor(job, index)
        self.verdict.outcome = f"{failed} of {self.plan.processes()} processes raised"

    def _all_done(self, job: Job) -> bool:
        """An elastic job that was struck while some were still connecting may have gone on without the lost."""
        lost = self.struck if self.plan.mode == "elastic" else {}
        return all(job.heard[rank].find("shutdown") for rank in range(self.plan.workers) if rank not in lost)

    def _judge_unharmed(self, job: Job) -> None:
        self.verdict.outcome = "nothing lasting happened; all went on"
        codes = {self.plan.name_of(p.index): p.popen.returncode for p in job.processes}
        if any(codes.values()):
            self.verdict.problems.append(f"false alarm: exit codes {codes}")

    def _must_go_on(self) -> bool:
        """No step may be lost: workers are left in an elastic job; else, one of two server processes."""
        if self.has_half:
            return False  # Either end may be the one that is given up: judged by what everybody came to.
        workers = [index for index in self.struck if index < self.plan.workers]
        servers = [index for index in self.struck if index >= self.plan.workers]
        one_is_left = self.plan.servers - len(servers) >= 1 and self.plan.servers >= 2
        if not self.had_started or (servers and not one_is_left):
            return False
        return len(workers) < self.plan.workers if self.plan.mode == "elastic" else not workers

    def _judge_going_on(self, job: Job) -> None:
        left = [rank for rank in range(self.plan.workers) if rank not in self.struck]
        sums: dict[int, Any] = {}
        for rank in left:
            done, error = job.heard[rank].find("done"), job.heard[rank].find("error")
            if error or not done:
                text = error["text"] if error else "it did not say that it was done"
                self.verdict.problems.append(f"lost step: {self.plan.name_of(rank)}: {text}")
            else:
                sums[rank] = done["sums"]
                if len(sums[rank]) != self.plan.steps * len(self.plan.sizes):
                    self.verdict.problems.append(f"lost step: {self.plan.name_of(rank)} had {len(sums[rank])} sums")
        if any(own != next(iter(sums.values())) for own in sums.values()):
            self.verdict.problems.append(f"wrong sum: the survivors had different contributors: {sums}")
        code = job.code_of(LAUNCHER) if self.plan.launcher else 0
        if code != 0:
            self.verdict.problems.append(f"status: herringrun ended with {code}, though the job went on to its end")
        self.verdict.outcome = f"all {len(left)} workers left had all sums"

    def _judge_survivor(self, job: Job, index: int) -> int:
        """1 where it raised an error, 0 where it had all its sums."""
        heard, name = job.heard[index], self.plan.name_of(index)
        code = job.code_of(index) if not self.plan.launcher else None
        is_worker = index < self.plan.workers
        text = "\n".join([str((heard.find("error") or {}).get("text", "")), *heard.errors])
        if heard.first_error_at is None:
            done = heard.find("done") if is_worker else not any(line.startswith("Traceback") for line in heard.errors)
            # Under the launcher those who wait for a process that never came are ended by it.
            ended_by_launcher = self.plan.launcher and not self.had_started
            if code not in (0, None) or (not done and not ended_by_launcher):
                self.verdict.problems.append(f"status: {name} ended with {code}, without an error of Herring's")
            return 0
        if self.plan.launcher and not self.had_started and "stopped by a signal" in text:
            return 0  # As above; it could say so.
        if code == 0:
            self.verdict.problems.append(f"status: {name} had an error but exit status 0")
        # Who is cut off itself may find its own network gone first.
        if self.struck.get(index) != "cut" and not any(self._is_named(other, text) for other in self.struck):
            self.verdict.problems.append(f"unnamed: {name} does not say that {self._names()} was lost")
        if self.first_strike is not None:
            self._note_detection(heard, index, text)
        return 1

    def _is_named(self, index: int, text: str) -> bool:
        return bool(re.search(rf"\b{self.plan.name_of(index)}\b", text)) or self._is_listed(index, text)

    def _is_listed(self, index: int, text: str) -> bool:
        """ "waiting for workers 1, 3": as the hub lists who is missing."""
        role, rank = self.plan.name_of(index).split()
        listed = re.search(rf"{role}s ([\d, -]+)", text)
        ranges = [part.split("-") for part in listed[1].replace(" ", "").split(",") if part] if listed else []
        return any(int(bounds[0]) <= int(rank) <= int(bounds[-1]) for bounds in ranges)

    def _names(self) -> str:
        return " or ".join(self.plan.name_of(index) for index in sorted(self.struck))

    def _note_detection(self, heard: Heard, index: int, text: str) -> None:
        """Who has joined is missed after dead_after; of who never came nobody knows before the join's timeout."""
        strike, error_at = self.first_strike or 0.0, heard.first_error_at or 0.0
        seconds = error_at - strike
        kind = "/".join(sorted(set(self.struck.values())))
        never_joined = bool(NEVER_JOINED.search(text))
        if not self.had_started:
            kind += " before it had joined" if never_joined else " while joining or connecting"
        self.verdict.detections.append((kind, self.plan.dead_after_s, seconds))
        allowed = self._silence_s()
        if never_joined:  # Its time runs from when it began to join.
            began = (heard.find("connect") or {"at": strike})["at"]
            allowed = self.plan.join_timeout_s + HUB_GRACE_S + max(began - strike, 0.0)
        late_second = max(self.last_strike - strike, 0.0)
        if seconds > allowed + late_second + SLACK_S:
            name = self.plan.name_of(index)
            self.verdict.problems.append(f"slow: {name} knew after {seconds:.2f} s, {allowed:g} s were promised")

    def _look_for_remains(self, before: set[str]) -> None:
        deadline = time.monotonic() + 2.0
        while (orphans := marked_processes(self.token)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in orphans:
            with contextlib.suppress(OSError):
                command = Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                self.verdict.problems.append(f"orphan: process {pid} ({command.strip()}) was left behind")
                os.kill(pid, signal.SIGKILL)
        left = self.site.leftovers() - before
        if left:
            self.verdict.problems.append(f"leftover: {', '.join(sorted(left))}")
