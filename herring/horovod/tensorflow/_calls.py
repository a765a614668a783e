"""Horovod's calls, in eager mode, in tf.function and in graphs of TensorFlow 1.

With a name, calls of different ranks match by it; without, in eager mode by their order and in a graph by the tensor's
name there. All can be differentiated through. TensorFlow's errors tell of what goes wrong between ranks:
FailedPreconditionError where they disagree, AbortedError for a lost one, DeadlineExceededError after the timeout; a
ValueError is an argument that does not work here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from herring import _composed as collectives
from herring._errors import InvalidArgumentError
from herring.horovod._engine import info
from herring.horovod._engine.engine import home
from herring.horovod._engine.process_sets import ProcessSet, global_process_set, members_of
from herring.horovod._engine.reduce_ops import Adasum, Average, Sum, reduce_op
from herring.horovod.tensorflow import _operations as operations
from herring.horovod.tensorflow._door import door, group_of
from herring.horovod.tensorflow.compression import Compression
from herring.tensorflow import _ops as ops
from herring.tensorflow._collectives import dense


def init(comm: Any = None, process_sets: Iterable[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Joins the job, as herring.horovod's other init()s; graphs that are built before it run after it."""
    info.init(comm, process_sets)
    door.members(global_process_set)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The ranks' tensors, multiplied by prescale_factor, combined by `op`, multiplied by postscale_factor.

    IndexedSlices (for Sum and Average): the ranks' slices, put together. Default op: Average. The devices and
    `ignore_name_scope` say nothing here.
    """
    del device_dense, device_sparse, ignore_name_scope
    op = reduce_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        _check_sparse(op, prescale_factor, postscale_factor)
        return gather_slices([tensor], [name], op, process_set)[0]
    sent, context = compression.compress(dense(tensor))
    result = operations.all_reduce([sent], name, op, prescale_factor, postscale_factor, process_set)[0]
    return compression.decompress(result, context)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """allreduce() of each tensor of a list; all travel at once."""
    del device_dense, device_sparse, ignore_name_scope
    op = reduce_op(op, average)
    results = list(tensors)
    sparse = [index for index, each in enumerate(tensors) if isinstance(each, tf.IndexedSlices)]
    others = [index for index in range(len(tensors)) if index not in sparse]
    if sparse:
        _check_sparse(op, prescale_factor, postscale_factor)
        names = [None if name is None else f"{name}.{index}" for index in sparse]
        gathered = gather_slices([tensors[index] for index in sparse], names, op, process_set)
        for index, each in zip(sparse, gathered, strict=True):
            results[index] = each
    if others:
        sent = [compression.compress(dense(tensors[index])) for index in others]
        reduced = operations.all_reduce(
            [each for each, _ in sent], name, op, prescale_factor, postscale_factor, process_set
        )
        for index, each, (_, context) in zip(others, reduced, sent, strict=True):
            results[index] = compression.decompress(each, context)
    return results


def _check_sparse(op: int, prescale_factor: float, postscale_factor: float) -> None:
    if op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not currently support sparse tensors. As a workaround please pass "
            "sparse_as_dense=True to DistributedOptimizer"
        )
    if op not in (Sum, Average):
        raise NotImplementedError("Only Sum and Average ops are supported with tf.IndexedSlices")
    if prescale_factor != 1.0 or postscale_factor != 1.0:
        raise NotImplementedError("Pre/postscale_factor are not supported with tf.IndexedSlices")


def gather_slices(slices: Sequence[Any], names: Sequence[str | None], op: int, process_set: ProcessSet) -> list[Any]:
    """The ranks' IndexedSlices, put together: their sum, or their average."""
    values = operations.all_gather([each.values for each in slices], _joint(names, "values"), process_set)
    indices = operations.all_gather([each.indices for each in slices], _joint(names, "indices"), process_set)
    if op == Average:
        size = ops.place(ops.SIZE, members_of(process_set).set_id)  # Asked for when it runs: elastic jobs.
        values = [each / tf.cast(size, each.dtype) for each in values]
    return [
        tf.IndexedSlices(value, index, each.dense_shape)
        for value, index, each in zip(values, indices, slices, strict=True)
    ]


def _joint(names: Sequence[str | None], part: str) -> str | None:
    return None if names[0] is None else f"{names[0]}.{part}"


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The ranks' tensors, joined along the first dimension, in which they may differ."""
    del ignore_name_scope
    return operations.all_gather([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """allgather() of each tensor of a list; all travel at once."""
    del ignore_name_scope
    return operations.all_gather(tensors, name, process_set) if tensors else []


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensor of rank `root_rank` (of the job, also with process sets)."""
    del ignore_name_scope
    return operations.broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gives the variables the values that they have on rank `root_rank`; returns those."""
    results = broadcast_values(variables, root_rank, name, process_set)
    return [tf.convert_to_tensor(variable.assign(result)) for variable, result in zip(variables, results, strict=True)]


def broadcast_values(variables: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> list[Any]:
    """The values of rank `root_rank`; variables are matched by their names and places."""
    members = operations.member_of(process_set, "broadcast")
    root = operations.root_within(members, root_rank)
    names = [f"{name or 'variable'}.{index}.{variable.name}" for index, variable in enumerate(variables)]
    return ops.broadcast_all([tf.convert_to_tensor(each) for each in variables], names, root, group_of(members))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rows to each rank, splits[i] of them to rank i (None: equally many); the rows that came from all, in their order.

    With splits, also how many came from each.
    """
    del ignore_name_scope
    result, received = operations.all_to_all(tensor, splits, name, process_set)
    return result if splits is None else (result, received)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction; one more for the first ranks where they do not come out even."""
    del device_dense, ignore_name_scope
    sent, context = compression.compress(dense(tensor))
    result = operations.reduce_scatter([sent], name, op, prescale_factor, postscale_factor, process_set)[0]
    return compression.decompress(result, context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """reducescatter() of each tensor of a list; all travel at once."""
    del device_dense
    if not tensors:
        return []
    sent = [compression.compress(dense(each)) for each in tensors]
    results = operations.reduce_scatter(
        [each for each, _ in sent], name, op, prescale_factor, postscale_factor, process_set
    )
    return [compression.decompress(result, context) for result, (_, context) in zip(results, sent, strict=True)]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it. In a tf.function: what comes after it there runs then."""
    if tf.executing_eagerly():
        home.current().run("barrier", None, members_of(process_set).set_id, collectives.barrier)
    else:
        operations.all_reduce([tf.zeros([1], tf.uint8)], "barrier", Sum, 1.0, 1.0, process_set)


def join() -> Any:
    """Waits until all ranks have called it, while this one takes part, without data, in the others' allreduces; the
    rank that came last."""
    door.members(global_process_set)
    if tf.executing_eagerly():
        return tf.constant(home.current().joins.join(), tf.int32)
    return tf.py_function(_join_now, [], tf.int32)


def _join_now() -> int:
    return home.current().joins.join()


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Number of the set's ranks, when the graph runs."""
    return _place(ops.SIZE, process_set_id, name)


def rank_op(name: str | None = None) -> Any:
    """This process's rank, when the graph runs."""
    return _place(ops.RANK, 0, name)


def local_rank_op(name: str | None = None) -> Any:
    """Its rank on its host, when the graph runs."""
    return _place(ops.LOCAL_RANK, 0, name)


def local_size_op(name: str | None = None) -> Any:
    """Number of processes on its host, when the graph runs."""
    return _place(ops.LOCAL_SIZE, 0, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """When the graph runs: 1 where this process is in the set, else 0; -1 before init(), -3 for no set."""
    return _place(ops.INCLUDED, process_set_id, name)


def _place(what: int, process_set_id: int, name: str | None) -> Any:
    engine = home.peek()
    known = [] if engine is None else [each for each in engine.sets() if each.set_id == process_set_id]
    for members in known:
        door.know(members)
    number = ops.place(what, process_set_id)
    return number if name is None else tf.identity(number, name)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether Adasum works among so many ranks."""
    if num_rank <= 0:
        raise InvalidArgumentError(f"num_rank is {num_rank}; there is at least one")
    return num_rank & (num_rank - 1) == 0
