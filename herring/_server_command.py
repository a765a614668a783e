"""`herring server`: serves one job, or with --stay one job after the other."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

from herring._errors import SERVER_LOST_PEER, HerringError, PeerLostError
from herring._start_line import counted

if TYPE_CHECKING:
    from herring import _core

    Process = _core.ServerProcess | _core.ElasticServer
    Entrance = Callable[[ExitStack], Process]

__all__ = ["add_command", "run"]

DESCRIPTION = (
    "Runs until all workers have left. Set MASTER_ADDR, MASTER_PORT (or HERRING_HUB) and HERRING_SERVERS as for the "
    "workers, unless the scheduler sets them. Processes may start in any order. If WORLD_SIZE is set, it must be the "
    f"number of workers. Exit status: 0 if all workers ended well; {SERVER_LOST_PEER} if one failed, was lost or could "
    "not be reached; 1 for any other error. With --stay it serves one job after the other, until SIGTERM or SIGINT."
)
# So long a job that has ended, or that refuses this server, is left alone.
_PAUSE_S = 0.5
_STOPPING = (signal.SIGTERM, signal.SIGINT)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """To those of `herring`."""
    parser = commands.add_parser("server", help="run a server process", description=DESCRIPTION)
    parser.add_argument(
        "--rank",
        type=_rank_or_auto,
        required=True,
        metavar="R",
        help="this server's number, 0 to HERRING_SERVERS - 1; auto: take it from the launcher (srun, mpirun, a pod's "
        "index)",
    )
    parser.add_argument(
        "--stay",
        action="store_true",
        help="wait for a job without a time limit, serve it, and wait for the next job, also if a job fails",
    )
    parser.add_argument("--quiet", action="store_true", help="print errors only")


def _rank_or_auto(text: str) -> int | None:
    """None stands for auto."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"it is {text!r}, and must be a whole number, 0 or more, or auto")
    return None if text == "auto" else int(text)


def run(args: argparse.Namespace) -> int:
    """What the command does."""
    from herring._job import find_server_rank, read_settings

    config = read_settings({})
    rank = find_server_rank(config) if args.rank is None else args.rank
    server = _Server(rank, _entrance(rank, config), args.quiet)
    return server.stay() if args.stay else server.serve()


def _entrance(rank: int, config: _core.Config) -> Entrance:
    """Joins when called, and leaves with the stack."""
    from herring._job import elastic_server_entrance, is_elastic, server_entrance

    if is_elastic(config):
        enter_elastic = elastic_server_entrance(rank, config)
        return lambda leaving: _closed_with(leaving, enter_elastic())
    enter = server_entrance(rank, config)

    def join(leaving: ExitStack) -> Process:
        job = enter()
        leaving.callback(job.close)
        return _closed_with(leaving, job.start())

    return join


def _closed_with(leaving: ExitStack, process: Process) -> Process:
    leaving.callback(process.close)
    return process


class _Server:
    """One server process."""

    def __init__(self, rank: int, join: Entrance, quiet: bool) -> None:
        self._rank = rank
        self._join = join
        self._quiet = quiet
        self._is_stopped = threading.Event()

    def serve(self) -> int:
        """One job; the exit status. Raises HerringError where it could not join.

        From the moment it has joined, SIGTERM and SIGINT stop it, and stay so.
        """
        with ExitStack() as leaving:
            process = self._join(leaving)
            self._stop_by_signals(process)
            try:
                process.run()
            except HerringError as error:
                if self._is_stopped.is_set():
                    self._say("stopped by a signal")
                    return 1
                self._say(str(error))
                return SERVER_LOST_PEER if isinstance(error, PeerLostError) else 1
            counters = process.counters()
        self._say_counters(counters)
        return 0

    def stay(self) -> int:
        """Job after job, until a signal; the exit status then."""
        if not self._quiet:
            self._say("waiting for a job")
        before = {number: signal.getsignal(number) for number in _STOPPING}
        said: set[str] = set()  # Since the last job.
        while True:
            try:
                status = self.serve()
                said.clear()
            except HerringError as error:
                kind = re.sub(r"[\d.]+", "", str(error))  # Seconds and process ids differ each time.
                if kind not in said:
                    self._say(f"{error}. Still waiting for a job")
                said.add(kind)
                status = 1
            for number, handler in before.items():
                signal.signal(number, handler)  # While it waits, a signal ends it at once.
            if self._is_stopped.is_set():  # Also by one that came after the job.
                return status
            time.sleep(_PAUSE_S)

    def _stop_by_signals(self, process: Process) -> None:
        def stop(number: int, frame: FrameType | None) -> None:
            self._is_stopped.set()
            process.stop()

        for number in _STOPPING:
            signal.signal(number, stop)

    def _say(self, text: str) -> None:
        # In one write: other servers say something at the same moment.
        sys.stderr.write(f"herring server {self._rank}: {text}\n")

    def _say_counters(self, counters: _core.ServerProcessCounters) -> None:
        if self._quiet:
            return
        received, sent = counters["bytes_received"] / 1e6, counters["bytes_sent"] / 1e6
        bound = counters["memory_bound_bytes"] / 1e6
        operations = counted(counters["ops"], "operation")
        self._say(f"{operations}, {received:.2f} MB received, {sent:.2f} MB sent, {bound:.1f} MB of buffers at most")
