"""``herringrun``: starts the workers and servers of a job, here or on several hosts, and looks after them."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from herring._errors import HerringError, InvalidArgumentError
from herring._launch._allocation import srun_of, without_task
from herring._launch._commands import STAGE, Command, Site, commands_of, here, shared_environment
from herring._launch._hosts_job import HostsJob, Setup
from herring._launch._input import is_in_background, restored_terminal
from herring._launch._job import Interrupted, Job, StartError
from herring._launch._keeper import Control, run
from herring._launch._options import parse, problem_of, program_problem, settings_of
from herring._launch._output import Outputs
from herring._launch._rsh import Shell
from herring._launch._watch import Policy, Supervised, dead_after_s, watch
from herring._launch._where import Where, is_this_machine, where
from herring._streams import checked_stdout, open_standard_descriptors

__all__ = ["launch", "main", "open_standard_descriptors", "supervise"]

# After Ctrl-C: for a reader of stdout that does not read.
READER_S = 1.0
# In times of HERRING_DEAD_AFTER_S: after such a silence a host counts as lost, and its agent ends what it has started.
SILENCE = 6


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
        most_losses=args.reset_limit,
    )


def _run_job(job: Supervised, prepare: Callable[[], Policy]) -> int:
    """The exit code; negative: by that signal."""
    try:
        policy = prepare()
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


def _shell(args: argparse.Namespace, places: Where) -> Shell:
    """srun in an allocation, else ssh or what --rsh says."""
    if places.by_srun:
        return srun_of(places.by_srun, os.environ)
    rsh = tuple(shlex.split(args.rsh)) if args.rsh else ()
    return Shell(rsh, args.ssh_port, args.ssh_identity_file, max(1, math.ceil(args.start_timeout)))


def _over_hosts(
    args: argparse.Namespace, extra: dict[str, str], places: Where, outputs: Outputs, control: Control
) -> int:
    base = shared_environment(os.environ, extra)
    is_slurm = bool(places.by_srun)
    if is_slurm:
        base = without_task(base, extra)
    shell = _shell(args, places)
    python = args.python or sys.executable
    silence_s = SILENCE * dead_after_s(base)
    stage = Path(args.stage) if args.stage else None
    is_local = (lambda host: False) if is_slurm else is_this_machine
    setup = Setup(places.hosts, shell, python, is_local, args.start_timeout, silence_s, stage)
    job = HostsJob(outputs, control, setup, args.verbose)

    def prepare() -> dict[str, Command]:
        hellos = job.connect()
        master = args.master_addr or places.hosts[0].name
        cores = [int(hello["cores"]) for hello in hellos]
        site = Site(places.hosts, places.workers, places.servers, master, hellos[0]["ports"], cores, python, is_slurm)
        commands = commands_of(args, base, site)
        job.set_up(base, args.wdir or os.getcwd(), master, commands)
        return commands

    return _finish(job, _run_job(job, lambda: _policy(args, prepare())))


def _keep(args: argparse.Namespace, extra: dict[str, str], places: Where | None, control: Control) -> int:
    """What the keeper does."""
    folder = Path(args.output_filename) if args.output_filename else None
    outputs = Outputs(args.tag_output, folder, len(str(args.num_proc - 1)))
    for fd in control.descriptors:
        outputs.watch(fd)
    if places is not None:
        return _over_hosts(args, extra, places, outputs, control)
    front = os.getppid()
    if os.isatty(0) and is_in_background(front):
        args.stdin = "none"  # What is typed is for the shell.
    job = Job(outputs, control, args.verbose)
    with restored_terminal(front):
        stage = {STAGE: args.stage} if args.stage else {}
        base = {**os.environ, **extra, **stage}
        code = _run_job(job, lambda: _policy(args, commands_of(args, base, here(args.num_proc, args.servers))))
        return _finish(job, code)


def _finish(job: Supervised, code: int) -> int:
    try:
        # Who pages through the output takes their time; but who has ended the job wants the prompt back.
        job.finish_output(math.inf if code >= 0 else READER_S)
    except Interrupted as interrupted:  # Nobody reads what is left.
        return code or -interrupted.number
    return code


def supervise(commands: dict[str, Command]) -> int:
    """Runs these processes of a larger job on this machine, and ends them all when one fails; the exit code, as main().

    A server ends by itself with the job's last worker, wherever that is, so it is no reason to end anything.
    """
    open_standard_descriptors()
    limit = dead_after_s(next(iter(commands.values())).environment)

    def keep(control: Control) -> int:
        outputs = Outputs(False, None, 1)
        for fd in control.descriptors:
            outputs.watch(fd)
        job = Job(outputs, control, False)
        policy = Policy(False, False, 1, 0, 0, limit, commands, ends_with_workers=False)
        return _finish(job, _run_job(job, lambda: policy))

    return run(keep)


def _fail(message: str) -> int:
    print(f"herringrun: {message}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``herringrun``. Returns the exit code: that of the first process that failed, else 0; ends by the
    signal itself where one has ended the job."""
    open_standard_descriptors()
    with checked_stdout("herringrun"):
        args = parse(argv)
    return launch(args)


def _use_folders(args: argparse.Namespace, is_here: bool) -> None:
    """Makes the one and goes to the other, where the job is here; both are absolute then. Raises
    InvalidArgumentError."""
    option, given = "--output-filename", args.output_filename
    try:
        if given:
            args.output_filename = os.path.abspath(given)
            Path(args.output_filename).mkdir(parents=True, exist_ok=True)
        option, given = "--wdir", args.wdir
        if given and is_here:
            os.chdir(given)
            args.wdir = None
        elif given:
            args.wdir = os.path.abspath(given)
    except OSError as error:
        raise InvalidArgumentError(f"{option} {given}: {error.strerror}") from error


def launch(args: argparse.Namespace) -> int:
    """Runs the job that the options say; the exit code, as main()."""
    try:
        places = where(args, os.environ)
        if places is not None:
            args.num_proc, args.servers = len(places.workers), len(places.servers)
            places = None if places.is_here else places
        problem = problem_of(args)
        if problem:
            return _fail(problem)
        extra = settings_of(args)
        _use_folders(args, places is None)
    except HerringError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}")
    if places is None or args.command[:1] == [] or args.command[0].startswith("-"):  # Else the hosts say.
        problem = program_problem(args.command, extra.get("PATH", os.environ.get("PATH")))
    if problem:
        return _fail(problem)
    return run(lambda control: _keep(args, extra, places, control))


if __name__ == "__main__":
    sys.exit(main())
