"""A small CNN on scikit-learn's digits, in TensorFlow: a training loop of one's own, or Keras's fit.

herringrun -np 2 python examples/tensorflow_digits.py
herringrun -np 2 python examples/tensorflow_digits.py --fit
mpirun -n 2 python examples/tensorflow_digits.py
"""

import argparse


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (default 10)")
    parser.add_argument("--fit", action="store_true", help="train with Keras's fit")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()  # Here, so that --help works without TensorFlow.

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import herring.tensorflow as herring


def make_model() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )


def train_in_a_loop(model: tf.keras.Model, data: tf.data.Dataset, epochs: int, rate: float) -> None:
    optimizer = tf.keras.optimizers.SGD(rate, momentum=0.9)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = herring.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return herring.oob_allreduce(loss)

    for epoch in range(epochs):
        losses = [float(step(images, labels)) for images, labels in data]
        if herring.rank() == 0:
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}", flush=True)


def train_with_fit(model: tf.keras.Model, data: tf.data.Dataset, epochs: int, rate: float) -> None:
    model.compile(
        optimizer=herring.DistributedOptimizer(tf.keras.optimizers.SGD(rate, momentum=0.9)),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    model.fit(data, epochs=epochs, shuffle=False, verbose=2 if herring.rank() == 0 else 0)


def main(arguments: argparse.Namespace) -> None:
    herring.init()
    rank, size = herring.rank(), herring.size()
    tf.keras.utils.set_random_seed(42 + rank)  # broadcast_variables() makes the models alike
    digits = load_digits()
    images, labels = digits.images.astype("float32")[..., None] / 16, digits.target
    # Every rank has as many batches as the others: each takes part in every step.
    mine = tf.data.Dataset.from_tensor_slices((images[:1400], labels[:1400])).shard(size, rank)
    mine = mine.shuffle(1400).batch(32, drop_remainder=True).take(1400 // size // 32)

    model = make_model()
    herring.broadcast_variables(model.variables, root_rank=0)
    train = train_with_fit if arguments.fit else train_in_a_loop
    train(model, mine, arguments.epochs, 0.02 * size)

    # Each rank looks at its own part of the test data.
    part = slice(1400 + rank, None, size)
    right = np.sum(np.argmax(model(images[part]), 1) == labels[part])
    accuracy = float(herring.oob_allreduce(tf.constant(float(right)), op="sum")) / (len(images) - 1400)
    if rank == 0:
        print(f"accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main(arguments)
