"""``herring-horovodrun``: takes the command line of horovodrun, and starts the job as herringrun does.

Each option is followed, or has no meaning for Herring, which is said in one line, or is refused with Herring's way.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from herring._errors import InvalidArgumentError
from herring._launch import launch
from herring._launch._options import parse
from herring._parser import Parser
from herring._streams import checked_stdout, open_standard_descriptors
from herring._version import __version__

__all__ = ["herringrun_arguments", "main"]

DESCRIPTION = "Takes horovodrun's options and starts the job with Herring: see herringrun --help and docs/horovod.md."

# Options with a value, and flags, that change nothing for Herring; why.
_FIXED = "Herring decides this by itself"
_NO_MEANING: dict[str, str] = {
    "--cache-capacity": "Herring has no response cache",
    "--disable-cache!": "herring-horovodrun caches nothing",
    "--hierarchical-allreduce!": "ranks of one host always reduce in shared memory first",
    "--no-hierarchical-allreduce!": "ranks of one host always reduce in shared memory first; HERRING_INTRA_NODE=off",
    "--hierarchical-allgather!": _FIXED,
    "--no-hierarchical-allgather!": _FIXED,
    "--autotune!": "Herring has no autotuning",
    "--no-autotune!": "Herring has no autotuning",
    "--autotune-log-file": "Herring has no autotuning",
    "--autotune-warmup-samples": "Herring has no autotuning",
    "--autotune-steps-per-sample": "Herring has no autotuning",
    "--autotune-bayes-opt-max-samples": "Herring has no autotuning",
    "--autotune-gaussian-process-noise": "Herring has no autotuning",
    "--no-timeline-mark-cycles!": "cycles are marked only with --timeline-mark-cycles",
    "--stall-check!": "the stall check is on unless --no-stall-check is given",
    "--mpi-threads-disable!": "nothing goes through MPI",
    "--no-mpi-threads-disable!": "nothing goes through MPI",
    "--tcp!": "to use TCP, set HERRING_PROVIDER=tcp",
    "--num-nccl-streams": "nothing goes through NCCL",
    "--thread-affinity": _FIXED,
    "--gloo-timeout-seconds": "to limit the time of the start, set HERRING_JOIN_TIMEOUT_S",
    "--log-with-timestamp!": "the format of Herring's log cannot be changed",
    "--log-without-timestamp!": "the format of Herring's log cannot be changed",
    "--log-hide-timestamp!": "the format of Herring's log cannot be changed",
    "--prefix-output-with-timestamp!": "each line begins with the rank, without a time",
    "--elastic-timeout": "to limit the time of the start, set HERRING_JOIN_TIMEOUT_S",
    "--cooldown-range": "a host that was lost is not used again",
    "--blacklist-cooldown-range": "a host that was lost is not used again",
    "--mpi!": "processes are started by ssh, not by mpirun",
}
_REFUSED: dict[str, str] = {
    "--config-file": "give the options on the command line, and Herring's settings as HERRING_* variables",
    "--host-discovery-script": "name the hosts with -H; add more workers by hand (docs/launching.md, By hand)",
    "--mpi-args": "start with mpirun itself: mpirun -n N python train.py",
    "--binding-args": "start with mpirun itself: mpirun -n N --bind-to ... python train.py",
    "--jsrun!": "start with jsrun or mpirun itself",
    "--lsf!": "start with mpirun itself",
}
_LOG = {"TRACE": "debug", "DEBUG": "debug", "INFO": "info", "WARNING": "warning", "ERROR": "error", "FATAL": "error"}


class _Noted(argparse.Action):
    """An option without a meaning here: remembered."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        namespace.noted = [*namespace.noted, option]


class _Refused(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        way = _REFUSED.get(str(option), _REFUSED.get(f"{option}!", ""))
        parser.error(f"{option} is not supported: {way}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="herring-horovodrun",
        usage="herring-horovodrun [options] program [arguments ...]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    parser.set_defaults(noted=[])
    add = parser.add_argument
    add("-v", "--version", action="version", version=f"herring {__version__}")
    add("-cb", "--check-build", action="store_true", help="show what Herring finds on this machine (herring doctor)")
    add("-np", "--num-proc", type=int, metavar="N", help="number of workers")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="the workers' hosts")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same from a file: `HOST slots=N` on each line")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="the port of sshd")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the private key for ssh")
    add("--start-timeout", type=float, metavar="S", help="how long to wait for all hosts to answer, in seconds")
    add("--network-interfaces", "--network-interface", metavar="NAMES", help="interfaces to use (HERRING_INTERFACE)")
    add("--output-filename", metavar="FOLDER", help="also write output to FOLDER/rank.N/stdout and stderr")
    add("--verbose", action="store_true", help="say what is started and how it ended")
    add("--gloo", action="store_true", help="accepted and ignored")
    add("--timeline-filename", metavar="FILE", help="rank 0 writes a Chrome trace (HOROVOD_TIMELINE)")
    add(
        "--timeline-mark-cycles", action="store_true", help="mark where operations start (HOROVOD_TIMELINE_MARK_CYCLES)"
    )
    add("--no-stall-check", action="store_true", help="no warning about stalls (HOROVOD_STALL_CHECK_DISABLE)")
    add(
        "--stall-check-warning-time-seconds",
        type=float,
        metavar="S",
        help="warn if an operation waits for other ranks for S seconds (HOROVOD_STALL_CHECK_TIME_SECONDS)",
    )
    add(
        "--stall-check-shutdown-time-seconds",
        type=float,
        metavar="S",
        help="time limit of an operation, in seconds (HERRING_TIMEOUT_S)",
    )
    add(
        "--fusion-threshold-mb",
        type=int,
        metavar="MB",
        help="largest bucket of small tensors (HERRING_FUSION_BYTES); 0: each tensor is sent alone",
    )
    add(
        "--cycle-time-ms",
        type=float,
        metavar="MS",
        help="how long a small tensor waits for others, rounded to milliseconds (HERRING_FUSION_CYCLE_MS)",
    )
    add("--log-level", type=str.upper, choices=sorted(_LOG), help="what Herring logs (HERRING_LOG)")
    elastic = parser.add_argument_group("elastic jobs")
    elastic.add_argument(
        "--min-np",
        "--min-num-proc",
        dest="min_np",
        type=int,
        metavar="M",
        help="end the job when fewer than M workers are left",
    )
    elastic.add_argument("--max-np", "--max-num-proc", dest="max_np", type=int, metavar="N", help="must be at most -np")
    elastic.add_argument(
        "--slots-per-host", type=int, metavar="N", help="slots of a host that is named without a number"
    )
    elastic.add_argument("--reset-limit", type=int, metavar="R", help="end the job when more than R workers have died")
    for names, action in ((_NO_MEANING, _Noted), (_REFUSED, _Refused)):
        for name in names:
            add(name.rstrip("!"), action=action, nargs=0 if name.endswith("!") else None, help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, metavar="command", help="the program and its arguments")
    return parser


def _elastic(args: argparse.Namespace) -> list[str]:
    if args.min_np is None and args.max_np is None:
        if args.reset_limit is not None:
            raise InvalidArgumentError("--reset-limit works only in elastic jobs: give --min-np too")
        return []
    count = args.num_proc or args.min_np
    if args.max_np is not None and count is not None and args.max_np > count:
        raise InvalidArgumentError(
            f"--max-np {args.max_np}: the job starts with {count} workers, and herring-horovodrun adds none later. Set "
            f"-np {args.max_np}, or start more by hand (docs/launching.md, By hand)"
        )
    least = args.min_np if args.min_np is not None else 1
    limit = [] if args.reset_limit is None else ["--reset-limit", str(args.reset_limit)]
    return [
        "--elastic",
        "--min-workers",
        str(least),
        *limit,
        *([] if args.num_proc or count is None else ["-np", str(count)]),
    ]


def _watching(args: argparse.Namespace) -> list[str]:
    """The variables of timelines and stalls."""
    result = []
    if args.timeline_filename is not None:
        result += ["-x", f"HOROVOD_TIMELINE={args.timeline_filename}"]
    if args.timeline_mark_cycles:
        result += ["-x", "HOROVOD_TIMELINE_MARK_CYCLES=1"]
    if args.no_stall_check:
        result += ["-x", "HOROVOD_STALL_CHECK_DISABLE=1"]
    if args.stall_check_warning_time_seconds is not None:
        result += ["-x", f"HOROVOD_STALL_CHECK_TIME_SECONDS={args.stall_check_warning_time_seconds:g}"]
    if args.stall_check_shutdown_time_seconds:
        result += ["-x", f"HERRING_TIMEOUT_S={args.stall_check_shutdown_time_seconds:g}"]
    return result


def herringrun_arguments(args: argparse.Namespace) -> list[str]:
    """herringrun's options for horovodrun's. Raises InvalidArgumentError."""
    result = ["--tag-output"]
    for name in (
        "hosts",
        "hostfile",
        "ssh_port",
        "ssh_identity_file",
        "start_timeout",
        "output_filename",
        "slots_per_host",
    ):
        value = getattr(args, name)
        if value is not None:
            result += [f"--{name.replace('_', '-')}", str(value)]
    if args.num_proc is not None:
        result += ["-np", str(args.num_proc)]
    if args.verbose:
        result.append("--verbose")
    if args.network_interfaces is not None:
        result += ["-x", f"HERRING_INTERFACE={args.network_interfaces}"]
    result += _watching(args)
    if args.fusion_threshold_mb is not None:
        result += [
            "-x",
            f"HERRING_FUSION_BYTES={args.fusion_threshold_mb}MB"
            if args.fusion_threshold_mb
            else "HERRING_FUSION_BYTES=0",
        ]
    if args.cycle_time_ms is not None:
        result += ["-x", f"HERRING_FUSION_CYCLE_MS={round(args.cycle_time_ms)}"]
    if args.log_level is not None:
        result += ["-x", f"HERRING_LOG={_LOG[args.log_level]}"]
    return [*result, *_elastic(args), "--", *args.command[args.command[:1] == ["--"] :]]


def notes(args: argparse.Namespace) -> list[str]:
    """What to say of options without a meaning, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for option in dict.fromkeys(args.noted):
        reasons.setdefault(_NO_MEANING.get(option, _NO_MEANING.get(f"{option}!", "")), []).append(option)
    return [f"{', '.join(options)}: ignored: {reason}" for reason, options in reasons.items()]


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``herring-horovodrun``; as herringrun's."""
    open_standard_descriptors()
    with checked_stdout("herring-horovodrun"):
        args = _parser().parse_args(argv)
        if args.check_build:
            from herring import _doctor

            return _doctor.run(as_json=False)
    try:
        arguments = herringrun_arguments(args)
    except InvalidArgumentError as error:
        print(f"herring-horovodrun: {error}", file=sys.stderr)
        return 2
    for note in notes(args):
        print(f"herring-horovodrun: {note}", file=sys.stderr)
    return launch(parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
