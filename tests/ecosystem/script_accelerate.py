"""A training script for Hugging Face Accelerate: script_accelerate.py BACKEND."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from report import batches, report

dist.init_process_group(sys.argv[1])
accelerator = Accelerator(cpu=True)

torch.manual_seed(accelerator.process_index)  # prepare() makes the models alike
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(batches(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
gathered = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index]))
assert gathered.tolist() == list(range(accelerator.num_processes))
assert accelerator.reduce(torch.ones(1), reduction="sum").item() == accelerator.num_processes
report(accelerator.unwrap_model(model))
accelerator.end_training()  # destroys the process group
