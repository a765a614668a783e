"""Plays seeded schedules through the engines, messages, the ranks of a host and elastic jobs, on all cores.

Each schedule is one seed of a world in the C++ tests: real engines under a virtual clock, with deaths, cut links,
delays, damaged and doubled messages, servers and workers that go and come. What has to hold (no wait without an end,
every sum right to the bit, nothing added twice, one outcome on all) is in the tests; this hands out the seeds, shows
how far they are, and ends with the seeds that failed and the command that plays each of them again.

    make sim                                    100,000 schedules
    python benchmarks/sim.py --seeds 5000       as many in all, shared out in the same way
    python benchmarks/sim.py --only elastic:77  one of them
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 500  # Seeds that one process plays.
CHUNK_LIMIT_S = 900.0


@dataclasses.dataclass(frozen=True)
class World:
    name: str
    binary: str
    test: str
    share: int  # Of the seeds, in hundredths.
    first: int = 1


WORLDS = [
    World("engines", "test_engines", "EngineSchedules.EveryResultIsBitIdenticalInTenThousandSeededSchedules", 30),
    World("damage", "test_engines", "EngineFailures.DataThatIsDamagedAgainAndAgainFailsTheOperationEverywhere", 2),
    World("disagree", "test_engines", "EngineFailures.RanksThatDisagreeAllLearnWhoSaidWhatAndNothingElseSuffers", 2),
    World("never-comes", "test_engines", "EngineFailures.ARankThatNeverComesIsNamedAndHearsOfItWhenItDoes", 2),
    World("abort", "test_engines", "EngineFailures.AnAbortEndsTheOperationForAllWithItsReason", 2),
    World("worker-dies", "test_engines", "EngineFailures.ALostWorkerFailsWhatNeedsItAndNothingElse", 4),
    World("server-dies", "test_engines", "EngineFailures.ALostLaneFailsEveryOperationThatUsesIt", 2),
    World("last-server", "test_engines", "EngineFailures.WithFailoverTheLastLanesDeathIsAnErrorOfEveryRank", 2),
    World("hostile", "test_engines", "EngineFailures.HostileMessagesAreCountedAndChangeNothing", 2),
    World("backup", "test_engines", "BackupSchedules.AllAgreeOnWhoIsInAndOnTheSumOfThoseInThreeThousandSchedules", 6),
    World("backup-fails", "test_engines", "BackupSchedules.WhenAWorkerIsLostAllEndsAndWhatEndsWellIsRight", 2),
    World("messages", "test_point_to_point", "MessageSchedules.EveryMessageMeetsItsReceiveInOrder", 8),
    World("messages-fail", "test_point_to_point", "MessageSchedules.FailuresEndEverythingOnceAndLeaveNothingBehind", 6),
    World("host", "test_intra_node", "EngineSchedules.EveryResultIsTheTreeSumWhateverTheSchedule", 4),
    World(
        "host-fails",
        "test_intra_node",
        "EngineSchedules.FaultsEndEveryOperationAndNobodyTouchesItsMemoryAfterwards",
        8,
        100001,
    ),
    World("elastic", "test_elastic", "ElasticWorld.WhateverBefallsIt", 18),
]


@dataclasses.dataclass
class Tally:
    seeds: int = 0
    seconds: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)


def command_of(world: World, build: Path) -> list[str]:
    return [str(build / "tests" / world.binary), f"--gtest_filter={world.test}"]


def replay_of(world: World, seed: str, build: Path) -> str:
    return f"HERRING_TEST_SEED={seed} {shlex.join(command_of(world, build))}"


def play(world: World, first: int, count: int, build: Path) -> tuple[float, list[str]]:
    """Seconds, and what failed: the commands that play it again."""
    command = command_of(world, build)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HERRING_TEST_")}
    environment |= {"HERRING_TEST_FIRST": str(first), "HERRING_TEST_SCHEDULES": str(count)}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CHUNK_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return time.monotonic() - begin, [f"{world.name}: one of the seeds {first} to {first + count - 1} never ends"]
    seconds = time.monotonic() - begin
    if done.returncode == 0 and "[  PASSED  ] 1 test." in done.stdout:
        return seconds, []
    seeds = list(dict.fromkeys(re.findall(r"seed (\d+)", done.stdout)))
    if seeds:
        return seconds, [f"{world.name}: seed {seed}: {replay_of(world, seed, build)}" for seed in seeds]
    said = (done.stdout + done.stderr).strip().splitlines()[-3:]
    return seconds, [f"{world.name}: seeds {first} to {first + count - 1}, exit {done.returncode}: {' / '.join(said)}"]


def chunks_of(worlds: list[World], seeds: int, start: int) -> list[tuple[World, int, int]]:
    """Every world's seeds in pieces, in turn, so that a failure of any of them is seen early."""
    whole = sum(world.share for world in worlds)
    pieces = []
    for world in worlds:
        count = max(1, round(seeds * world.share / whole))
        for number, at in enumerate(range(0, count, CHUNK)):
            pieces.append((number * CHUNK / count, world, world.first + start + at, min(CHUNK, count - at)))
    pieces.sort(key=lambda piece: piece[0])
    return [(world, first, count) for _, world, first, count in pieces]


def say_progress(done: int, total: int, begin: float, failures: int) -> None:
    spent = time.monotonic() - begin
    left = spent / max(done, 1) * (total - done)
    text = f"{done} of {total} schedules, {failures} failures, {spent:.0f} s, about {left:.0f} s left"
    if sys.stderr.isatty():
        print(f"\r{text} ", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def run(worlds: list[World], args: argparse.Namespace) -> dict[str, Tally]:
    todo = chunks_of(worlds, args.seeds, args.first)
    total = sum(count for _, _, count in todo)
    tallies = {world.name: Tally() for world in worlds}
    begin = last_said = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        running: dict[Future[tuple[float, list[str]]], tuple[World, int]] = {}
        while todo or running:
            while todo and len(running) < args.jobs:
                world, first, count = todo.pop(0)
                running[pool.submit(play, world, first, count, args.build)] = (world, count)
            for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                world, count = running.pop(future)
                seconds, failures = future.result()
                tally = tallies[world.name]
                tally.seeds += count
                tally.seconds += seconds
                tally.failures += failures
                for failure in failures:
                    print(f"FAILED {failure}", flush=True)
            if time.monotonic() - last_said > (1.0 if sys.stderr.isatty() else 10.0):
                last_said = time.monotonic()
                done = sum(tally.seeds for tally in tallies.values())
                say_progress(done, total, begin, sum(len(tally.failures) for tally in tallies.values()))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return tallies


def replay(only: str, build: Path) -> int:
    name, _, seed = only.partition(":")
    world = next((world for world in WORLDS if world.name == name), None)
    if world is None or not seed.isdigit():
        raise SystemExit(f"--only takes WORLD:SEED, where WORLD is one of {', '.join(each.name for each in WORLDS)}")
    return subprocess.run(
        command_of(world, build), env={**os.environ, "HERRING_TEST_SEED": seed}, check=False
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100_000, help="number of schedules (default %(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, help="skip this number of seeds, to play other schedules (default 0)"
    )
    parser.add_argument("--only", metavar="WORLD:SEED", help="play only this schedule and show its output")
    parser.add_argument("--worlds", nargs="+", choices=[world.name for world in WORLDS], help="play only these worlds")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at the same time (default: number of cores)"
    )
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build" / "tests", help="folder in which the C++ tests are built"
    )
    args = parser.parse_args()
    args.build = Path(os.path.relpath(args.build))
    if not (args.build / "tests" / WORLDS[0].binary).exists():
        parser.error(f"no C++ tests in {args.build}: `make sim` builds them, or say --build FOLDER")
    if args.only:
        return replay(args.only, args.build)
    worlds = [world for world in WORLDS if not args.worlds or world.name in args.worlds]
    begin = time.monotonic()
    tallies = run(worlds, args)
    print(f"{'world':<14} {'schedules':>9} {'process s':>9}  failures")
    for world in worlds:
        tally = tallies[world.name]
        print(f"{world.name:<14} {tally.seeds:>9} {tally.seconds:>9.1f}  {len(tally.failures)}")
    failures = [failure for tally in tallies.values() for failure in tally.failures]
    seeds = sum(tally.seeds for tally in tallies.values())
    print(f"{seeds} schedules in {time.monotonic() - begin:.0f} s with {args.jobs} processes: {len(failures)} failures")
    for failure in failures:
        print(f"  {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
