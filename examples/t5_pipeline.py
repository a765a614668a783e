"""A small T5-like encoder-decoder, split over 2 pipeline stages x 2 data-parallel replicas: 4 processes on Herring.

herringrun -np 4 python examples/t5_pipeline.py        or: torchrun --nproc-per-node 4 examples/t5_pipeline.py

It learns to go on with the Python manual, as the decoder, from what the encoder read. Stage 0 holds the embedding,
which encoder and decoder share, and the encoder; stage 1 the decoder and the head. Messages between stages go from rank
to rank; gradients are averaged between the replicas of a stage. In the end the losses are compared with one process's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps (default 60)")
    parser.add_argument("--json", type=Path, help="write the losses to this file")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()  # Here, so that --help works without torch.

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from train_text import load_text
from training import ProgressLine, set_threads

from herring.torch.parallel import DistributedDataParallel

LENGTH = 32  # bytes that the encoder reads, and that the decoder writes
BATCH = 16  # of all replicas together
STAGES, REPLICAS, MICROBATCHES = 2, 2, 4
MAX_DISTANCE = 8
TOLERANCE = 1e-3  # of a loss between 2 and 6: replicas add the same gradients in another order than one process


class Attention(nn.Module):
    """T5's: no biases, no scaling, a learned bias for each distance (clipped) and head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.distance = nn.Embedding(2 * MAX_DISTANCE + 1, heads)
        nn.init.normal_(self.query.weight, std=width**-1.0)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, is_causal: bool) -> torch.Tensor:
        def split(each: torch.Tensor) -> torch.Tensor:
            return each.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        keys, values = self.key_value(memory).chunk(2, dim=-1)
        away = torch.arange(memory.shape[1])[None, :] - torch.arange(x.shape[1])[:, None]
        bias = self.distance(away.clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE).permute(2, 0, 1)
        if is_causal:
            bias = bias.masked_fill(away > 0, float("-inf"))
        scores = split(self.query(x)) @ split(keys).transpose(-1, -2) + bias
        return self.out((scores.softmax(-1) @ split(values)).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, in a decoder also over the encoder's memory, and a feed-forward block; each normed before."""

    def __init__(self, width: int, heads: int, is_decoder: bool) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.attention = Attention(width, heads)
        self.cross = Attention(width, heads) if is_decoder else None
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if is_decoder else 2))
        self.inner = nn.Linear(width, 4 * width, bias=False)
        self.outer = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, self.is_decoder)
        if self.cross is not None and memory is not None:
            x = x + self.cross(self.norms[1](x), memory, False)
        return x + self.outer(torch.relu(self.inner(self.norms[-1](x))))


class Encoder(nn.Module):
    """Stage 0: (bytes read, bytes written so far) -> (what the encoder remembers, the decoder's embedded input)."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, heads, False) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, source: torch.Tensor, written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(source)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x), self.embed(written)


class Decoder(nn.Module):
    """Stage 1: -> logits of the next byte."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, True) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, memory: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(self.norm(x))


def make_stages(width: int = 64, heads: int = 4, layers: int = 2) -> list[nn.Module]:
    """The same weights in every process."""
    torch.manual_seed(7)
    return [Encoder(width, heads, layers), Decoder(width, heads, layers)]


def batch(data: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(source, decoder's input, target) of the global batch."""
    starts = torch.randint(len(data) - 2 * LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    window = torch.stack([data[start : start + 2 * LENGTH] for start in starts.tolist()])
    return window[:, :LENGTH], window[:, LENGTH - 1 : -1], window[:, LENGTH:]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def train_split(data: torch.Tensor, steps: int) -> list[float]:
    """This process's share of the training; the mean loss of each step, the same on all ranks."""
    mesh = init_device_mesh("cpu", (REPLICAS, STAGES), mesh_dim_names=("data", "stage"))
    replica, number = mesh["data"].get_local_rank(), mesh["stage"].get_local_rank()
    part = DistributedDataParallel(make_stages()[number], process_group=mesh["data"].get_group())
    stage = PipelineStage(part, number, STAGES, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    line = ProgressLine("T5, 2 stages x 2 replicas", steps, show=dist.get_rank() == 0)
    means = []
    for step in range(steps):
        source, written, target = (each.chunk(REPLICAS)[replica] for each in batch(data, step))
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if number == 0:
            schedule.step(source, written)
        else:
            schedule.step(target=target, losses=losses)
        optimizer.step()
        mean = torch.stack([each.detach() for each in losses]).mean() if losses else torch.zeros(())
        dist.all_reduce(mean)  # The first stage has no loss and adds nothing.
        means.append(mean.item() / REPLICAS)
        line.update(step + 1, means[-1])
    return means


def train_whole(data: torch.Tensor, steps: int) -> list[float]:
    """The same training in one process."""
    encoder, decoder = make_stages()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    losses = []
    for step in range(steps):
        source, written, target = batch(data, step)
        optimizer.zero_grad()
        loss = loss_of(decoder(*encoder(source, written)), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(args: argparse.Namespace) -> int:
    dist.init_process_group("herring")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != STAGES * REPLICAS:
        sys.exit(f"t5_pipeline: needs {STAGES * REPLICAS} processes (2 stages x 2 replicas), got {world}")
    set_threads(world)
    data = load_text()[0]
    begun = time.monotonic()
    losses = train_split(data, args.steps)
    seconds = time.monotonic() - begun
    dist.destroy_process_group()
    if rank != 0:
        return 0
    alone = train_whole(data, args.steps)
    worst = max(abs(mine - theirs) for mine, theirs in zip(losses, alone, strict=True))
    if args.json:
        args.json.write_text(json.dumps({"split": losses, "one process": alone}) + "\n")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps, {1e3 * seconds / args.steps:.0f} ms each")
    print(f"one process: {alone[0]:.4f} -> {alone[-1]:.4f}; largest difference {worst:.2e}, allowed {TOLERANCE}")
    print(f"t5_pipeline: {'OK' if worst <= TOLERANCE else 'FAILED: the losses differ'}")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main(args))
