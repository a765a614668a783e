"""Tensors in, tensors out, over the ranks of a process set; with gradients as Horovod defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from herring._errors import InvalidArgumentError
from herring.horovod._engine.engine import GLOBAL_SET, Members
from herring.horovod._engine.process_sets import ProcessSet
from herring.horovod._engine.reduce_ops import OPS, Adasum, Average, Sum
from herring.horovod.tensorflow._door import door, group_of
from herring.tensorflow import _ops as ops
from herring.tensorflow._collectives import dense, graph_name
from herring.tensorflow._gradients import reduce_together


def member_of(process_set: ProcessSet, what: str) -> Members:
    """The set's ranks. Raises TensorFlow's InvalidArgumentError, as Horovod does, where this one is not among them."""
    members = door.members(process_set)
    if members.index is None:
        text = f"{what}: this rank is not in process set {members.set_id}, which has ranks {list(members.ranks)}"
        raise tf.errors.InvalidArgumentError(None, None, f"herring: {text}")
    return members


def names_of(values: Sequence[Any], name: str | None) -> list[str]:
    """What matches them with those of other ranks. "": in eager mode, the order of calls does; a graph has none."""
    if name is None and tf.executing_eagerly():
        return [""] * len(values)
    own = [graph_name(value) if name is None else name for value in values]
    return own if len(own) == 1 else [f"{each}.{index}" for index, each in enumerate(own)]


def scaled(value: Any, factor: float) -> Any:
    """Integers are multiplied in float64 and truncated, 16-bit floats multiplied in float32."""
    if isinstance(factor, (int, float)) and factor == 1.0:
        return value
    dtype = value.dtype
    wide = tf.float64 if not dtype.is_floating else tf.float32 if dtype.size == 2 else dtype
    return tf.cast(tf.cast(value, wide) * tf.cast(factor, wide), dtype)


def _differentiable(
    values: Sequence[Any], run: Callable[[list[Any]], list[Any]], back: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """run(values), whose gradients are back(gradients of the results)."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def apply(*inputs: Any) -> tuple[Any, Callable[..., Any]]:
        results = run(list(inputs))

        def gradient(*upstream: Any) -> Any:
            found = back([None if each is None else dense(each) for each in upstream])
            return found[0] if len(inputs) == 1 else found

        return results[0] if len(results) == 1 else tuple(results), gradient

    results = apply(*values)
    return list(results) if isinstance(results, (tuple, list)) else [results]


def all_reduce(
    values: Sequence[Any], name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet
) -> list[Any]:
    """Backwards: the same reduction of the gradients."""
    members = member_of(process_set, "allreduce")
    tensors = [dense(each) for each in values]
    labels = names_of(tensors, name)

    def run(inputs: list[Any]) -> list[Any]:
        sent = [scaled(each, prescale) for each in inputs]
        if op == Adasum:
            results = adasum(sent, labels, members)
        elif len(sent) == 1:
            results = ops.reduce_all(sent, labels, OPS[op], group_of(members))
        else:
            # In eager mode the order of calls tells groups without a name apart, and their places in them the tensors.
            results = reduce_together(sent, labels, OPS[op], name or "group", group_of(members))
        return [scaled(each, postscale) for each in results]

    def back(upstream: list[Any]) -> list[Any]:
        label = None if name is None else f"{name}.gradient"
        return all_reduce(upstream, label, op, prescale, postscale, process_set)

    return _differentiable(tensors, run, back)


def all_gather(values: Sequence[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    """Backwards: this rank's rows of the gradients' average."""
    members = member_of(process_set, "allgather")
    tensors = [dense(each) for each in values]
    if any(each.shape.rank == 0 for each in tensors):
        text = "herring: allgather needs at least one dimension; a tensor is a scalar"
        raise tf.errors.InvalidArgumentError(None, None, text)
    labels = names_of(tensors, name)

    def run(inputs: list[Any]) -> list[Any]:
        return ops.gather_all(inputs, labels, group_of(members))

    def back(upstream: list[Any]) -> list[Any]:
        counts = [tf.shape(each, tf.int64)[:1] for each in tensors]
        label = None if name is None else f"{name}.rows"
        lengths = ops.gather_all(counts, names_of(counts, label), group_of(members))
        label = None if name is None else f"{name}.gradient"
        averages = all_reduce(upstream, label, Average, 1.0, 1.0, process_set)
        starts = [tf.reduce_sum(each[: members.index]) for each in lengths]
        return [average[start : start + own[0]] for average, start, own in zip(averages, starts, counts, strict=True)]

    return _differentiable(tensors, run, back)


def broadcast(value: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    """Backwards: the gradients' average on the root, zeros elsewhere."""
    members = member_of(process_set, "broadcast")
    root = root_within(members, root_rank)
    tensor = dense(value)
    labels = names_of([tensor], name)

    def run(inputs: list[Any]) -> list[Any]:
        return ops.broadcast_all(inputs, labels, root, group_of(members))

    def back(upstream: list[Any]) -> list[Any]:
        label = None if name is None else f"{name}.gradient"
        average = all_reduce(upstream, label, Average, 1.0, 1.0, process_set)[0]
        if members.index == root:
            return [average]
        with tf.control_dependencies([average]):  # A graph of TensorFlow 1 leaves out what nobody uses.
            return [tf.zeros_like(average)]

    return _differentiable([tensor], run, back)[0]


def root_within(members: Members, root_rank: int) -> int:
    """Where rank `root_rank` of the job is in the set. Raises InvalidArgumentError where it is not."""
    if root_rank not in members.ranks:
        raise InvalidArgumentError(
            f"broadcast: root rank {root_rank} is not among ranks {list(members.ranks)} of process set {members.set_id}"
        )
    return members.ranks.index(root_rank)


def all_to_all(value: Any, splits: Any, name: str | None, process_set: ProcessSet) -> tuple[Any, Any]:
    """(Rows that came, how many from each). Backwards: the way back; rows that went nowhere have no gradient."""
    members = member_of(process_set, "alltoall")
    tensor = dense(value)
    given = tf.constant([], tf.int32) if splits is None else tf.convert_to_tensor(splits)
    if given.dtype not in (tf.int32, tf.int64):
        raise tf.errors.InvalidArgumentError(
            None, None, f"herring: alltoall: splits are {given.dtype.name}; they must be int32 or int64"
        )
    labels = names_of([tensor], name)
    received: list[Any] = []

    def run(inputs: list[Any]) -> list[Any]:
        result, counts = ops.run(ops.ALL_TO_ALL, inputs, labels, group=group_of(members), splits=given)
        result.set_shape([None, *inputs[0].shape[1:]] if inputs[0].shape.rank else None)
        counts.set_shape([len(members.ranks)])
        received[:] = [counts]
        return [result, counts]

    def back(upstream: list[Any]) -> list[Any]:
        label = None if name is None else f"{name}.gradient"
        rows, _ = all_to_all(upstream[0], received[0], label, process_set)
        missing = tf.shape(tensor)[0] - tf.shape(rows)[0]
        padding = [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1)
        return [tf.pad(rows, padding)]

    result, counts = _differentiable([tensor], run, back)
    return result, counts


def reduce_scatter(
    values: Sequence[Any], name: str | None, op: int, prescale: float, postscale: float, process_set: ProcessSet
) -> list[Any]:
    """Backwards: the gathered gradients; for a sum times the number of ranks, as Horovod has it."""
    members = member_of(process_set, "reducescatter")
    if op not in OPS:
        raise InvalidArgumentError("reducescatter: op must be hvd.Average, Sum, Min, Max or Product")
    tensors = [dense(each) for each in values]
    labels = names_of(tensors, name)

    def run(inputs: list[Any]) -> list[Any]:
        sent = [scaled(each, prescale) for each in inputs]
        results = ops.run(ops.REDUCE_SCATTER, sent, labels, reduce=OPS[op], group=group_of(members))
        return [scaled(each, postscale) for each in results]

    def back(upstream: list[Any]) -> list[Any]:
        factor = prescale * postscale * (len(members.ranks) if op == Sum else 1)
        label = None if name is None else f"{name}.gradient"
        return all_gather([scaled(each, factor) for each in upstream], label, process_set)

    return _differentiable(tensors, run, back)


def adasum(values: Sequence[Any], names: Sequence[str], members: Members) -> list[Any]:
    """Adasum of each over all ranks: all have the ranks' tensors, and combine them in the same tree."""
    size = len(members.ranks)
    if members.set_id != GLOBAL_SET:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if size & (size - 1):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    if not all(each.dtype.is_floating for each in values):
        raise InvalidArgumentError("Adasum is for tensors of floating point")
    gathered = ops.gather_all([each[None] for each in values], names, group_of(members))
    results = []
    for value, rows in zip(values, gathered, strict=True):
        nodes = [tf.cast(rows[index], tf.float64) for index in range(size)]
        while len(nodes) > 1:
            nodes = [_adasum_pair(a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
        result = tf.cast(nodes[0], value.dtype)
        result.set_shape(value.shape)
        results.append(result)
    return results


def _adasum_pair(a: Any, b: Any) -> Any:
    """Each of two loses half of its projection on the other (Maleki et al., "Scaling Distributed Training with Adaptive
    Summation", equation 4): equal gradients average, orthogonal ones add."""
    dot, a_square, b_square = tf.reduce_sum(a * b), tf.reduce_sum(a * a), tf.reduce_sum(b * b)
    a_factor = 1.0 - tf.math.divide_no_nan(dot, 2.0 * a_square)
    b_factor = 1.0 - tf.math.divide_no_nan(dot, 2.0 * b_square)
    return a_factor * a + b_factor * b
