"""Data-parallel training: every rank has a part of the data, and all ranks have the same weights.

A network with one hidden layer learns 1500 handwritten digits. In every step each rank computes the
gradients for its part of the batch. One all_reduce of a list adds them up over the ranks, and every
rank makes the same step, bit for bit. The digits come with scikit-learn:

    pip install scikit-learn
    python examples/data_parallel_digits.py
    gpucoll-run -n 4 examples/data_parallel_digits.py

Rank 0 then repeats the run alone. It computes all parts of each batch and adds them in rank order,
as all_reduce does, so the two loss curves are equal bit for bit. With another number of ranks the
batches are split into other parts, and the curve is the same up to rounding.
"""

import numpy as np

import gpucoll

TRAINING_IMAGES = 1500
BATCHES = 12
LEARNING_RATE = 0.1
MOMENTUM = 0.9


def initial_weights(hidden=32, seed=0):
    """Return weights and biases of both layers; the seed makes them the same on every rank."""
    random = np.random.default_rng(seed)
    return [
        random.normal(size=(64, hidden)) / 8,
        np.zeros(hidden),
        random.normal(size=(hidden, 10)) / hidden**0.5,
        np.zeros(10),
    ]


def forward(weights, images):
    """Return the hidden layer and the probability of each digit."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(images @ w1 + b1)
    scores = hidden @ w2 + b2
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def loss_and_gradients(weights, images, labels):
    """Return sums over the images: their number, the loss, and the four gradients."""
    hidden, error = forward(weights, images)
    chosen = np.arange(len(labels)), labels
    loss = -np.log(error[chosen]).sum()
    error[chosen] -= 1
    back = (error @ weights[2].T) * (1 - hidden**2)
    gradients = [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
    return [np.array([len(labels), loss]), *gradients]


def train(images, labels, parts, ranks, sum_over_ranks, epochs):
    """Return the trained weights and the mean loss of each epoch.

    Every batch is divided into one part per rank. This process computes the parts with the numbers
    `parts`; `sum_over_ranks` adds the results of the other ranks.
    """
    weights = initial_weights()
    velocities = [np.zeros_like(weight) for weight in weights]
    losses = []
    for _ in range(epochs):
        epoch_loss = 0.0
        for batch in range(BATCHES):
            of_batch = images[batch::BATCHES], labels[batch::BATCHES]
            sums = [
                loss_and_gradients(weights, of_batch[0][part::ranks], of_batch[1][part::ranks])
                for part in parts
            ]
            here = [sum(column) for column in zip(*sums, strict=True)]
            (count, loss), *gradients = sum_over_ranks(here)
            for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
                velocity *= MOMENTUM
                velocity -= LEARNING_RATE / count * gradient
                weight += velocity
            epoch_loss += float(loss)
        losses.append(epoch_loss / len(labels))
    return weights, losses


def main(comm, images, labels, epochs=20):
    """Train on all ranks, then on rank 0 alone; return both runs' losses and the accuracy.

    `images`, shape (n, 64), and `labels`, shape (n,), are the whole data set on every rank.
    """
    training = images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES]
    weights, losses = train(*training, [comm.rank], comm.world_size, comm.all_reduce, epochs)

    test = slice(TRAINING_IMAGES + comm.rank, None, comm.world_size)
    guesses = forward(weights, images[test])[1].argmax(axis=1)
    right = comm.all_reduce(int((guesses == labels[test]).sum()))
    accuracy = right / (len(labels) - TRAINING_IMAGES)

    losses_alone = None
    if comm.rank == 0:
        every_part = range(comm.world_size)
        _, losses_alone = train(*training, every_part, comm.world_size, lambda sums: sums, epochs)
        for epoch, loss in enumerate(losses):
            print(f"epoch {epoch:2}  loss {loss:.6f}  " + "*" * round(20 * loss))
        print(f"accuracy on other images: {accuracy:.1%}")
        print(f"the same losses, bit for bit, as one process alone: {losses == losses_alone}")
    return losses, accuracy, losses_alone


if __name__ == "__main__":
    from sklearn.datasets import load_digits

    digits = load_digits()
    with gpucoll.init() as comm:
        main(comm, digits.data / 16, digits.target)
