"""herringrun's command line: what there is, and what is refused before anything is started."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
from pathlib import Path
from typing import Any

from herring import _core
from herring._completion import offer_completion
from herring._errors import InvalidArgumentError
from herring._parser import Parser
from herring._version import __version__

__all__ = ["most_servers", "parse", "problem_of", "program_problem", "settings_of"]

DESCRIPTION = (
    "Starts a training script in several processes, on this machine or on several. Herring averages their gradients."
)
USAGE = """herringrun [options] -np N program [arguments ...]
       herringrun [options] -H HOST:SLOTS,... program [arguments ...]"""
EPILOG = """\
examples:
  herringrun -np 4 python train.py
  herringrun -np 2 --servers 2 python train.py --epochs 3
  herringrun -np 4 --elastic --restart-workers 3 python train.py
  herringrun -H gpu1:8,gpu2:8 --server-hosts cpu1,cpu2 python train.py
  herringrun python train.py                 (in a Slurm allocation: on its nodes)

Every process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.
Exit status: 0 if the job went well, else that of the first process that failed (128 + the signal if it was killed).
Hosts are reached by ssh, which must not ask for a password; the nodes of a Slurm allocation by srun.
More: docs/launching.md, docs/slurm.md.
"""
# Of each process: stdout, stderr, and some moments more.
_DESCRIPTORS_EACH, _DESCRIPTORS_MORE = 2, 32


class _Variable(argparse.Action):
    """Adds the option as it was written, and its value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        namespace.env = [*namespace.env, (option, values)]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="herringrun",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"herringrun {__version__}")
    add(
        "-np",
        "-n",
        "--num-proc",
        type=int,
        metavar="N",
        help="number of workers (default with -H: the number of slots; in a Slurm allocation: the number of tasks)",
    )
    add(
        "--servers",
        type=int,
        default=0,
        metavar="K",
        help="number of server processes (default 0: servers are inside the workers)",
    )
    _add_elastic(parser)
    add("--tag-output", action="store_true", help="put [rank N] or [server N] in front of each line")
    add(
        "--output-filename",
        metavar="FOLDER",
        help="also write what each process prints to FOLDER/rank.N/stdout and stderr, on this machine",
    )
    add(
        "-x",
        "--env",
        action=_Variable,
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable for every process (repeatable); without VALUE: its value in herringrun's environment",
    )
    add(
        "--stdin",
        choices=("0", "none"),
        default="0",
        help="0: rank 0 reads herringrun's stdin (default); none: no rank reads it",
    )
    add("--wdir", metavar="FOLDER", help="where processes start (default: the folder that herringrun is started in)")
    add("--verbose", action="store_true", help="print which processes start, and how each ends")
    _add_hosts(parser.add_argument_group("several hosts"))
    add("command", nargs=argparse.REMAINDER, metavar="command", help="the program and its arguments")
    return parser


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--elastic", action="store_true", help="keep training when a worker dies (docs/reliability.md)")
    add(
        "--min-workers",
        type=int,
        default=1,
        metavar="M",
        help="with --elastic: end the job when fewer than M workers are left (default 1)",
    )
    add(
        "--restart-workers",
        type=int,
        default=0,
        metavar="R",
        help="with --elastic: restart workers that die, at most R times in the whole job (default 0)",
    )
    add(
        "--reset-limit",
        type=int,
        metavar="R",
        help="with --elastic: end the job when more than R workers have died (default: no limit)",
    )
    add(
        "--restart-servers",
        type=int,
        default=0,
        metavar="R",
        help="restart servers that die, at most R times in the whole job (default 0); training goes on meanwhile",
    )


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "-H",
        "--host",
        "--hosts",
        dest="hosts",
        metavar="HOST:SLOTS,...",
        help="the workers' hosts and their slots; ranks fill them in this order",
    )
    add(
        "--hostfile",
        "-hostfile",
        "--machinefile",
        metavar="FILE",
        help="the same from a file: `HOST slots=N` on each line, # begins a comment",
    )
    add("--slots-per-host", type=int, metavar="N", help="number of slots of a host without :SLOTS (default 1)")
    add("--server-hosts", metavar="HOST[:N],...", help="hosts that run server processes: one each, or N")
    add("--server-hostfile", metavar="FILE", help="the same from a file")
    add(
        "--rsh",
        metavar="COMMAND",
        help="use COMMAND instead of ssh; it is called as COMMAND HOST LINE, where LINE is a line for a shell",
    )
    add("--ssh-port", "-p", type=int, metavar="PORT", help="the port of sshd on the hosts")
    add("--ssh-identity-file", "-i", metavar="FILE", help="the private key for ssh")
    add("--python", metavar="PATH", help="the Python on the hosts (default: the path of the one that runs herringrun)")
    add(
        "--master-addr",
        metavar="ADDRESS",
        help="the address of worker 0's host, as the other hosts know it (default: its name in -H)",
    )
    add(
        "--start-timeout",
        type=float,
        default=60,
        metavar="S",
        help="how long to wait for all hosts to answer, in seconds (default 60)",
    )
    add("--stage", help=argparse.SUPPRESS)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; `command` without a leading "--". Exits with status 2 for what there is not."""
    parser = _parser()
    offer_completion(parser)
    args = parser.parse_args(argv)
    if args.command[:1] == ["--"]:
        args.command = args.command[1:]
    return args


def problem_of(args: argparse.Namespace) -> str:
    """What is wrong with the numbers; empty for nothing."""
    if problem := _number_problem(args):
        return problem
    for name in ("servers", "restart_servers", "restart_workers", "reset_limit"):
        if (getattr(args, name) or 0) < 0:
            return f"--{name.replace('_', '-')} {getattr(args, name)}: it must be 0 or more"
    if not 1 <= args.min_workers <= args.num_proc:
        return f"--min-workers {args.min_workers}: it must be from 1 to -np ({args.num_proc})"
    elastic = {
        "--min-workers": args.min_workers != 1,
        "--reset-limit": args.reset_limit is not None,
        "--restart-workers": args.restart_workers > 0,
    }
    for name, is_given in elastic.items():
        if is_given and not args.elastic:
            return f"{name} works only with --elastic; without --elastic a worker's death ends the job"
    return _limit_problem(args.num_proc, args.servers, args.hosts is not None or args.hostfile is not None)


def _number_problem(args: argparse.Namespace) -> str:
    if args.num_proc is None:
        return "the number of workers is missing: give -np N, or name hosts with -H"
    if args.num_proc < 1:
        return f"-np {args.num_proc}: at least one worker is needed"
    if args.ssh_port is not None and not 0 < args.ssh_port < 65536:
        return f"--ssh-port {args.ssh_port}: a port is a number from 1 to 65535"
    if args.start_timeout <= 0:
        return f"--start-timeout {args.start_timeout:g}: it must be a number of seconds above 0"
    return ""


def _limit_problem(workers: int, servers: int, is_elsewhere: bool) -> str:
    what = f"-np {workers}" + (f" --servers {servers}" if servers else "")
    most = most_servers()
    if most is not None and servers > most:
        return f"--servers {servers}: a job has at most {most} servers (HERRING_SERVERS); start fewer"
    processes = workers + servers
    if is_elsewhere:
        processes = 0
    pids = _number_in(Path("/proc/sys/kernel/pid_max"))
    if pids is not None and processes >= pids:
        return f"{what}: this machine runs at most {pids} processes (/proc/sys/kernel/pid_max); start fewer"
    each = _DESCRIPTORS_EACH * (2 if is_elsewhere else 1)
    descriptors = (workers + servers) * each + _DESCRIPTORS_MORE
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and descriptors > hard:
        return (
            f"{what}: the processes' output needs {descriptors} file descriptors, and the limit is {hard}; raise it "
            "(ulimit -Hn), or start fewer"
        )
    group = _number_in(Path("/sys/fs/cgroup/pids.max"))
    if group is not None and processes >= group:
        return (
            f"{what}: this container or session may have at most {group} processes (pids.max of its cgroup); raise "
            "it, or start fewer"
        )
    return ""


def most_servers() -> int | None:
    """The upper end of HERRING_SERVERS' range."""
    ranges = {row["name"]: row["range"] for row in _core.config_table()}
    last = ranges["HERRING_SERVERS"].split()[-1]
    return int(last) if last.isdigit() else None


def _number_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """What --env says. Raises InvalidArgumentError for what is not NAME=VALUE, and for bad HERRING_* anywhere: one
    sentence before the start is better than one from each process."""
    extra = {}
    for option, setting in args.env:
        name, equals, value = setting.partition("=")
        wish = f"{option} {setting}"
        if not name or "\0" in setting:
            raise InvalidArgumentError(f"{wish}: it must be NAME=VALUE, or the NAME of a variable that is set")
        if not equals and name not in os.environ:
            raise InvalidArgumentError(f"{wish}: this variable is not set; give a value: {wish}=VALUE")
        extra[name] = value if equals else os.environ[name]
    # The launcher itself sets these, whatever the environment says.
    own = {"HERRING_SERVERS": str(args.servers), "HERRING_HUB": "", "HERRING_RENDEZVOUS": ""}
    if args.elastic or args.restart_servers:
        own["HERRING_ELASTIC"] = "on" if args.elastic else "off"
    given = {name: value for name, value in extra.items() if name.startswith("HERRING_")}
    _core.read_config({**given, **own})
    return extra


def program_problem(command: list[str], path: str | None) -> str:
    """Why this program cannot be started; empty where it seems that it can. `path` is the processes' PATH."""
    if not command:
        return "no program to run; for example: herringrun -np 2 python train.py"
    program = command[0]
    if program.startswith("-"):
        return f"{program} is not an option of herringrun (see herringrun --help); write options before the program"
    found = shutil.which(program, path=path)
    if found is None:
        problem = f"there is no program {program!r} (not a file that can be run, and not on PATH)"
        if program.endswith(".py") or os.path.isfile(program):
            problem += f"; for a Python script: herringrun -np 2 python {program}"
        return problem
    return ""
