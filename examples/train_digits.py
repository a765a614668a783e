"""Trains a small CNN on the handwritten digits that come with scikit-learn.

python examples/train_digits.py                                                one process
herringrun -np 2 --servers 2 python examples/train_digits.py --backend herring
torchrun --nproc-per-node 2 examples/train_digits.py --backend gloo             stock DDP
"""

from __future__ import annotations

import argparse

from training_arguments import parse

if __name__ == "__main__":
    args = parse(__doc__.splitlines()[0], steps=200)  # Here, so that --help works without torch.

import torch
import training
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

GLOBAL_BATCH = 64
TEST_IMAGES = 360


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def main(args: argparse.Namespace) -> None:
    rank, world = training.join(args.backend)
    training.set_threads(world)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    test, rest = order[:TEST_IMAGES], order[TEST_IMAGES:]
    torch.manual_seed(7)
    plain = make_model()
    model = training.wrap(plain, args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss_of_batch(step: int) -> torch.Tensor:
        chosen = rest[torch.randint(len(rest), (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))]
        mine = chosen[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
        return functional.cross_entropy(model(images[mine]), labels[mine])

    title = f"CNN on digits, {args.backend}, {world} proc"
    _, seconds = training.train(title, model, optimizer, loss_of_batch, args.steps, rank)
    plain.eval()
    with torch.no_grad():
        accuracy = (plain(images[test]).argmax(1) == labels[test]).float().mean().item()
    training.report(args, rank, world, plain, seconds, accuracy=accuracy)


if __name__ == "__main__":
    main(args)
