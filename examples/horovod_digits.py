"""A script written for Horovod, on Herring: only its import is another. A small CNN on scikit-learn's digits.

herringrun -np 2 python examples/horovod_digits.py
torchrun --nproc-per-node 2 examples/horovod_digits.py
mpirun -n 2 python examples/horovod_digits.py
"""

import argparse


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data (default 5)")
    parser.add_argument("--fp16-allreduce", action="store_true", help="halve what is sent")
    parser.add_argument("--adasum", action="store_true", help="combine steps by Adasum instead of averaging gradients")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()  # Here, so that --help works without torch.

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import herring.horovod.torch as hvd  # was: import horovod.torch as hvd


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def main(arguments: argparse.Namespace) -> None:
    hvd.init()
    torch.manual_seed(42 + hvd.rank())  # broadcast_parameters() makes the models alike
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = Subset(data, range(1400)), Subset(data, range(1400, len(data)))
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=32, sampler=sampler)

    model = make_model()
    factor = 1 if arguments.adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * factor, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if arguments.adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        # Each rank looks at its own part of the test data.
        part = Subset(test, range(hvd.rank(), len(test), hvd.size()))
        inputs, targets = next(iter(DataLoader(part, batch_size=len(part))))
        with torch.no_grad():
            right = (model(inputs).argmax(1) == targets).sum()
        accuracy = hvd.allreduce(right, op=hvd.Sum, name="accuracy").item() / len(test)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main(arguments)
