"""A training script that knows nothing of its launcher; prints what every rank ended with."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

if "imports" in sys.argv:
    import herring.torch  # noqa: F401

    print("local rank", os.environ["LOCAL_RANK"])

dist.init_process_group("herring")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    torch.manual_seed(10 * step + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
if "fails" in sys.argv and dist.get_rank() == 1:
    raise ValueError("rank 1 has had enough")
if "fails" in sys.argv:
    dist.barrier()
values = [f"{value:.9f}" for parameter in model.parameters() for value in parameter.flatten().tolist()]
# One write: the launchers mix their ranks' output.
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} ended with {' '.join(values)}\n")
sys.stdout.flush()
dist.destroy_process_group()
