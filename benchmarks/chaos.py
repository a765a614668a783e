#!/usr/bin/env python3
"""Kills, stops and cuts off processes of real jobs at random moments, hundreds of times, and counts what goes wrong.

  benchmarks/chaos.py --rounds 200 --jobs 3 --json chaos.json
  benchmarks/chaos.py --seed 1 --only 17          the round 1/17 again, with all output

Every round is a job of 2 to 4 workers (servers inside them, or 1 or 2 server processes; started one by one or by
herringrun; through shared memory, libfabric, or both) that sums arrays whose sums are known. At a random moment of
start, connecting, a step, or shutdown, a random process is killed (SIGKILL), stopped (SIGSTOP), or its host's link is
taken down, or loses only what it sends to one other host. In one round of four a second process follows. Then every
survivor must end by itself within HERRING_DEAD_AFTER_S (HERRING_JOIN_TIMEOUT_S before all have joined) and a margin,
either with all its sums, or with an error that names the lost process and a status that is not 0. No process may have a
wrong sum, and no process and no file may be left. Some rounds only pause a process or its link for a quarter of that
time: no process may fail. Some rounds start the job again at once on the same ports. Some let the stopped process
continue afterwards: it must end by itself, too.

If one of several servers dies, and in rounds of elastic jobs, the job must go on: every worker that is left has all its
sums, the same on all workers, with its own part in each. In some rounds a second job of the same shape starts on the
same port, without a secret: no process may have a sum of the other job's numbers, and a process that fails must name
the other job. In some rounds one rank aborts or destroys a group in which other ranks work: these get an error that
names that rank, and everything else goes on. In a quarter of the rounds the workers use one name for several operations
at once, in order. In some they still call operations while the job ends and after it (an error, no crash). In some,
every endpoint behaves as a network card that needs registered memory, and ends a process that uses the card wrongly
(this needs g++). In some, servers that die are restarted (herringrun --restart-servers). In some, all messages carry
checksums.

As root (with iproute2) each host is a network namespace; else all processes run on this machine and no link is cut.
Exit status 0 if nothing was wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import emulate_cluster as cluster
from chaos_group import GroupRound
from chaos_plan import Plan, make_plan
from chaos_round import Round, Verdict
from chaos_site import Site
from chaos_twin import TwinRound

MAX_HOSTS = 6
EMULATED_PORT = 29500


class EmulatedSite(Site):
    """Hosts that are network, IPC, UTS and mount namespaces on a bridge; made once, used by all rounds."""

    interface = "eth0"

    def __init__(self, hosts: int) -> None:
        cluster.make_switches(1)
        os.environ["TMPDIR"] = "/dev/shm"  # Of each host its own.
        self.hosts: list[cluster.Host] = []
        every_core = os.sched_getaffinity(0)
        for index in range(hosts):
            self.hosts.append(cluster.start_host(f"host{index}", cluster.address_of(index), every_core))
            cluster.connect(self.hosts[index], index, cluster.Link())
        self.address = self.hosts[0].address

    def enter(self, host: int, command: list[str]) -> list[str]:
        return cluster.enter(self.hosts[host], command)

    def cut(self, host: int) -> None:
        cluster.ip("link", "set", f"port{host}", "down")

    def heal(self, host: int) -> None:
        cluster.ip("link", "set", f"port{host}", "up")

    def lose(self, sender: int, receiver: int) -> None:
        # To a neighbour that is not there. The answer to a question for the right one would undo it, but none is asked.
        self.neighbour(sender, "replace", receiver, "lladdr", "02:00:00:00:00:ff", "dev", "eth0", "nud", "permanent")

    def find(self, sender: int, receiver: int) -> None:
        self.neighbour(sender, "del", receiver, "dev", "eth0")

    def neighbour(self, host: int, what: str, other: int, *how: str) -> None:
        command = ["ip", "neigh", what, self.hosts[other].address, *how]
        done = subprocess.run(["nsenter", "-t", str(self.hosts[host].pid), "-n", *command], check=False)
        if done.returncode != 0 and what != "del":
            raise cluster.EmulationError(f"{' '.join(command)} on host {host}: exit code {done.returncode}")

    def leftovers(self) -> set[str]:
        return {f"{host.name}:{name}" for host in self.hosts for name in os.listdir(f"/proc/{host.pid}/root/dev/shm")}

    def close(self) -> None:
        for host in self.hosts:
            cluster.end_host(host)


def free_port() -> int:
    """One whose relatives (MASTER_PORT + 1111 ...) are ports, too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 60_000:
            return port


def numbers_of(args: argparse.Namespace) -> list[int]:
    return [args.only] if args.only is not None else list(range(args.first, args.first + args.rounds))


def play(args: argparse.Namespace, make_site: Callable[[], Site], max_hosts: int) -> Iterator[Verdict]:
    """The rounds of this process, one after the other."""
    from herring._fabric import fabric_search  # Whether there is a herring at all is asked first.

    site = make_site()
    for number in numbers_of(args):
        plan = make_plan(args.seed, number, max_hosts, tuple(args.dead_after))
        port = EMULATED_PORT if max_hosts > 1 else free_port()
        site.strict_library, site.has_libfabric = args.strict_library, bool(fabric_search())
        yield kind_of(plan)(plan, site, port, args.margin).run()


def kind_of(plan: Plan) -> type[Round | TwinRound | GroupRound]:
    if plan.twin:
        return TwinRound
    return Round if plan.group_end is None else GroupRound


def build_strict_library(package: Path, folder: Path) -> Path | None:
    """None, and a word, where it cannot be."""
    sources, target = Path(__file__).resolve().parents[1], folder / "libchaos_strict.so"
    there = ["-L", str(package / "lib"), "-lherring", f"-Wl,-rpath,{package / 'lib'}"]
    include = [f"-I{sources / 'csrc'}", f"-I{sources / 'tests'}"]
    source = str(Path(__file__).with_name("chaos_strict.cc"))
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *include, "-o", str(target), source, *there]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"chaos: no strict endpoints: {error}", file=sys.stderr)
        return None
    return target


def show(verdict: Verdict, verbose: bool) -> None:
    state = "; ".join(problem.splitlines()[0] for problem in verdict.problems) or "ok"
    print(f"{verdict.name:>8}  {verdict.seconds:5.1f} s  {verdict.summary}: {verdict.outcome}: {state}", flush=True)
    if verdict.problems or verbose:
        print("\n".join([*verdict.problems, verdict.output]), flush=True)


def play_all(args: argparse.Namespace, make_site: Callable[[], Site], max_hosts: int, report: Path | None) -> int:
    verdicts = []
    for verdict in play(args, make_site, max_hosts):
        verdicts.append(asdict(verdict))
        show(verdict, args.only is not None)
        if report:  # After each round: what was found is kept, whatever comes next.
            report.write_text(json.dumps(verdicts))
    return 1 if any(verdict["problems"] for verdict in verdicts) else 0


def can_emulate() -> str:
    """Empty, or why there are no emulated hosts."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    return f"{missing[0]} is missing (apt-get install iproute2 util-linux)" if missing else ""


def play_here(args: argparse.Namespace, report: Path | None) -> int:
    """All rounds of this process, on emulated hosts where they were asked for and can be had."""
    why_not = can_emulate()
    if args.hosts > 1 and why_not:
        print(f"chaos: {why_not}: one host, plain processes, and no link is cut", file=sys.stderr)
    if args.hosts <= 1 or why_not:
        return play_all(args, Site, 0, report)

    def enclosed() -> int:
        return play_all(args, lambda: EmulatedSite(args.hosts), args.hosts, report)

    for number in cluster.SIGNALS:
        cluster.signal.signal(number, cluster.on_signal)
    return cluster.run_enclosed(enclosed)


def play_side_by_side(args: argparse.Namespace, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """--jobs processes of this program, each with its share of the rounds (and its own hosts)."""
    share = -(-args.rounds // args.jobs)
    runs = []
    for job in range(args.jobs):
        first = args.first + job * share
        rounds = min(share, args.first + args.rounds - first)
        if rounds <= 0:
            break
        own = ["--first", str(first), "--rounds", str(rounds), "--jobs", "1", "--share", str(folder / f"{job}.json")]
        fixed = ["--seed", str(args.seed), "--hosts", str(args.hosts), "--margin", str(args.margin)]
        dead_after = [word for value in args.dead_after for word in ("--dead-after", str(value))]
        strict = ["--strict-library", str(args.strict_library)] if args.strict_library else []
        command = [sys.executable, __file__, *own, *fixed, *dead_after, *strict]
        runs.append((folder / f"{job}.json", subprocess.Popen(command)))
    codes = [run.wait() for _, run in runs]
    verdicts = [verdict for path, _ in runs if path.exists() for verdict in json.loads(path.read_text())]
    return max(codes), verdicts


def summarize(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = (
        "hang",
        "wrong sum",
        "orphan",
        "leftover",
        "unnamed",
        "false alarm",
        "status",
        "slow",
        "again",
        "lost step",
    )
    problems = [problem for verdict in verdicts for problem in verdict["problems"]]
    counts = {kind: sum(problem.startswith(kind + ":") for problem in problems) for kind in kinds}
    detections: dict[str, list[float]] = {}
    for verdict in verdicts:
        for kind, dead_after_s, seconds in verdict["detections"]:
            detections.setdefault(f"{kind}, dead after {dead_after_s:g} s", []).append(seconds)
    return {
        "rounds": len(verdicts),
        "failed_rounds": [verdict["name"] for verdict in verdicts if verdict["problems"]],
        "counts": counts,
        "detection_s": {
            kind: {
                "errors": len(seconds),
                "median": round(statistics.median(seconds), 3),
                "max": round(max(seconds), 3),
            }
            for kind, seconds in sorted(detections.items())
        },
    }


def print_summary(summary: dict[str, Any]) -> None:
    print(f"\nchaos: {summary['rounds']} rounds; " + ", ".join(f"{n} {kind}" for kind, n in summary["counts"].items()))
    print(f"{'time from the strike to the error':<62} {'errors':>6} {'median':>8} {'max':>8}")
    for kind, row in summary["detection_s"].items():
        print(f"{kind:<62} {row['errors']:>6} {row['median']:>6.2f} s {row['max']:>6.2f} s")
    for name in summary["failed_rounds"]:
        seed, number = name.split("/")
        print(f"chaos: round {name} went wrong; again: benchmarks/chaos.py --seed {seed} --only {number}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="number of rounds (default 50)")
    parser.add_argument(
        "--seed", type=int, default=1, help="chooses the rounds; the same seed plays the same rounds (default 1)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first round (default 0)")
    parser.add_argument("--only", type=int, help="play only this round, and show all its output")
    parser.add_argument(
        "--hosts", type=int, default=MAX_HOSTS, help="number of emulated hosts, as root; 1: none (default 6)"
    )
    parser.add_argument(
        "--dead-after",
        type=float,
        action="append",
        help="a value of HERRING_DEAD_AFTER_S to choose from; repeatable (default 5 and 2)",
    )
    parser.add_argument(
        "--margin", type=float, default=8.0, help="seconds after that until a round counts as hung (default 8)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="rounds that run at the same time (default 1)")
    parser.add_argument("--json", type=Path, help="write the summary and every round to this file")
    parser.add_argument("--share", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--strict-library", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dead_after = args.dead_after or [5.0, 2.0]
    if args.rounds < 1 or args.jobs < 1:
        parser.error("at least one round and one job")
    return args


def main() -> int:
    args = parse()
    found = importlib.util.find_spec("herring")
    if found is None or found.origin is None:
        print("chaos: herring is not installed for this Python: pip install . in its source folder", file=sys.stderr)
        return 1
    package = Path(found.origin).resolve().parent
    os.environ["PYTHONPATH"] = str(package.parent)
    if args.share:
        return play_here(args, args.share)
    with tempfile.TemporaryDirectory() as folder:
        args.strict_library = build_strict_library(package, Path(folder))
        if args.jobs == 1 or args.only is not None:
            path = Path(folder) / "0.json"
            code = play_here(args, path)
            verdicts = json.loads(path.read_text()) if path.exists() else []
        else:
            code, verdicts = play_side_by_side(args, Path(folder))
    summary = summarize(verdicts)
    print_summary(summary)
    if args.json:
        args.json.write_text(json.dumps({**summary, "rounds_in_full": verdicts}, indent=1) + "\n")
    return code or (1 if len(verdicts) < len(numbers_of(args)) else 0)


if __name__ == "__main__":
    sys.exit(main())
