"""horovod.tensorflow.util's name that scripts use."""

import tensorflow as tf

_executing_eagerly = tf.executing_eagerly

__all__ = ["_executing_eagerly"]
