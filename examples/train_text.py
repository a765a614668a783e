"""Trains a small transformer to write like the Python manual (the English text in the standard library's pydoc_data).

python examples/train_text.py                                                one process
herringrun -np 2 --servers 2 python examples/train_text.py --backend herring
torchrun --nproc-per-node 2 examples/train_text.py --backend gloo             stock DDP
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

from training_arguments import parse

if __name__ == "__main__":
    args = parse(__doc__.splitlines()[0], steps=120)  # Here, so that --help works without torch.

import torch
import training
from torch import nn
from torch.nn import functional

CONTEXT = 64
GLOBAL_BATCH = 32
EVAL_BATCHES = 8


class Transformer(nn.Module):
    """Decoder-only, over bytes: 4 layers, width 192."""

    def __init__(self, width: int = 192, layers: int = 4, heads: int = 6) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.token(tokens) + self.position
        return self.head(self.norm(self.body(hidden, mask=self.mask, is_causal=True)))


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and evaluation bytes."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    data = torch.tensor(list(text.encode()), dtype=torch.long)
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:]


def batch(data: torch.Tensor, seed: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a global batch that depends on the seed alone: any number of ranks sees the same data."""
    starts = torch.randint(len(data) - CONTEXT - 1, (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(seed))
    rows = starts[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
    window = torch.stack([data[start : start + CONTEXT + 1] for start in rows.tolist()])
    return window[:, :-1], window[:, 1:]


def main(args: argparse.Namespace) -> None:
    rank, world = training.join(args.backend)
    training.set_threads(world)
    train_data, eval_data = load_text()
    torch.manual_seed(7)
    plain = Transformer()
    model = training.wrap(plain, args.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(data: torch.Tensor, seed: int, first: int, of: int, net: nn.Module) -> torch.Tensor:
        tokens, targets = batch(data, seed, first, of)
        return functional.cross_entropy(net(tokens).flatten(0, 1), targets.flatten())

    _, seconds = training.train(
        f"transformer, {args.backend}, {world} proc",
        model,
        optimizer,
        lambda step: loss_of(train_data, step, rank, world, model),
        args.steps,
        rank,
    )
    plain.eval()
    with torch.no_grad():
        losses = [loss_of(eval_data, 10_000 + i, 0, 1, plain).item() for i in range(EVAL_BATCHES)]
    training.report(args, rank, world, plain, seconds, eval_loss=sum(losses) / len(losses))


if __name__ == "__main__":
    main(args)
