"""ResNet-50 on synthetic ImageNet in TensorFlow, by the usual recipe: warm-up, linear scaling, label smoothing.

herringrun -np 2 python examples/tensorflow_resnet.py                # a loop with DistributedGradientTape
herringrun -np 2 python examples/tensorflow_resnet.py --fit          # Keras's fit under HerringStrategy
herringrun -np 2 python examples/tensorflow_resnet.py --image-size 32 --batch-size 4 --steps 4      # a small machine

The images are noise, so nothing is learned; it shows how such a script is written, and how fast it is.
"""

import argparse
import time


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="train with Keras's fit under HerringStrategy")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples of each process in a step (default 32)")
    parser.add_argument(
        "--image-size", type=int, default=224, help="width and height in pixels, at least 32 (default 224)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()  # Here, so that --help works without TensorFlow.

import tensorflow as tf

import herring.tensorflow as herring

CLASSES = 1000


def synthetic_images(batch_size: int, image_size: int, seed: int) -> tf.data.Dataset:
    """Batches without end, of the same few images: reading is not what is looked at here."""
    random = tf.random.Generator.from_seed(seed)
    images = random.normal([batch_size, image_size, image_size, 3])
    labels = tf.one_hot(random.uniform([batch_size], 0, CLASSES, tf.int32), CLASSES)
    return tf.data.Dataset.from_tensors((images, labels)).repeat()


def make_optimizer(arguments: argparse.Namespace) -> tf.keras.optimizers.Optimizer:
    """The rate grows with the number of processes (Goyal et al. 2017): slowly at first, and then it decays."""
    own = 0.1 * arguments.batch_size / 256
    warm_up = max(arguments.steps // 4, 1)
    rate = tf.keras.optimizers.schedules.CosineDecay(
        own, arguments.steps - warm_up, warmup_target=own * herring.size(), warmup_steps=warm_up
    )
    return tf.keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=1e-4)


def make_model(image_size: int) -> tf.keras.Model:
    return tf.keras.applications.ResNet50(
        weights=None, classes=CLASSES, input_shape=(image_size, image_size, 3), classifier_activation=None
    )


def make_loss() -> tf.keras.losses.Loss:
    return tf.keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)


def train_in_a_loop(arguments: argparse.Namespace) -> float:
    model, optimizer, loss_of = make_model(arguments.image_size), make_optimizer(arguments), make_loss()
    herring.broadcast_variables(model.variables, root_rank=0)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = herring.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    data = synthetic_images(arguments.batch_size, arguments.image_size, herring.rank())
    for images, labels in data.take(1):
        step(images, labels)  # It is traced here.
    begun = time.monotonic()
    for images, labels in data.take(arguments.steps):
        loss = step(images, labels)
    seconds = time.monotonic() - begun
    mean = float(herring.oob_allreduce(loss))
    if herring.rank() == 0:
        print(f"loss {mean:.3f}", flush=True)
    return seconds


def train_with_fit(arguments: argparse.Namespace) -> float:
    strategy = herring.HerringStrategy()
    with strategy.scope():
        model = make_model(arguments.image_size)
        model.compile(make_optimizer(arguments), make_loss(), metrics=["accuracy"], jit_compile=False)

    def own_images(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return synthetic_images(arguments.batch_size, arguments.image_size, context.input_pipeline_id)

    data = strategy.distribute_datasets_from_function(own_images)
    model.fit(data, steps_per_epoch=1, epochs=1, verbose=0)  # It is traced here.
    begun = time.monotonic()
    history = model.fit(data, steps_per_epoch=arguments.steps, epochs=1, verbose=0).history
    seconds = time.monotonic() - begun
    if herring.rank() == 0:
        print(f"loss {history['loss'][0]:.3f}", flush=True)
    return seconds


def main(arguments: argparse.Namespace) -> None:
    herring.init()
    tf.keras.utils.set_random_seed(42 + herring.rank())  # The models are made alike by Herring.
    seconds = (train_with_fit if arguments.fit else train_in_a_loop)(arguments)
    images = arguments.steps * arguments.batch_size * herring.size()
    if herring.rank() == 0:
        print(f"{images / seconds:.1f} images/s on {herring.size()} processes", flush=True)


if __name__ == "__main__":
    main(arguments)
