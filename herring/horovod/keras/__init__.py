"""Horovod's Keras API on Herring: `import herring.horovod.keras as hvd`. See docs/horovod.md."""

from typing import Any

from herring._errors import missing_package

try:
    import keras
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as _error:
    raise missing_package(__name__, "tensorflow", _error) from _error

from herring.horovod._engine.info import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from herring.horovod._engine.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from herring.horovod._engine.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from herring.horovod._keras import models as _models
from herring.horovod._keras.models import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter
from herring.horovod.keras import callbacks, elastic
from herring.horovod.tensorflow._calls import init
from herring.horovod.tensorflow._optimizer import DistributedKerasOptimizer as DistributedOptimizer
from herring.horovod.tensorflow._optimizer import PartialDistributedOptimizer
from herring.horovod.tensorflow.compression import Compression


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved model whose optimizer, with its state, is a DistributedOptimizer from now on."""
    del legacy_opts
    return _models.load(keras, filepath, custom_optimizers, custom_objects, compression)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
