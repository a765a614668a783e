"""Batch normalization over the batches of all ranks, for Keras 3 and tf_keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from herring.horovod._engine import info
from herring.horovod._engine.process_sets import global_process_set
from herring.horovod._engine.reduce_ops import Sum
from herring.horovod.tensorflow import _operations as operations


def moments_of_all(mean: Any, variance: Any, count: Any, name: str) -> tuple[Any, Any]:
    """Mean and variance over all ranks, from this rank's and the number of values that they are of (may differ)."""
    wide_mean, wide_variance = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
    weight = tf.cast(count, tf.float64)
    own = tf.stack(
        [weight * wide_mean, weight * (wide_variance + tf.square(wide_mean)), tf.ones_like(wide_mean) * weight]
    )
    label = None if tf.executing_eagerly() else f"moments.{name}"
    sums = operations.all_reduce([own], label, Sum, 1.0, 1.0, global_process_set)[0]
    all_mean, all_square = sums[0] / sums[2], sums[1] / sums[2]
    all_variance = tf.maximum(all_square - tf.square(all_mean), 0.0)
    return tf.cast(all_mean, mean.dtype), tf.cast(all_variance, variance.dtype)


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """tf.keras.layers.BatchNormalization with statistics over all ranks' batches, which may differ in size.

    In training every rank calls it equally often, in the same order.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        kwargs["name"] = kwargs.get("name") or "sync_batch_normalization"
        if not hasattr(tf.keras, "ops"):  # Keras 3, which has them, does not know the word.
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        mean, variance = super()._moments(inputs, *arguments, **options)
        if info.size() == 1:
            return mean, variance
        mask: Any = options.get("mask", arguments[-1] if arguments else None)
        if tf.is_tensor(mask) and mask.dtype == tf.bool:
            count = tf.math.count_nonzero(mask)
        else:
            count = tf.size(inputs, tf.int64) // tf.size(mean, tf.int64)
        return moments_of_all(mean, variance, count, self.name)
