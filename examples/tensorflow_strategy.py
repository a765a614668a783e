"""A small CNN on scikit-learn's digits with Keras's fit under HerringStrategy.

herringrun -np 2 python examples/tensorflow_strategy.py
mpirun -n 2 python examples/tensorflow_strategy.py
"""

import argparse


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (default 10)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of each process in a step (default 32)")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()  # Here, so that --help works without TensorFlow.

import tensorflow as tf
from sklearn.datasets import load_digits

import herring.tensorflow as herring


def main(arguments: argparse.Namespace) -> None:
    strategy = herring.HerringStrategy()
    tf.keras.utils.set_random_seed(42)  # The same on all ranks: each takes its share of the same shuffled batches.
    digits = load_digits()
    images, labels = digits.images.astype("float32")[..., None] / 16, digits.target
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((8, 8, 1)),
                tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
                tf.keras.layers.MaxPooling2D(),
                tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=tf.keras.optimizers.SGD(0.02 * strategy.num_replicas_in_sync, momentum=0.9),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
    batch_size = arguments.batch_size * strategy.num_replicas_in_sync
    first = herring.rank() == 0
    model.fit(images[:1400], labels[:1400], batch_size, arguments.epochs, verbose=2 if first else 0)
    _, accuracy = model.evaluate(images[1400:], labels[1400:], batch_size, verbose=0)  # On all ranks.
    if first:
        model.save("digits.keras")
        print(f"accuracy {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main(arguments)
