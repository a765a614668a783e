"""A round of chaos.py in which two jobs start on one port: no sum may have numbers of both."""

from __future__ import annotations

import re
import secrets
import time

from chaos_plan import Plan
from chaos_round import START_S, Job, Verdict
from chaos_site import Site

PAUSE_S = 0.15  # From one start to the next: longer and shorter than it takes a process to join.


class TwinRound:
    """Starts the processes of two jobs in the plan's order and says what was wrong."""

    def __init__(self, plan: Plan, site: Site, port: int, margin_s: float) -> None:
        self.plan, self.site, self.port, self.margin_s = plan, site, port, margin_s
        self.verdict = Verdict(plan.name, plan.summary())

    def run(self) -> Verdict:
        began = time.monotonic()
        token = secrets.token_hex(8)
        jobs = [Job(self.plan, self.site, token, self.port, number) for number in range(2)]
        try:
            for number, index in self.plan.twin:
                jobs[number].start(index)
                time.sleep(PAUSE_S)
                if index == 0:  # A busy host starts processes in another order than they were asked for.
                    self._await_worker_0(jobs[number])
            limit = time.monotonic() + self.plan.join_timeout_s + START_S + self.margin_s
            for number, job in enumerate(jobs):
                everybody = set(range(self.plan.processes()))
                if not job.wait_for(lambda job=job, everybody=everybody: job.has_ended(everybody), limit):
                    names = ", ".join(self.plan.name_of(index) for index in sorted(job.running()))
                    self.verdict.problems.append(f"hang: {names} of job {number} did not end")
            for number, job in enumerate(jobs):
                self._judge(number, job)
        finally:
            for job in jobs:
                job.finish()
        self.verdict.outcome = f"{sum(self._done(job) for job in jobs)} workers of both had their sums"
        self.verdict.seconds = time.monotonic() - began
        if self.verdict.problems:
            self.verdict.output = "\n".join(f"=== job {n}\n{job.output()}" for n, job in enumerate(jobs))
        return self.verdict

    def _await_worker_0(self, job: Job) -> None:
        """Until both have come nobody can know that there are two jobs (docs/reliability.md)."""
        limit = time.monotonic() + START_S
        job.wait_for(lambda: job.heard[0].find("connect") is not None or job.has_ended({0}), limit)

    def _done(self, job: Job) -> int:
        return sum(job.heard[rank].find("done") is not None for rank in range(self.plan.workers))

    def _judge(self, number: int, job: Job) -> None:
        problems = self.verdict.problems
        for index in range(self.plan.processes()):
            heard, name = job.heard[index], f"{self.plan.name_of(index)} of job {number}"
            if heard.find("wrong"):
                problems.append(f"wrong sum: {name}: {heard.find('wrong')}")
            code = job.code_of(index)
            if index < self.plan.workers and not heard.find("done") and code == 0:
                problems.append(f"status: {name} has no sums, and exit status 0")
        if self._done(job) not in (0, self.plan.workers):
            problems.append(f"wrong sum: {self._done(job)} of {self.plan.workers} workers of job {number} had sums")
        first = str((job.heard[0].find("error") or {}).get("text", ""))
        if first and not re.search("another job|two processes claim the same rank", first):
            problems.append(f"unnamed: worker 0 of job {number} does not say that another job is there: {first}")
