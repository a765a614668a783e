"""horovod.common.util's names that scripts use."""

import re

from herring.horovod._engine.info import (
    ccl_built,
    cuda_built,
    ddl_built,
    extension_available,
    gloo_built,
    gpu_available,
    mpi_built,
    nccl_built,
    num_rank_is_power_2,
    rocm_built,
)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` (major.minor.patch) or newer; what comes before a release is older than it.

    Raises ValueError where these are no versions.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"versions are compared as text, and these are {ver!r} and {target!r}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"the target is {target!r}; it must be major.minor.patch")
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(\.?(?:a|b|rc|dev)\d*)?", ver)
    if not found:
        raise ValueError(f"{ver!r} is not a version")
    numbers = [int(each or 0) for each in found.groups()[:3]]
    return (*numbers, 0 if found[4] else 1) >= (*map(int, target.split(".")), 1)


__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
]
