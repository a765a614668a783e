"""What each rank does in test_torch_mismatch.py."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import expect_error, world

import herring

Call = Callable[[Any], Any]


def _calls(rank: int, size: int) -> dict[str, Call]:
    """Each starts its collective in a group of all ranks. Rank 0 is the root."""
    mine = torch.full((4,), rank + 1.0)

    def blocks(count: int = 4) -> list[torch.Tensor]:
        return [torch.zeros(count) for _ in range(size)]

    def uneven(group: Any) -> Any:
        return dist.all_gather([torch.zeros(each + 1) for each in range(size)], torch.ones(rank + 1), group, True)

    return {
        "all_reduce": lambda group: dist.all_reduce(mine.clone(), group=group, async_op=True),
        "broadcast": lambda group: dist.broadcast(mine.clone(), 0, group, True),
        "all_gather": lambda group: dist.all_gather(blocks(), mine, group, True),
        "barrier": lambda group: dist.barrier(group, True),
        # Where the ranks divide 4: of all_reduce's shape.
        "reduce": lambda group: dist.reduce(mine.clone(), 0, group=group, async_op=True),
        "reduce_scatter": lambda group: dist.reduce_scatter(
            torch.zeros(4 // size), blocks(4 // size), group=group, async_op=True
        ),
        "gather": lambda group: dist.gather(mine, blocks() if rank == 0 else None, 0, group, True),
        "scatter": lambda group: dist.scatter(mine.clone(), blocks() if rank == 0 else None, 0, group, True),
        "all_to_all": lambda group: dist.all_to_all(blocks(), blocks(), group, True),
        "all_gather of several sizes": uneven,
    }


def every_pair() -> None:
    """All at once, each pair in a group of its own: the last rank calls the second, all others the first."""
    with world() as (rank, size):
        calls = _calls(rank, size)
        pairs = list(itertools.permutations(calls, 2))
        groups = [dist.new_group(timeout=timedelta(seconds=60)) for _ in pairs]
        dist.barrier()
        started = time.monotonic()
        works = [calls[pair[rank == size - 1]](group) for pair, group in zip(pairs, groups, strict=True)]
        wrong = []
        for pair, work in zip(pairs, works, strict=True):
            try:
                work.wait()
            except dist.DistBackendError as error:
                text = str(error)
            else:
                # It got all that it waits for before anybody could know better.
                text = "" if size > 2 and pair[0] in ("gather", "scatter", "broadcast") and rank < size - 1 else "ok"
            # " reduce(" is no part of "all_reduce(".
            names = [f" {each}(" if each == "reduce" else each for each in pair]
            ranks = ["rank 0", f"rank {size - 1}"] if size == 2 else [f"{size - 1}"]
            if text and not all(part in text for part in ["mismatch", *names, *ranks]):
                wrong.append((pair, text))
        took = time.monotonic() - started
        assert not wrong, (len(wrong), wrong[:4])
        assert took < float(os.environ.get("LONGEST", "30")), took  # Their time-out is twice that.
        # The job goes on.
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value.tolist() == [float(size)] * 3
        dist.barrier()


def late_is_no_mismatch() -> None:
    """A rank that comes long after the others to the same collectives: all is well, and small calls stay quick."""
    with world() as (rank, size):
        calls = _calls(rank, size)
        for name in ("gather", "scatter", "all_to_all", "all_gather of several sizes"):
            group = dist.new_group()
            if rank == size - 1:
                time.sleep(4.5)
            work = calls[name](group)
            work.wait()
            after = torch.ones(2)
            dist.all_reduce(after, group=group)
            assert after.tolist() == [float(size)] * 2


def destroy_in_time(case: str) -> None:
    """Something pending that never ends: destroying takes no time-out, and it ends with an error."""
    dist.init_process_group("herring", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = dist.new_group(), dist.new_group()
    dist.barrier()
    value = torch.ones(1000)
    works = []
    if case == "receive":
        works.append(dist.irecv(torch.zeros(3), (rank + 1) % size))
    elif case == "apart":
        works.append(dist.all_reduce(value, group=first if rank == 0 else second, async_op=True))
    elif case == "composed":
        works.append(_calls(rank, size)["gather" if rank == 0 else "scatter"](first if rank == 0 else second))
    elif case == "one":
        works += [dist.all_reduce(value, group=first, async_op=True)] if rank == 0 else []
    started = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - started
    for work in works:
        with expect_error(RuntimeError, "left"):
            work.wait()
    assert took < 3, took  # A drain would take 5 s.


def late_after_a_loss() -> None:
    """Rank 0 has called a gather when rank 2 dies, rank 1 calls it only when the job goes on without rank 2."""
    dist.init_process_group("herring", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    dist.barrier()
    if rank == 2:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    changed = threading.Event()
    herring.on_membership_change(lambda _: changed.set())
    value = torch.ones(2)
    works = [dist.gather(value, [value, value] if rank == 0 else None, 0, pair, True)] if rank == 0 else []
    assert changed.wait(20)
    if rank == 1:
        works = [dist.gather(value, None, 0, pair, True)]
    started = time.monotonic()
    with expect_error(RuntimeError, "peer lost", "call it again" if rank == 1 else "worker 2"):
        works[0].wait()
    assert time.monotonic() - started < 10
    # Called again by both: all is well.
    gathered = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
    dist.gather(value * rank, gathered, 0, pair)
    assert gathered is None or [each.tolist() for each in gathered] == [[0, 0], [1, 1]]
    dist.all_reduce(value, group=pair)
    assert value.tolist() == [2, 2]
    sys.stdout.write(f"rank {rank}: told in time\n")
    sys.stdout.flush()
    dist.destroy_process_group()
