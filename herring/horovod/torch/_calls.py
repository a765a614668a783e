"""Horovod's calls. Each takes tensors of the dtypes of herring.allreduce(), contiguous or not, all of
a call on the CPU or all on one GPU (docs/gpu.md): results are then for the current stream of the thread that waits.

Without a name, calls match in the order they are made on each rank; with one, in any order. `_async` calls return a
handle for poll() and synchronize(). All raise HorovodInternalError where ranks disagree, one is lost or a timeout
passes; ValueError for arguments that do not work here. Calls without a handle can be differentiated through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from herring.horovod._engine import info
from herring.horovod._engine.engine import home
from herring.horovod._engine.process_sets import ProcessSet, global_process_set
from herring.horovod._engine.reduce_ops import Average, Sum, reduce_op
from herring.horovod.torch import _autograd as autograd
from herring.horovod.torch import _operations as operations
from herring.horovod.torch._compression import Compression
from herring.horovod.torch._operations import handles

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a reduction into a new tensor. Default op: Average; `average` is the older way to say it."""
    op = Average if op is None and average is None else reduce_op(op, average)
    return operations.all_reduce_async(tensor, None, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a reduction in place."""
    op = Average if op is None and average is None else reduce_op(op, average)
    return operations.all_reduce_async(tensor, tensor, name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The ranks' tensors, multiplied by prescale_factor, combined by `op`, multiplied by postscale_factor."""
    op = reduce_op(op, average)
    sent, context = compression.compress(tensor)
    result = autograd.all_reduce([sent], name, op, prescale_factor, postscale_factor, process_set)[0]
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """allreduce() in place; returns `tensor`."""
    op = reduce_op(op, average)
    operations.all_reduce(
        [tensor], [tensor], name, op, prescale_factor, postscale_factor, process_set, waits=True
    ).wait()
    return tensor


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts the reductions of a list as one operation; the result is a list of new tensors."""
    op = reduce_op(op, average)
    return handles.add(operations.all_reduce(tensors, None, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """grouped_allreduce_async() in place."""
    op = reduce_op(op, average)
    return handles.add(
        operations.all_reduce(tensors, tensors, name, op, prescale_factor, postscale_factor, process_set)
    )


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """allreduce() of each tensor of a list, as one operation."""
    op = reduce_op(op, average)
    sent = [compression.compress(each) for each in tensors]
    results = autograd.all_reduce([each for each, _ in sent], name, op, prescale_factor, postscale_factor, process_set)
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """grouped_allreduce() in place; returns the tensors."""
    op = reduce_op(op, average)
    operations.all_reduce(tensors, tensors, name, op, prescale_factor, postscale_factor, process_set, waits=True).wait()
    return list(tensors)


class SparseHandle:
    """What sparse_allreduce_async() returns: call it, or pass it to synchronize(), for the result."""

    def __init__(self, tensor: Tensor, name: str | None, op: int, process_set: ProcessSet) -> None:
        if not tensor.is_sparse:
            raise ValueError("sparse_allreduce_async takes a sparse COO tensor; use allreduce_async for a dense one")
        if op not in (Average, Sum):
            raise ValueError("sparse_allreduce_async: op must be hvd.Average or hvd.Sum")
        if not tensor.is_cpu:
            raise ValueError(
                f"sparse_allreduce_async: the tensor is on {tensor.device}; sparse tensors work on the CPU: use "
                "sparse_as_dense=True, tensor.to_dense() or tensor.cpu()"
            )
        # As it is, not coalesced: entries of one place are added wherever the result is used.
        tensor = tensor.detach()
        self._like, self._op, self._process_set = tensor, op, process_set
        parts = [tensor._indices().t().contiguous(), tensor._values()]
        self._gathered = operations.all_gather(parts, name, process_set)

    def poll(self) -> bool:
        """Whether the call would not block."""
        return self._gathered.poll()

    def __call__(self) -> Tensor:
        indices, values = self._gathered.wait()
        if self._op == Average:
            values = values / (self._process_set.size() or 1)
        return torch.sparse_coo_tensor(indices.t(), values, self._like.size(), dtype=self._like.dtype)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> SparseHandle:
    """Starts the sum or average of sparse tensors: the ranks' entries, put together. Returns a function that waits."""
    return SparseHandle(tensor, name, op, process_set)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts joining the ranks' tensors along the first dimension, in which they may differ."""
    return handles.add(operations.all_gather([tensor], name, process_set), is_one=True)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The ranks' tensors, joined along the first dimension, in which they may differ."""
    return autograd.all_gather([tensor], name, process_set)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """allgather_async() of a list, as one operation."""
    return handles.add(operations.all_gather(tensors, name, process_set))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """allgather() of each tensor of a list, as one operation."""
    return list(autograd.all_gather(tensors, name, process_set))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast into a new tensor. `root_rank` is a rank of the job, also with a process set."""
    return handles.add(
        operations.broadcast(tensor, tensor.detach().new_empty(tensor.shape), root_rank, name, process_set)
    )


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast in place."""
    return handles.add(operations.broadcast(tensor, tensor, root_rank, name, process_set))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """A new tensor with rank `root_rank`'s elements."""
    return autograd.broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """broadcast() in place; returns `tensor`."""
    operations.broadcast(tensor, tensor, root_rank, name, process_set, waits=True).wait()
    return tensor


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an alltoall(); synchronize() returns (rows, number of rows from each rank), with splits or without."""
    return handles.add(operations.all_to_all(tensor, splits, name, process_set))


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends splits[i] rows of `tensor` to rank i (equally many to each without splits); returns the rows that came, in
    order of rank, and, where splits were given, how many came from each."""
    return autograd.all_to_all(tensor, splits, name, process_set)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reducescatter()."""
    started = operations.reduce_scatter([tensor], name, op, prescale_factor, postscale_factor, process_set)
    return handles.add(started, is_one=True)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduced tensor: as many for each rank, one more for the first ones where they do not come
    out even."""
    sent, context = compression.compress(tensor)
    result = autograd.reduce_scatter([sent], name, op, prescale_factor, postscale_factor, process_set)[0]
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """reducescatter_async() of a list, as one operation."""
    return handles.add(operations.reduce_scatter(tensors, name, op, prescale_factor, postscale_factor, process_set))


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """reducescatter() of each tensor of a list, as one operation."""
    sent = [compression.compress(each) for each in tensors]
    results = autograd.reduce_scatter(
        [each for each, _ in sent], name, op, prescale_factor, postscale_factor, process_set
    )
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)]


def poll(handle: int | SparseHandle) -> bool:
    """Whether synchronize() would not block. Raises ValueError for a handle that was synchronized already."""
    return handle.poll() if isinstance(handle, SparseHandle) else handles.poll(handle)


def synchronize(handle: int | SparseHandle) -> Any:
    """Waits for the operation and returns its result; None for a handle that was synchronized already."""
    return handle() if type(handle) is SparseHandle else handles.synchronize(handle)  # type: ignore[arg-type]


def join(device: int = -1) -> int:
    """Says that this rank has no more data, and returns when all ranks have said so: the rank that did last.

    Meanwhile the others' allreduces go on as if this rank brought zeros (what changes nothing, for Min, Max and
    Product); averages still divide by the number of all ranks. Barriers count it as come; other collectives fail on
    all ranks. `device` says nothing here.
    """
    return home.current().joins.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    operations.barrier(process_set)


def shutdown() -> None:
    """Finishes what is pending and leaves the job; handles are void."""
    handles.clear()
    info.shutdown()
