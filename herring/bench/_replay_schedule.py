"""When backward makes which gradients, the buckets that DDP would put them into, and what a step should then take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from herring._errors import InvalidArgumentError
from herring.bench._models import Model


@dataclass(frozen=True)
class Gradient:
    """`ready`: the share of the backward pass, 0 to 1, after which it is there."""

    name: str
    elements: int
    ready: float


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together; `ready` when the last of them is."""

    elements: int
    tensors: int
    ready: float


def gradients(model: Model, scale: float = 1.0) -> list[Gradient]:
    """In the order in which backward makes them: layers from the last to the first, each one's parameters too.

    A layer takes time in proportion to its multiply-adds (backward does twice those of forward, in every layer), and
    its gradients are there when it is done. `scale` shrinks every gradient and leaves the times as they are; each
    keeps at least one element. Raises InvalidArgumentError unless 0 < scale <= 1.
    """
    if not 0 < scale <= 1:
        raise InvalidArgumentError(f"--scale {scale:g}: above 0 and at most 1")
    trained = [layer for layer in reversed(model.layers) if not layer.is_frozen]
    total = sum(layer.macs for layer in trained)
    found, done = [], 0
    for layer in trained:
        done += layer.macs
        found += [
            Gradient(layer.name, max(1, round(prod(shape) * scale)), done / total) for shape in reversed(layer.shapes)
        ]
    return found


def buckets(found: Sequence[Gradient], element_bytes: int, caps: Sequence[int]) -> list[Bucket]:
    """As DistributedDataParallel fills them once it knows the order: a bucket is full when it has reached its cap, so
    the gradient that fills it may take it beyond. `caps`: bytes, of the first bucket, the second, ...; the last one is
    also that of all after it."""
    result: list[Bucket] = []
    elements = tensors = 0
    ready = 0.0
    for gradient in found:
        elements += gradient.elements
        tensors += 1
        ready = gradient.ready
        if elements * element_bytes >= caps[min(len(result), len(caps) - 1)]:
            result.append(Bucket(elements, tensors, ready))
            elements = tensors = 0
    if tensors:
        result.append(Bucket(elements, tensors, ready))
    return result


def _left(filled: Sequence[Bucket], communication_s: float) -> list[float]:
    """Seconds that each bucket and those after it take, if all of them take `communication_s`."""
    total = sum(bucket.elements for bucket in filled)
    left, sums = 0, []
    for bucket in reversed(filled):
        left += bucket.elements
        sums.append(communication_s * left / total)
    return sums[::-1]


def expected_step(filled: Sequence[Bucket], backward_s: float, communication_s: float) -> float:
    """Seconds of a step in which buckets are reduced one after the other, at the speed of all of them together, and
    none before it is ready: the largest of (ready + all from there on)."""
    left = _left(filled, communication_s)
    waits = (bucket.ready * backward_s + after for bucket, after in zip(filled, left, strict=True))
    return max(backward_s, *waits)


def backward_for(filled: Sequence[Bucket], communication_s: float, efficiency: float) -> float:
    """Seconds of backward at which backward / expected_step() is `efficiency`, above 0 and below 1.

    With f_i when bucket i is ready and C_i all communication from there on, backward / efficiency must be the largest
    of (f_i backward + C_i): so backward = max(C_i / (1 / efficiency - f_i)).
    """
    if not 0 < efficiency < 1:
        raise InvalidArgumentError(f"an efficiency of {efficiency:.0%}: above 0 % and below 100 %")
    left = _left(filled, communication_s)
    return max(after / (1 / efficiency - bucket.ready) for bucket, after in zip(filled, left, strict=True))
