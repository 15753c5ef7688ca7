"""DiLoCo: every rank trains for twenty steps on its own data before the ranks communicate.

A network with one hidden layer learns 1500 handwritten digits, of which each rank has a part. Every
rank makes twenty steps of its own; then DiLoCo averages how far the ranks have come and makes one
step from where all of them were, with momentum. So the network sends a twentieth of what
data-parallel training sends. The digits come with scikit-learn:

    pip install scikit-learn
    python examples/diloco_digits.py
    gpucoll-run -n 4 examples/diloco_digits.py

Rank 0 then repeats the run alone, with one network for each rank and DiLoCo written out. Both end
with the same weights, bit for bit.
"""

import numpy as np

import gpucoll
from gpucoll.training import DiLoCo

TRAINING_IMAGES = 1500
BATCH = 50
STEPS = 400
EVERY = 20
LEARNING_RATE = np.float32(0.2)
OUTER_RATE = np.float32(0.7)
OUTER_MOMENTUM = np.float32(0.9)


def initial_weights(hidden=32, seed=0):
    """Return weights and biases of both layers."""
    random = np.random.default_rng(seed)
    weights = [random.normal(size=(64, hidden)) / 8, np.zeros(hidden)]
    weights += [random.normal(size=(hidden, 10)) / hidden**0.5, np.zeros(10)]
    return [array.astype(np.float32) for array in weights]


def forward(weights, images):
    """Return the hidden layer and the probability of each digit."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(images @ w1 + b1)
    scores = hidden @ w2 + b2
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def inner_step(weights, images, labels, part, parts, step):
    """Make one step of stochastic gradient descent on a batch of one rank's part of the images."""
    chosen = np.random.default_rng((part, step)).integers(len(labels[part::parts]), size=BATCH)
    batch, digits = images[part::parts][chosen], labels[part::parts][chosen]
    hidden, error = forward(weights, batch)
    error[np.arange(BATCH), digits] -= 1
    back = (error @ weights[2].T) * (1 - hidden**2)
    gradients = [batch.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight -= LEARNING_RATE / BATCH * gradient


def train(comm, images, labels):
    """Return the weights and the number of bytes that this rank has sent for each outer step."""
    weights = initial_weights()
    rates = {"lr": OUTER_RATE, "momentum": OUTER_MOMENTUM}
    with DiLoCo(comm, weights, every=EVERY, **rates) as diloco:
        for step in range(STEPS):
            inner_step(weights, images, labels, comm.rank, comm.world_size, step)
            diloco.step()
        diloco.confirm()
        return weights, diloco.bytes_per_outer_step


def train_alone(images, labels, ranks):
    """Return the weights of one process that trains a network for each rank."""
    common = initial_weights()
    velocities = [np.zeros_like(weight) for weight in common]
    networks = [initial_weights() for _ in range(ranks)]
    for step in range(STEPS):
        for part, weights in enumerate(networks):
            inner_step(weights, images, labels, part, ranks, step)
        if (step + 1) % EVERY:
            continue
        for number, velocity in enumerate(velocities):
            first, *rest = [common[number] - weights[number] for weights in networks]
            mean = sum(rest, first) / np.float32(ranks)
            velocity *= OUTER_MOMENTUM
            velocity += mean
            common[number] = common[number] - OUTER_RATE * (mean + OUTER_MOMENTUM * velocity)
            for weights in networks:
                weights[number][:] = common[number]
    return common


def main(comm, images, labels):
    """Train on all ranks, then on rank 0 alone; return weights, accuracy, and if they are equal.

    `images`, shape (n, 64), and `labels`, shape (n,), are the whole data set on every rank.
    """
    images = images.astype(np.float32)
    training = images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES]
    weights, sent = train(comm, *training)
    guesses = forward(weights, images[TRAINING_IMAGES:])[1].argmax(axis=1)
    accuracy = float((guesses == labels[TRAINING_IMAGES:]).mean())
    same = None
    if comm.rank == 0:
        alone = train_alone(*training, comm.world_size)
        same = all((one == other).all() for one, other in zip(weights, alone, strict=True))
        print(f"{STEPS // EVERY} outer steps of {sent / 1000:.1f} kB from each rank")
        print(f"accuracy on other images: {accuracy:.1%}")
        print(f"the same weights, bit for bit, as one process alone: {same}")
    return weights, accuracy, same


if __name__ == "__main__":
    from sklearn.datasets import load_digits

    digits = load_digits()
    with gpucoll.init() as comm:
        main(comm, digits.data / 16, digits.target)
