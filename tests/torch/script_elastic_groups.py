"""Groups of an elastic job while they are left, given up and lose a worker, drawn by a seed that all ranks know.

Every rank brings a power of ten, so that a sum says who is in it. Prints a line for each group that ended early, and
one at the end.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import herring.torch  # noqa: F401  (registers the backend where Herring is on the path only, not installed)

STEPS = 12
ELEMENTS = (3, 50_000)
KINDS = ("abort", "destroy", "kill", "nothing")
# Of four ranks, two on each of two hosts.
GROUPS = {"host": [0, 1], "across": [0, 2], "mixed": [3, 1, 2], "all": [3, 0, 2, 1]}
PATIENCE_S = 40.0
SOON_S = 20.0  # No more than a busy machine takes; far below the groups' patience.

torch.set_num_threads(1)


class Member:
    """One group as this rank sees it."""

    def __init__(self, name: str, ranks: list[int], group: Any) -> None:
        self.name, self.ranks, self.group = name, ranks, group
        self.over = ""

    def start(self, rank: int, step: int) -> list[tuple[torch.Tensor, Any]]:
        given = [torch.full((each,), float(10**rank * (step + 1)), dtype=torch.float64) for each in ELEMENTS]
        return [(each, dist.all_reduce(each, group=self.group, async_op=True)) for each in given]

    def check(self, rank: int, step: int, got: torch.Tensor, whole: bool) -> None:
        assert bool((got == got[0]).all()), f"{self.name}, step {step}: one sum has two sets of contributors"
        value, rest = divmod(int(got[0]), step + 1)
        digits = [int(each) for each in reversed(str(value))]
        there = {place for place, digit in enumerate(digits) if digit}
        assert rest == 0, f"{self.name}, step {step}: {int(got[0])} has data of another step"
        assert set(digits) <= {0, 1}, f"{self.name}, step {step}: {value}: somebody counts twice"
        assert rank in there, f"{self.name}, step {step}: {value} lacks rank {rank}'s own"
        assert there <= set(self.ranks), f"{self.name}, step {step}: {value} is not of {self.ranks}"
        assert not whole or there == set(self.ranks), f"{self.name}, step {step}: {value} lacks one that lives"


@dataclass(frozen=True)
class Event:
    """`rank` does this to a group in `step`, while operations of all groups run; "kill": to itself."""

    step: int
    kind: str
    group: str
    rank: int


def events_of(seed: int, size: int) -> list[Event]:
    """At most one death, never of rank 0, whose store torch needs."""
    dice = random.Random(seed)
    found: list[Event] = []
    for step in range(2, STEPS, 2):
        kind, name = dice.choice(KINDS), dice.choice(list(GROUPS))
        if kind == "nothing" or (kind == "kill" and any(event.kind == "kill" for event in found)):
            continue
        rank = dice.randrange(1, size) if kind == "kill" else dice.choice(GROUPS[name])
        found.append(Event(step, kind, name, rank))
    return found


def give_up(event: Event, members: list[Member]) -> None:
    one = next((one for one in members if one.name == event.group and not one.over), None)
    if event.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif one is not None:
        if event.kind == "abort":
            dist.distributed_c10d._abort_process_group(one.group)
        else:
            dist.destroy_process_group(one.group)
        one.over = event.kind


def await_end(one: Member, work: Any) -> str:
    """Empty, or the news that the group is over: nothing else may come."""
    began = time.monotonic()
    try:
        work.wait()
    except RuntimeError as error:
        text = str(error)
        if one.name == "world" or ("aborted the group" not in text and "has left the group" not in text):
            raise
    else:
        return ""
    assert time.monotonic() - began < SOON_S, f"{one.name}: the news came late: {text}"
    return text


def take_step(step: int, rank: int, members: list[Member], events: list[Event]) -> None:
    pending = [(one, one.start(rank, step)) for one in members if not one.over]
    for event in events:
        if (event.step, event.rank) == (step, rank):
            give_up(event, members)
    is_whole = not any(event.kind == "kill" and event.step <= step for event in events)
    for one, given in pending:
        for value, work in given:
            if one.over in ("abort", "destroy"):  # By this rank: what becomes of its operations it does not ask.
                continue
            if news := await_end(one, work):
                one.over = one.over or news
            else:
                one.check(rank, step, value, is_whole)


def main() -> None:
    seed = int(sys.argv[1])
    dist.init_process_group("herring", timeout=timedelta(seconds=PATIENCE_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    members = [Member("world", list(range(size)), None)]
    for name, ranks in GROUPS.items():
        group = dist.new_group(ranks)
        if rank in ranks:
            members.append(Member(name, ranks, group))
    events = events_of(seed, size)
    for step in range(STEPS):
        take_step(step, rank, members, events)
    for one in members[1:]:
        if one.over not in ("abort", "destroy", ""):
            sys.stdout.write(f"rank {rank}: {one.name}: {one.over}\n")
    sys.stdout.write(f"rank {rank}: all {STEPS} steps of seed {seed}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
