"""One worker of a chaos round in which a group of some ranks is given up: torch's groups (see chaos.py).

Arguments: the number of steps, the group's ranks, who gives it up, how ("abort" or "destroy"), and in which step. Every
step sums in the group and in the whole job. Told on stdout as by chaos_worker.py: "given up" by who does it, "group
error" with the text by the others of the group, and the rest.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from datetime import timedelta

from chaos_worker import WRONG_SUM, say

SIZES = (3, 40_000)
PATIENCE_S = 60.0


def main() -> None:
    steps, members = int(sys.argv[1]), [int(rank) for rank in sys.argv[2].split(",")]
    culprit, how, at = int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    say("start")
    import torch
    import torch.distributed as dist

    import herring.torch

    say("connect")
    dist.init_process_group("herring", timeout=timedelta(seconds=PATIENCE_S))
    rank, size = dist.get_rank(), dist.get_world_size()

    def tensor(step: int, elements: int) -> torch.Tensor:
        return torch.full((elements,), float(10**rank * (step + 1)))

    def check(step: int, got: torch.Tensor, ranks: list[int]) -> None:
        if not bool((got == float(sum(10**each for each in ranks) * (step + 1))).all()):
            say("wrong", step=step, ranks=ranks, first=float(got[0]))
            os._exit(WRONG_SUM)

    def in_group(step: int, group: dist.ProcessGroup) -> None:
        """Several at once, one of them too large to be done at once."""
        given = [(each, dist.all_reduce(each, group=group, async_op=True)) for each in map(tensor, [step] * 2, SIZES)]
        if rank == culprit and step == at:
            say("given up")
            dist.distributed_c10d._abort_process_group(group) if how == "abort" else dist.destroy_process_group(group)
            return
        for each, work in given:
            work.wait()
            check(step, each, members)

    say("connected", how=herring.description())
    everybody, group = list(range(size)), dist.new_group(members)
    in_use = rank in members
    for step in range(steps):
        say("step", step=step)
        world = [tensor(step, elements) for elements in SIZES]
        works = [dist.all_reduce(each, async_op=True) for each in world]
        if in_use:
            began = time.monotonic()
            try:
                in_group(step, group)
            except RuntimeError as error:
                say("group error", text=str(error), seconds=time.monotonic() - began)
                in_use = False
            in_use = in_use and not (rank == culprit and step == at)
        for each, work in zip(world, works, strict=True):
            work.wait()
            check(step, each, everybody)
    again = dist.new_group(members)
    if rank in members:
        value = tensor(steps, SIZES[1])
        dist.all_reduce(value, group=again)
        check(steps, value, members)
    say("shutdown")
    dist.destroy_process_group()
    say("done")


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    main()
