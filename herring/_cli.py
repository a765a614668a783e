"""The `herring` command: server, rendezvous, doctor, build, config, kubernetes, bench."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from herring import _doctor_job, _kubernetes_options, _server_command
from herring._completion import offer_completion
from herring._errors import HerringError, InvalidArgumentError
from herring._parser import Parser
from herring._start_line import counted
from herring._streams import checked_stdout, open_standard_descriptors
from herring._version import __version__
from herring.bench import _options, _replay_options

if TYPE_CHECKING:
    from herring import _core

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="herring", description="Averages gradients for data-parallel training through servers instead of a ring."
    )
    parser.add_argument("--version", action="version", version=f"herring {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="command")

    _server_command.add_command(commands)
    _add_rendezvous(commands)

    doctor = commands.add_parser(
        "doctor",
        help="show what this machine has, what Herring would use, and why",
        description="Looks at libfabric and its providers, EFA, CUDA, torch, TensorFlow, MPI and memory limits. "
        "Exit status: 0 if Herring can run here (at least on one host), else 1. With --workers: computes what a job of "
        "that size takes of each of its processes, with the settings of this environment. Nothing is started. Exit "
        "status: 0 if machines like this one have it, 1 if not, 2 if no such job can start.",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    _doctor_job.add_options(doctor)

    build = commands.add_parser(
        "build",
        help="build the torch binding for the torch that is installed",
        description="Builds the binding now, not at the first use of the torch backend. Use it when you make an image. "
        "Needs g++.",
    )
    build.add_argument(
        "what", metavar="torch", choices=["torch"], help="what is built: the binding for the installed torch"
    )

    commands.add_parser(
        "config",
        help="print every setting with its value and where it came from",
        description="Prints every setting, its value, and where it came from: default or environment. The "
        "secret is not shown.",
    )

    _kubernetes_options.add_command(commands)
    bench = commands.add_parser(
        "bench",
        help="measure allreduce, or replay a model's steps, and compare with gloo and MPI",
        description=_options.DESCRIPTION,
        epilog=_options.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _options.add_arguments(bench)
    _replay_options.add_arguments(bench)
    return parser


def _add_rendezvous(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rendezvous = commands.add_parser(
        "rendezvous",
        help="run the rendezvous of an elastic job that is started by hand",
        description="An elastic job that is started by hand needs one rendezvous. Set HERRING_RENDEZVOUS=host:port and "
        "HERRING_SECRET for it, for every worker and for every server, and HERRING_ELASTIC=on for the workers. It ends "
        "with the job, with exit status 0 if the job went well. herringrun --elastic does all this by itself.",
    )
    rendezvous.add_argument("--workers", type=int, required=True, metavar="N", help="number of workers at the start")
    rendezvous.add_argument(
        "--servers", type=int, default=0, metavar="K", help="number of server processes at the start (default 0)"
    )
    rendezvous.add_argument(
        "--min-workers",
        type=int,
        default=1,
        metavar="M",
        help="end the job when fewer than M workers are left (default 1)",
    )
    rendezvous.add_argument("--quiet", action="store_true", help="do not print where it listens, and whom it waits for")


def _rendezvous(args: argparse.Namespace) -> int:
    from herring import _core
    from herring._job import read_settings
    from herring._launch._options import most_servers
    from herring._rendezvous import from_hub_setting

    most = most_servers()
    if args.workers < 1 or not 1 <= args.min_workers <= args.workers:
        print(
            f"herring rendezvous: --workers {args.workers} --min-workers {args.min_workers}: --workers must be at "
            "least 1, and --min-workers from 1 to --workers",
            file=sys.stderr,
        )
        return 2
    if args.servers < 0 or (most is not None and args.servers > most):
        print(f"herring rendezvous: --servers {args.servers}: it must be from 0 to {most}", file=sys.stderr)
        return 2
    config = read_settings({})
    if not config.rendezvous:
        print("herring rendezvous: set HERRING_RENDEZVOUS=host:port, the same as for the workers", file=sys.stderr)
        return 2
    place = from_hub_setting(config.rendezvous, config.secret, "HERRING_RENDEZVOUS")
    rendezvous = _core.Rendezvous(
        config=config,
        listen_host=place.host,
        port=place.ports[0],
        workers=args.workers,
        servers=args.servers,
        min_workers=args.min_workers,
    )

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    if not args.quiet:
        servers = f" and {counted(args.servers, 'server')}" if args.servers else ""
        workers = counted(args.workers, "worker")
        print(f"herring rendezvous: at {config.rendezvous}, waiting for {workers}{servers}", file=sys.stderr)
        _warn_later(rendezvous, config)
    try:
        return 0 if rendezvous.wait() else 1
    finally:
        rendezvous.close()


def _warn_later(rendezvous: _core.Rendezvous, config: _core.Config) -> None:
    """It waits on: a cluster may start the job's other processes much later."""

    def warn() -> None:
        with contextlib.suppress(HerringError):  # It is over.
            if rendezvous.generation == 0:
                print(
                    f"herring rendezvous: the job has not begun after {config.join_timeout_s:g} s "
                    f"(HERRING_JOIN_TIMEOUT_S); still waiting at {config.rendezvous}: do all processes have this "
                    "HERRING_RENDEZVOUS and the same HERRING_SECRET?",
                    file=sys.stderr,
                )

    timer = threading.Timer(config.join_timeout_s, warn)
    timer.daemon = True
    timer.start()


def _doctor(args: argparse.Namespace) -> int:
    from herring import _doctor

    return _doctor.run(as_json=args.json, shape=_doctor_job.planned(args))


def _build(args: argparse.Namespace) -> int:
    try:
        from herring.torch import _binding
    except ImportError as error:
        print(f"herring build {args.what}: {error}", file=sys.stderr)
        return 1
    module = _binding.load()
    file = getattr(module, "__file__", "")
    print(f"herring build {args.what}: the binding for torch {module.torch_version} is in {file}")
    return 0


def _config(args: argparse.Namespace) -> int:
    from herring._job import read_settings

    rows = [("setting", "value", "source"), *read_settings({}).origins]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, value, source in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {source}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    from herring.bench import _run

    return _run.main(args)


_COMMANDS = {
    "server": _server_command.run,
    "rendezvous": _rendezvous,
    "doctor": _doctor,
    "build": _build,
    "config": _config,
    "kubernetes": _kubernetes_options.run,
    "bench": _bench,
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``herring``; returns the exit code."""
    open_standard_descriptors()
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")  # Rather than no output where the locale lacks a character.
    own, behind = _kubernetes_options.split(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    offer_completion(parser)
    if not own:
        parser.print_help(sys.stderr)
        parser.exit(2, "\nherring: error: no command; for example: herring doctor\n")
    with checked_stdout("herring"):
        args = parser.parse_args(own)
    args.worker_command = behind
    try:
        run = _COMMANDS[args.command]
        with checked_stdout(f"herring {args.command}"):
            return run(args)
    except HerringError as error:
        print(f"herring {args.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgumentError) else 1  # 2: as argparse ends, and herringrun.
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
