"""Herring's DDP in an elastic job: rank 1 of 3 dies in step 3; afterwards gradients are the survivors' average."""

import os
import signal
import sys

import torch
import torch.distributed as dist

from herring.torch.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("herring")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1, bias=False), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
alone = torch.nn.Linear(8, 1, bias=False)


def gradient(of, step, weight):
    """What that rank's gradient is, computed here."""
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + of))
    copy = weight.clone().requires_grad_()
    torch.nn.functional.linear(data, copy).square().mean().backward()
    return copy.grad


for step in range(8):
    weight = model.module.weight.detach().clone()
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = model(data).square().mean()
    if step == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss.backward()
    ranks = range(3) if step < 3 else (0, 2)
    expected = sum(gradient(of, step, weight) for of in ranks) / len(ranks)
    assert torch.allclose(model.module.weight.grad, expected, atol=1e-6), f"step {step} on rank {rank}"
    optimizer.step()
same = torch.stack([model.module.weight.detach().sum()])
least, most = same.clone(), same.clone()
dist.all_reduce(least, op=dist.ReduceOp.MIN)
dist.all_reduce(most, op=dist.ReduceOp.MAX)
assert torch.equal(least, most)
sys.stdout.write(f"rank {rank}: the right average in all steps\n")
sys.stdout.flush()
os._exit(0) if "quick" in sys.argv else dist.destroy_process_group()
