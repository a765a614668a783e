"""Arrays and tensors by name in one memory, which operations by these names read and write in place."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from herring import _core
from herring._errors import InvalidArgumentError

Place = Callable[[list[str], list[int]], tuple[_core.Memory, list[int]]]
"""Names and bytes: the memory, and where each tensor begins in it."""


def empty_like(named: Mapping[str, Any] | Iterable[tuple[str, Any]], place: Place) -> dict[str, Any]:
    """By name an uninitialised array like each one: torch's where it is torch's (a view for each tensor on the CPU,
    ordinary memory on other devices), else numpy's of its `shape` and `dtype`.

    Those of one dtype lie one after the other, in this order. Raises InvalidArgumentError.
    """
    pairs = _pairs(named)
    torch = sys.modules.get("torch")
    results: dict[str, Any] = {}
    kinds: dict[Any, list[tuple[str, tuple[int, ...], Any, int]]] = {}
    for name, like in pairs:
        if name is None:
            raise InvalidArgumentError("a name is None; every array needs a name of its own")
        _core.check_name(name)
        if name in results:
            raise InvalidArgumentError(f"{name!r} comes twice; every array needs a name of its own")
        results[name] = None
        if torch is not None and isinstance(like, torch.Tensor):
            if like.device.type != "cpu" or like.layout is not torch.strided:
                results[name] = torch.empty_like(like, requires_grad=False)
                continue
            kind, item_bytes = like.dtype, like.dtype.itemsize
        else:
            kind, item_bytes = _numpy_kind(name, like)
        shape = tuple(int(size) for size in like.shape)
        if any(size < 0 for size in shape):
            raise InvalidArgumentError(f"{name!r} has the shape {shape}; no dimension may be negative")
        kinds.setdefault(kind, []).append((name, shape, kind, math.prod(shape) * item_bytes))
    row = [each for kind in kinds.values() for each in kind]
    sizes = [nbytes for *_, nbytes in row]
    try:
        memory, offsets = place([name for name, *_ in row], sizes)
    except MemoryError as error:
        raise MemoryError(f"no memory for {len(row)} arrays of {sum(sizes) >> 20} MiB together") from error
    whole = memoryview(memory)
    for (name, shape, kind, nbytes), offset in zip(row, offsets, strict=True):
        part = whole[offset : offset + nbytes]
        if torch is not None and isinstance(kind, torch.dtype):
            # A storage of its own: a copy of one tensor is no copy of all.
            flat = torch.frombuffer(part, dtype=kind) if nbytes > 0 else torch.empty(0, dtype=kind)
            results[name] = flat.view(shape)
        else:
            import numpy as np

            results[name] = np.frombuffer(part, dtype=kind).reshape(shape)
    return results


def _pairs(named: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    if isinstance(named, Mapping):
        return list(named.items())
    try:
        return [(name, like) for name, like in named]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            "empty_like() takes a mapping of names to arrays, or pairs of a name and an array; "
            f"this {type(named).__name__} is neither"
        ) from error


def _numpy_kind(name: str, like: Any) -> tuple[Any, int]:
    import numpy as np

    try:
        kind = np.dtype(like.dtype)
        tuple(like.shape)
    except (AttributeError, TypeError) as error:
        raise InvalidArgumentError(
            f"{name!r} is a {type(like).__name__}; it must be an array, or have a shape and a numpy dtype"
        ) from error
    if kind.hasobject:
        raise InvalidArgumentError(f"{name!r}: dtype {kind} holds Python objects, which cannot be in shared memory")
    return kind, kind.itemsize
