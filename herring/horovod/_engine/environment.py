"""Variables that Horovod reads: its own, HOROVOD_*, and what a launcher says before init()."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar

from herring._errors import InvalidArgumentError

NumberT = TypeVar("NumberT", int, float)
_PLACES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_set(name: str) -> bool:
    """As Horovod reads its switches: any number but 0."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false")


def read_number(
    name: str, otherwise: NumberT, what: str, parse: Callable[[str], NumberT], limit: float = math.inf
) -> NumberT:
    """The variable's number, from 0 to below `limit`; `otherwise` where it is not set or empty.

    Raises InvalidArgumentError that says `what` it takes.
    """
    text = os.environ.get(name, "")
    if not text:
        return otherwise
    try:
        value = parse(text)
    except ValueError:
        value = parse("-1")
    if not 0 <= value < limit:
        raise InvalidArgumentError(f"{name} is {text!r}; it takes {what}")
    return value


def get_env_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as herringrun or mpirun has set them; (0, 1) where none has.

    Raises RuntimeError where only one of the two is set.
    """
    for rank_name, size_name in _PLACES:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            given, missing = (size_name, rank_name) if rank is None else (rank_name, size_name)
            raise RuntimeError(f"{given} is set, and {missing} is not; set both, or none")
    return 0, 1
