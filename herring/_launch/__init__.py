"""``herringrun``: starts the workers and servers of a job on this machine and looks after them."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys

from herring._errors import HerringError
from herring._launch._commands import Command, commands_of
from herring._launch._job import Interrupted, Job, StartError
from herring._launch._keeper import Control, run
from herring._launch._options import parse, problem_of, program_problem, settings_of
from herring._launch._output import Outputs
from herring._launch._watch import Policy, dead_after_s, watch

__all__ = ["main"]

# After Ctrl-C: for a reader of stdout that does not read.
READER_S = 1.0


def _policy(args: argparse.Namespace, commands: dict[str, Command]) -> Policy:
    env = next(iter(commands.values())).environment
    return Policy(
        failover=args.servers > 1 and env.get("HERRING_FAILOVER", "auto").lower() != "off",
        elastic=args.elastic,
        min_workers=args.min_workers,
        restart_workers=args.restart_workers,
        restart_servers=args.restart_servers,
        dead_after_s=dead_after_s(env),
        commands=commands,
    )


def _run_job(job: Job, policy: Policy) -> int:
    """The exit code; negative: by that signal."""
    try:
        for name, command in policy.commands.items():
            job.start(name, command)
            job.forward()
        return watch(job, policy)
    except StartError as error:
        job.say(str(error))
        job.stop()
        return error.code
    except Interrupted as interrupted:
        again = "; a second Ctrl-C kills it at once" if interrupted.number == signal.SIGINT else ""
        job.say(f"{signal.Signals(interrupted.number).name}: stopping the job{again}")
        job.stop(interrupted.number)
        return -interrupted.number


def _keep(args: argparse.Namespace, commands: dict[str, Command], control: Control) -> int:
    """What the keeper does."""
    outputs = Outputs(args.tag_output)
    for fd in control.descriptors:
        outputs.watch(fd)
    job = Job(outputs, control, args.verbose)
    code = _run_job(job, _policy(args, commands))
    try:
        # Who pages through the output takes their time; but who has ended the job wants the prompt back.
        job.finish_output(math.inf if code >= 0 else READER_S)
    except Interrupted as interrupted:  # Nobody reads what is left.
        return code or -interrupted.number
    return code


def _fail(message: str) -> int:
    print(f"herringrun: {message}", file=sys.stderr)
    return 2


def _open_standard_descriptors() -> None:
    """Who is started without one of them must not get a pipe of a rank in its place."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``herringrun``. Returns the exit code: that of the first process that failed, else 0; ends by the
    signal itself where one has ended the job."""
    _open_standard_descriptors()
    args = parse(argv)
    problem = problem_of(args)
    if problem:
        return _fail(problem)
    try:
        extra = settings_of(args)
    except HerringError as error:
        return _fail(str(error))
    problem = program_problem(args.command, extra.get("PATH", os.environ.get("PATH")))
    if problem:
        return _fail(problem)
    commands = commands_of(args, extra)
    return run(lambda control: _keep(args, commands, control))


if __name__ == "__main__":
    sys.exit(main())
