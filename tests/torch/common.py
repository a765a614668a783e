"""What the case modules share: groups, inputs that every rank can work out, and comparisons across ranks."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import herring.torch  # noqa: F401  (registers the backend where Herring is on the path only, not installed)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_calls = itertools.count()


@contextlib.contextmanager
def world(backend: str = "herring", seconds: float = 60, **arguments: Any) -> Iterator[tuple[int, int]]:
    """The default group; yields (rank, size)."""
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **arguments)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def data(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rank `rank`'s input: small numbers, so that products and integer sums stay in range."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if dtype.is_complex:
        return torch.complex(data(rank, shape, torch.float32, seed), data(rank + 500, shape, torch.float32, seed)).to(
            dtype
        )
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1).to(dtype)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    size = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    return {"rtol": size.get(real, 0.0), "atol": size.get(real, 0.0)}


def same_everywhere(tensor: torch.Tensor, what: str) -> None:
    """Every rank holds the same bits. Told over the store, not over what is being tested."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    store, call = _get_default_store(), next(_calls)
    digest = hashlib.sha256(content).hexdigest()
    store.set(f"same/{call}/{dist.get_rank()}", digest)
    for rank in range(dist.get_world_size()):
        theirs = store.get(f"same/{call}/{rank}").decode()
        assert theirs == digest, f"{what}: rank {rank} has other bits than rank {dist.get_rank()}"


def expect_error(kinds: Any, *parts: str) -> Any:
    """A context in which one of `kinds` is raised with all `parts` in its text; gives the error."""
    return _Expect(kinds, parts)


class _Expect(contextlib.AbstractContextManager["_Expect"]):
    def __init__(self, kinds: Any, parts: tuple[str, ...]) -> None:
        self.kinds, self.parts, self.text = kinds, parts, ""

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        assert error is not None, f"expected {self.kinds}, nothing was raised"
        if not isinstance(error, self.kinds):
            return False
        self.text = str(error)
        missing = [part for part in self.parts if part not in self.text]
        assert not missing, f"{missing} not in: {self.text}"
        return True
