"""The ten lines that a training script needs. Run: herringrun -np 2 python examples/minimal.py"""

import torch
import torch.distributed as dist

import herring.torch  # 1: registers the backend

dist.init_process_group("herring")  # 2: instead of "gloo"
model = torch.nn.Linear(64, 8)
model = herring.torch.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)  # 3: not torch.nn's
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()  # gradients are averaged while backward goes on
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.4f}")
dist.destroy_process_group()
