"""`herring bench`: joins the job, makes the contenders, measures, prints."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from types import FrameType
from typing import Any

import herring
from herring._context import process
from herring._errors import InvalidArgumentError
from herring._start_line import counted
from herring.bench import _report
from herring.bench._bounds import Links, emulated_cluster
from herring.bench._contender import Case, Contender
from herring.bench._device import DeviceContender, DeviceGroups
from herring.bench._gloo import GlooContender
from herring.bench._herring import HerringContender, PrivateMemory
from herring.bench._measure import Row, Schedule, measure_all
from herring.bench._mpi import SeparateMpi, make_mpi
from herring.bench._options import Options, read_options
from herring.bench._profile import tracepoint
from herring.bench._replay_options import refuse_replay_options
from herring.bench._table import Table, links_text
from herring.bench._tcp import TcpContender
from herring.bench._units import format_size, parse_rate

# Of a host's free memory, what the arrays may take.
_MEMORY_SHARE = 0.85


def main(args: argparse.Namespace) -> int:
    """What herring._cli calls; returns the exit code: 1 where a result was wrong or, comparing, a ratio got worse."""
    if args.compare:
        from herring.bench._compare import main as compare

        return compare(args.compare[0], args.compare[1], args.threshold)
    if args.plot:
        from herring.bench._plot import main as plot

        return plot(args.plot, args.out)
    if args.collective is None:
        raise InvalidArgumentError("say what to measure: herring bench allreduce or replay (or --compare, --plot)")
    if args.collective == "replay":
        from herring.bench._replay_run import main as replay

        return replay(args)
    refuse_replay_options(args)
    options = read_options(args)
    if options.json_file is not None:
        _report.check_writable(options.json_file)
    # Ended from outside, rank 0 still has to end the jobs that it started.
    signal.signal(signal.SIGTERM, _stop)
    herring.init()
    try:
        return _run(options)
    finally:
        herring.shutdown()


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def find_links(options: Options) -> Links:
    """Which hosts there are, by who can share memory with whom; the link's rate is told, not measured."""
    client = process.current().job.client
    worker_hosts = {member.host_identity for member in client.workers}
    server_hosts = {member.host_identity for member in client.servers} - worker_hosts
    told = emulated_cluster(os.environ)
    rate, burst = options.rate, told.get("burst_bytes", 0)
    if rate is None and "rate" in told:
        rate = parse_rate(str(told["rate"]))
        if rate is not None:
            rate *= int(str(told.get("links", 1)))
    count = len(server_hosts) if options.server_hosts is None else options.server_hosts
    return Links(len(worker_hosts), count, rate, burst if isinstance(burst, int) else 0)


def _contenders(options: Options) -> list[Contender]:
    if options.device != "cpu":
        groups = DeviceGroups(options.peers)
        return [DeviceContender(name, groups) for name in ("herring", *options.peers)]
    private = PrivateMemory()
    found: list[Contender] = [HerringContender(memory, private) for memory in options.memories]
    try:
        for peer in options.peers:
            if peer == "gloo":
                found.append(GlooContender(private))
            elif peer == "tcp":
                found.append(TcpContender())
            else:
                found.append(make_mpi(peer, list(options.mpi_arguments), private))
    except BaseException:
        for contender in found:
            contender.close()
        raise
    return found


def available_bytes() -> int | None:
    """Of this machine's memory, what is free; None where it does not say."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def check_memory(options: Options, contenders: list[Contender], local_ranks: int, available: int | None) -> None:
    """Raises InvalidArgumentError where the arrays of the largest size will not fit one host's memory."""
    arrays = 2 if False in options.in_place else 1
    sets = sum(isinstance(each, SeparateMpi) or each.memory == "arena" for each in contenders)
    sets += any(each.memory == "private" and not isinstance(each, SeparateMpi) for each in contenders)
    largest = max(options.sizes)
    needed = arrays * sets * largest * local_ranks
    if available is not None and needed > available * _MEMORY_SHARE:
        raise InvalidArgumentError(
            f"{format_size(largest)} needs {needed / 2**30:.1f} GB on a host of {local_ranks} ranks, and "
            f"{available / 2**30:.1f} GB are free: fewer --buffers, --peers or ranks, --in-place yes, or smaller sizes"
        )


def job_json() -> dict[str, Any]:
    """The job, for a report."""
    session = process.current()
    return {
        "ranks": herring.size(),
        "ranks_per_host": herring.local_size(),
        "servers": session.config.servers,
        "transport": herring.description(),
    }


def given_settings() -> dict[str, str]:
    """What was set, by argument or environment, for a report: defaults are known by the version."""
    return {name: value for name, value, source in process.current().config.origins if source != "default"}


def verdict(wrong: Sequence[str]) -> int:
    """The exit status; says each of `wrong`, a result that is not what it must be."""
    if wrong and herring.rank() == 0:
        for text in wrong:
            print(f"herring bench: {text}", file=sys.stderr)
    return 1 if wrong else 0


def _settings(options: Options, contenders: list[Contender]) -> dict[str, Any]:
    libraries = {each.name: each.version() for each in contenders if isinstance(each, SeparateMpi)}
    return {"options": asdict(options), "herring": given_settings(), "mpi": libraries}


def _run(options: Options) -> int:
    is_first = herring.rank() == 0
    event = tracepoint() if options.profile else None
    links = find_links(options)
    contenders = _contenders(options)
    table = Table(links, herring.size(), options.peers, with_profile=options.profile)

    def say(text: str) -> None:
        if is_first:
            print(text, flush=True)

    try:
        check_memory(options, contenders, herring.local_size(), available_bytes())
        ranks = counted(herring.size(), "worker")
        say(f"# herring {herring.__version__} bench allreduce: {ranks}, {links_text(links)}")
        say(f"# {herring.description()}")
        say(f"# {options.iterations} iterations after {options.warmup}; a time is that of the slowest rank")
        for contender in contenders:
            if isinstance(contender, SeparateMpi):
                say(f"# {contender.name}: {contender.version()}")
        say(table.header())
        cases = [
            Case(size, options.dtype, options.op, in_place) for size in options.sizes for in_place in options.in_place
        ]
        rows = measure_all(
            cases,
            contenders,
            Schedule(options.iterations, options.warmup, options.turn, options.lead_in, event),
            lambda found: say("\n".join(table.lines(found))),
            lambda reason: say(f"# left out: {reason}"),
        )
        if is_first and options.json_file is not None:
            _report.write(options.json_file, _report.report(rows, links, job_json(), _settings(options, contenders)))
    finally:
        for contender in reversed(contenders):
            contender.close()
    return _verdict(rows)


def _verdict(rows: list[Row]) -> int:
    return verdict(
        [
            f"{row.name} ({row.memory} memory) gave {row.wrong} wrong elements at {format_size(row.case.nbytes)} "
            f"{row.case.dtype} {row.case.op}"
            for row in rows
            if row.wrong
        ]
    )
