"""Under herringrun with 3 ranks and a server process: rank 2 is stopped while it sends to the server.

The group of ranks 0 and 2 fails by its time-out; the group of ranks 0 and 1 goes on all the time.
"""

import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import herring.torch  # noqa: F401

STOPPED_S = 11.0  # Longer than the server waits for what a failed operation may still send.


def stop_while_it_sends(pid: int, work: dist.Work, group: dist.ProcessGroup) -> None:
    """Ranks 0 and 1 sum while rank 2 is stopped; `work` is of rank 0 and 2."""
    time.sleep(0.15)
    os.kill(pid, signal.SIGSTOP)
    try:
        sum_for(STOPPED_S, group)
        try:
            work.wait()
        except RuntimeError as error:
            # Parts that begin later have what is left of the 3 s, and all of them end together.
            after = re.search(r"timeout \(after ([\d.]+) s", str(error))
            if after is None or not 2 < float(after.group(1)) <= 3:
                raise
        else:
            sys.exit("rank 2 was stopped too late")
    finally:
        os.kill(pid, signal.SIGCONT)


def sum_for(seconds: float, group: dist.ProcessGroup) -> None:
    """The ranks agree on the end: the first of them says how often."""
    begun, more, count = time.monotonic(), torch.ones(1), 0
    while more[0]:
        value = torch.full((1000,), 1.0 + dist.get_rank())
        dist.all_reduce(value, group=group)
        assert value[0] == 3.0, value
        count += 1
        more[0] = float(time.monotonic() - begun < seconds)
        dist.broadcast(more, 0, group=group)
    sys.stdout.write(f"rank {dist.get_rank()}: {count} sums\n")


dist.init_process_group("herring", timeout=timedelta(seconds=60))
rank, store = dist.get_rank(), _get_default_store()
pair = dist.new_group([0, 1], timeout=timedelta(seconds=8))
other = dist.new_group([0, 2], timeout=timedelta(seconds=3))
large = torch.ones(100_000_000) if rank != 1 else torch.ones(0)
store.set(f"pid/{rank}", str(os.getpid()))
dist.barrier()
if rank == 0:
    stop_while_it_sends(int(store.get("pid/2")), dist.all_reduce(large, group=other, async_op=True), pair)
elif rank == 1:
    sum_for(STOPPED_S, pair)
else:
    try:
        dist.all_reduce(large, group=other)
    except RuntimeError:
        sys.stdout.write("rank 2: goes on\n")
dist.barrier()
sys.stdout.write(f"rank {rank}: ended\n")
sys.stdout.flush()
dist.destroy_process_group()
