"""Which part of the data each process trains on."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from herring._errors import InvalidArgumentError

_FILE = 1  # Of tf.data.experimental.AutoShardPolicy, as the operation takes it.


def _piece(component: Any, part: Any, parts: int) -> Any:
    """Rows part / parts to (part + 1) / parts of a batch."""
    if isinstance(component, tf.SparseTensor):
        rows = component.dense_shape[0]
        begin, end = rows * part // parts, rows * (part + 1) // parts
        start = tf.concat([[begin], tf.zeros_like(component.dense_shape[1:])], 0)
        return tf.sparse.slice(component, start, tf.concat([[end - begin], component.dense_shape[1:]], 0))
    if isinstance(component, tf.RaggedTensor):
        rows = component.nrows(tf.int64)
    else:
        rows = component.shape[0] or tf.shape(component, tf.int64)[0]
    return component[rows * part // parts : rows * (part + 1) // parts]


def _pieces_of(part: Any, parts: int, *components: Any) -> Any:
    pieces = tf.nest.map_structure(lambda component: _piece(component, part, parts), components)
    return pieces[0] if len(pieces) == 1 else pieces


def _in_pieces(dataset: Any, parts: int) -> Any:
    """Each batch as `parts` smaller ones."""
    return dataset.flat_map(
        lambda *batch: tf.data.Dataset.range(parts).map(lambda part: _pieces_of(part, parts, *batch))
    )


def _own_files(dataset: Any, rank: int, size: int) -> Any:
    spec = dataset.element_spec
    sharded = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.data.experimental.to_variant(dataset), num_workers=size, index=rank, auto_shard_policy=_FILE,
        num_replicas=size, output_types=tf.nest.flatten(tf.nest.map_structure(lambda each: each.dtype, spec)),
        output_shapes=tf.nest.flatten(tf.nest.map_structure(lambda each: each.shape, spec)),
    )  # fmt: skip
    return tf.data.experimental.from_variant(sharded, spec)


def distribute(dataset: Any, rank: int, size: int) -> Any:
    """This process's part of a dataset whose batches are those of all processes together.

    The policy is the dataset's (tf.data.Options, experimental_distribute.auto_shard_policy). AUTO and DATA: of each
    batch its share of the rows, in order, the same number of batches on all processes. FILE: its share of the files.
    OFF: all of it. With these two each batch is cut into as many as there are processes.
    """
    if getattr(dataset, "_herring_is_distributed", False) or not isinstance(dataset, tf.data.Dataset):
        return dataset
    if any(component.shape.rank == 0 for component in tf.nest.flatten(dataset.element_spec)):
        raise InvalidArgumentError(
            "this dataset has no batches, and HerringStrategy distributes batches: call .batch(global batch size) first"
        )
    policy = dataset.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    if size == 1:
        part = dataset.prefetch(tf.data.AUTOTUNE)
    elif policy == policies.OFF:
        part = _in_pieces(dataset, size).prefetch(tf.data.AUTOTUNE)
    elif policy == policies.FILE:
        part = _in_pieces(_own_files(dataset, rank, size), size).prefetch(tf.data.AUTOTUNE)
    else:
        part = dataset.map(lambda *batch: _pieces_of(rank, size, *batch)).prefetch(tf.data.AUTOTUNE)
    part._herring_is_distributed = True
    return part
