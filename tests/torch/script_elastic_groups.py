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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import herring.torch  # noqa: F401  (registers the backend where Herring is on the path only, not installed)

STEPS = 12
ELEMENTS = (3, 50_000)
KINDS = ("abort", "destroy", "kill", "nothing")
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


def events_of(seed: int, names: list[str], groups: dict[str, list[int]], size: int) -> list[tuple[int, str, str, int]]:
    """(step, kind, group, rank): at most one death, never of rank 0, whose store torch needs."""
    dice = random.Random(seed)
    found, has_death = [], False
    for step in range(2, STEPS, 2):
        kind, name = dice.choice(KINDS), dice.choice(names)
        if kind == "nothing" or (kind == "kill" and has_death):
            continue
        has_death = has_death or kind == "kill"
        rank = dice.randrange(1, size) if kind == "kill" else dice.choice(groups[name])
        found.append((step, kind, name, rank))
    return found


def give_up(kind: str, one: Member) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "abort":
        dist.distributed_c10d._abort_process_group(one.group)
    else:
        dist.destroy_process_group(one.group)
    one.over = kind


def take_step(step: int, rank: int, members: list[Member], events: list[tuple[int, str, str, int]], dead: set[int]) -> None:
    pending = {one.name: one.start(rank, step) for one in members if not one.over}
    for at, kind, name, who in events:
        # (A rank that is dead, or a group that is over, can do nothing any more: on all ranks alike.)
        if at == step and who not in dead and rank == who:
            mine = next((one for one in members if one.name == name and not one.over), None)
            if kind == "kill" or mine is not None:
                give_up(kind, mine or members[0])
                if mine is not None and kind != "kill":
                    pending.pop(mine.name)
    for one in members:
        for value, work in pending.get(one.name, []):
            began = time.monotonic()
            try:
                work.wait()
            except RuntimeError as error:
                assert one.name != "world", f"the job does not go on: {error}"
                assert "aborted the group" in str(error) or "has left the group" in str(error), str(error)
                assert time.monotonic() - began < SOON_S, f"{one.name}: the news came late: {error}"
                one.over = one.over or str(error)
                continue
            one.check(rank, step, value, whole=not any(each in dead for each in one.ranks) and not deaths_by(events, step))


def deaths_by(events: list[tuple[int, str, str, int]], step: int) -> set[int]:
    return {who for at, kind, _, who in events if kind == "kill" and at <= step}


def main() -> None:
    seed = int(sys.argv[1])
    dist.init_process_group("herring", timeout=timedelta(seconds=PATIENCE_S))
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {"host": [0, 1], "across": [0, 2], "mixed": [3, 1, 2], "all": [3, 0, 2, 1]}
    members = [Member("world", list(range(size)), None)]
    for name, ranks in groups.items():
        group = dist.new_group(ranks)
        if rank in ranks:
            members.append(Member(name, ranks, group))
    events = events_of(seed, list(groups), groups, size)
    for step in range(STEPS):
        take_step(step, rank, members, events, deaths_by(events, step - 1))
    for one in members[1:]:
        if one.over not in ("abort", "destroy", ""):
            sys.stdout.write(f"rank {rank}: {one.name}: {one.over}\n")
    sys.stdout.write(f"rank {rank}: all {STEPS} steps of seed {seed}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
