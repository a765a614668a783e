"""An elastic training script, as Horovod's users write it: `script_elastic.py MARK MODE`."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import herring
import herring.horovod.torch as hvd

mark, mode = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.set_num_threads(1)
hvd.init()
born = hvd.rank()
truth = torch.arange(1.0, 5.0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sizes = []
state = hvd.elastic.TorchState(model, optimizer, batch=0, losses=[])
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
deadline = time.monotonic() + 60


@hvd.elastic.run
def train(state):
    whole = 0
    while True:
        generator = torch.Generator().manual_seed(state.batch * 100 + hvd.rank())
        data = torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        loss = ((model(data).squeeze(1) - data @ truth) ** 2).mean()
        loss.backward()
        if born == 1 and state.batch == (0 if mode == "first" else 6) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "late" and born == 2 and state.batch == 6 and not sizes:
            while herring.size() == 3:  # Its call comes after the loss, the other's before it.
                time.sleep(0.01)
        if mode != "reduce":
            assert hvd.allgather(torch.ones(2), name="blocks").shape == (2 * hvd.size(),)
        optimizer.step()
        state.losses = [*state.losses, float(hvd.allreduce(loss.detach(), name="loss"))]
        state.batch += 1
        assert time.monotonic() < deadline, "the job never became whole again"
        ready = torch.tensor([whole >= 10])
        if bool(hvd.allreduce(ready.float(), name="ready", op=hvd.Min)):
            return
        whole += int(mark.exists() and hvd.size() == 3)
        if state.batch % 2 == 0:
            state.commit()


train(state)
assert len(state.losses) == state.batch
assert state.losses[-1] < state.losses[0] / 10, state.losses
same = hvd.allgather_object(model[0].weight.detach().numpy().tobytes())
assert same == same[:1] * 3
assert sizes[-1:] in ([], [3]), sizes  # A new one never was with others.
os.write(1, f"elastic: {state.batch} batches, sizes {sizes}, the same on {hvd.size()}\n".encode())
hvd.shutdown()
