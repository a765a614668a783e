"""Under torchrun --max-restarts=1: the first time rank 1 dies, and the agent starts all again; then all goes well."""

import os
import signal
import sys

import torch
import torch.distributed as dist

import herring.torch  # noqa: F401

dist.init_process_group("herring")
value = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(value)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(value)
assert value[0] == 6.0
sys.stdout.write(f"rank {dist.get_rank()} in round {os.environ['TORCHELASTIC_RESTART_COUNT']}: all is well\n")
sys.stdout.flush()
dist.destroy_process_group()
