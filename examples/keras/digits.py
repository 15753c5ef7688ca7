"""Keras on several ranks: `fit` with a distributed optimizer, on JAX, TensorFlow or PyTorch.

    pip install scikit-learn keras torch        # or jax, or tensorflow
    KERAS_BACKEND=torch gpucoll-run -n 4 examples/keras/digits.py
    KERAS_BACKEND=jax gpucoll-run -n 4 examples/keras/digits.py

The digits come with scikit-learn. Rank 0 then repeats the run alone: its losses are the same up to
rounding.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import gpucoll
import gpucoll.integrations.keras as gck

TRAINING_IMAGES = 1440  # 12 batches of 120 images, which 2, 3, 4, 5, 6 or 8 ranks divide
BATCH = 120
EPOCHS = 5


def network():
    """Return a network with one hidden layer."""
    layers = [keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *layers])


def fit(model, optimizer, training, test, ranks=1, callbacks=()):
    """Train a model on this rank's part, and return losses and the accuracy on other images."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    history = model.fit(
        *training,
        batch_size=BATCH // ranks,
        epochs=EPOCHS,
        shuffle=False,
        validation_data=test,
        verbose=0,
        callbacks=[*callbacks],
    ).history
    return history["loss"], history["val_accuracy"][-1]


def main(comm):
    """Train on all ranks, then on rank 0 alone."""
    keras.utils.set_random_seed(comm.rank)  # rank 0's weights are broadcast
    digits = load_digits()
    parts = slice(TRAINING_IMAGES), slice(TRAINING_IMAGES, None)
    images = digits.data.astype("float32") / 16
    training, test = ((images[part], digits.target[part]) for part in parts)

    model = network()
    first = model.get_weights()
    optimizer = gck.DistributedOptimizer(keras.optimizers.Adam(0.01), comm)
    mine = gck.shard(training, comm), gck.shard(test, comm)
    callbacks = [gck.DataParallel(comm)]
    losses, accuracy = fit(model, optimizer, *mine, comm.world_size, callbacks)

    if comm.rank == 0:
        alone = network()
        alone.set_weights(first)
        losses_alone, _ = fit(alone, keras.optimizers.Adam(0.01), training, test)
        for epoch, loss in enumerate(losses):
            print(f"epoch {epoch}  loss {loss:.6f}  " + "*" * round(20 * loss))
        print(f"accuracy on other images: {accuracy:.1%} ({keras.backend.backend()})")
        same = np.allclose(losses, losses_alone, rtol=1e-4)
        print(f"the same losses as one process alone: {same}")


if __name__ == "__main__":
    with gpucoll.init() as comm:
        main(comm)
