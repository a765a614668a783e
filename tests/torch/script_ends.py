"""Ends with all-reduces of tensors on an accelerator under way, and without destroy_process_group()."""

import torch
import torch.distributed as dist
from accelerator import DEVICE, load

load()
dist.init_process_group("herring")
x = torch.ones(300_000).to(DEVICE)
dist.all_reduce(x)
for _ in range(5):
    dist.all_reduce(x, async_op=True)
