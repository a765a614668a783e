"""What a launcher's variables say, before init(). Horovod's own tests ask here."""

from __future__ import annotations

import os

__all__ = ["get_env_rank_and_size"]

_NAMES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as herringrun or mpirun has set them; (0, 1) where none has.

    Raises RuntimeError where only one of the two is set.
    """
    for rank_name, size_name in _NAMES:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            given, missing = (size_name, rank_name) if rank is None else (rank_name, size_name)
            raise RuntimeError(f"{given} is set, and {missing} is not; set both, or none")
    return 0, 1
