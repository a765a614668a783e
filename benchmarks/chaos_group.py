"""A round of chaos.py in which one rank gives up a group of some ranks: the others of it hear who, the job goes on."""

from __future__ import annotations

import re
import secrets
import signal
import sys
import time
from pathlib import Path

from chaos_plan import Plan
from chaos_round import SLACK_S, START_S, Job, Verdict
from chaos_site import Site

WORKER = Path(__file__).with_name("chaos_group_worker.py")
MOST_S = 40.0  # For the steps, on a busy machine, and for three imports of torch.
TOLD = re.compile(r"aborted the group|has left the group")


class GroupJob(Job):
    """Its workers use torch's groups."""

    def _worker_command(self) -> list[str]:
        plan, end = self.plan, self.plan.group_end
        assert end is not None
        ranks = ",".join(map(str, end.members))
        return [sys.executable, str(WORKER), str(plan.steps), ranks, str(end.culprit), end.how, str(end.step)]


class GroupRound:
    """Runs a plan and says what was wrong."""

    def __init__(self, plan: Plan, site: Site, port: int, margin_s: float) -> None:
        self.plan, self.site, self.port, self.margin_s = plan, site, port, margin_s
        self.verdict = Verdict(plan.name, plan.summary())

    def run(self) -> Verdict:
        began = time.monotonic()
        job = GroupJob(self.plan, self.site, secrets.token_hex(8), self.port)
        try:
            everybody = set(range(self.plan.processes()))
            limit = time.monotonic() + self.plan.join_timeout_s + START_S + MOST_S + self.margin_s
            if not job.wait_for(lambda: job.has_ended(everybody), limit):
                for index in job.running():
                    job.signal(index, signal.SIGUSR1)  # Its threads' stacks go to stderr.
                time.sleep(0.5)
                names = ", ".join(self.plan.name_of(index) for index in sorted(job.running()))
                self.verdict.problems.append(f"hang: {names} did not end")
            self._judge(job)
        finally:
            job.finish()
        self.verdict.seconds = time.monotonic() - began
        if self.verdict.problems:
            self.verdict.output = job.output()
        return self.verdict

    def _judge(self, job: Job) -> None:
        problems, end = self.verdict.problems, self.plan.group_end
        assert end is not None
        told = 0
        for index in range(self.plan.processes()):
            heard, name = job.heard[index], self.plan.name_of(index)
            if heard.find("wrong"):
                problems.append(f"wrong sum: {name}: {heard.find('wrong')}")
            elif job.code_of(index) != 0 or (index < self.plan.workers and not heard.find("done")):
                problems.append(f"lost step: {name} ended with {job.code_of(index)}, though only a group was given up")
            if index not in end.members or index == end.culprit:
                continue
            error = heard.find("group error")
            if error is None:
                problems.append(f"status: {name} was not told that its group is gone")
                continue
            told += 1
            self.verdict.detections.append((f"group {end.how}", self.plan.dead_after_s, error["seconds"]))
            if not TOLD.search(error["text"]) or str(end.culprit) not in error["text"]:
                problems.append(f"unnamed: {name} does not say that worker {end.culprit} gave it up: {error['text']}")
            if error["seconds"] > self.plan.dead_after_s + SLACK_S:
                problems.append(f"slow: {name} knew after {error['seconds']:.2f} s")
        self.verdict.outcome = f"{told} of the group were told, the job went on"
