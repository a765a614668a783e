"""horovod.common.util's names that scripts use."""

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

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
]
