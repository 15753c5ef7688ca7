"""The classic parameter servers: synchronous with one server or several, stale, and Downpour.

Workers learn handwritten digits by softmax regression, each from mini-batches of its own. The
weights are the rows of a `gpucoll.tables.Table`: workers pull them, compute a gradient and push it,
and the table makes the step. What the classics differ in is when.

- Synchronous: all workers push gradients of the same weights, then all go on. Each rank serves a
  share of the rows, so a table of one row has one server, and one of ten rows has up to ten.
- Stale-synchronous (Ho et al. 2013): no worker is more than s steps ahead of another one.
- Downpour (Dean et al. 2012): workers wait for nobody. Each trains a copy, fetches the table's
  weights every `n_fetch` steps and pushes the sum of its gradients every `n_push` steps. The table
  makes Adagrad's steps.

The digits come with scikit-learn:

    pip install scikit-learn
    gpucoll-run -n 4 examples/parameter_server/digits.py

Rank 0 compares the synchronous weights with those of one process, which are equal bit for bit.
"""

import numpy as np

import gpucoll
from gpucoll.tables import SGD, Adagrad, Staleness, Table

TRAINING_IMAGES = 1500
SHAPE = 65, 10
STEPS, BATCH = 300, 32
LEARNING_RATE = np.float32(1)
DOWNPOUR = Adagrad(0.1)


def gradient(weights, images, labels):
    """Return the gradient of the mean loss of a batch."""
    odds = np.exp(images @ weights)
    error = odds / odds.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    return images.T @ error / np.float32(len(labels))


def batches(data, worker, steps=STEPS):
    """Yield the mini-batches of a worker, the same in each run."""
    images, labels = data
    random = np.random.default_rng(worker)
    for _ in range(steps):
        chosen = random.integers(TRAINING_IMAGES, size=BATCH)
        yield images[chosen], labels[chosen]


def in_step(comm, data, servers=1, mode="sync"):
    """Train with a table of `servers` rows; the mode says who waits for whom."""
    rows, width = np.arange(servers), SHAPE[0] * SHAPE[1] // servers
    with Table(
        comm, servers, width, update=SGD(LEARNING_RATE / comm.world_size), mode=mode
    ) as table:
        for batch in batches(data, comm.rank):
            weights = table.pull(rows).reshape(SHAPE)
            table.push(rows, gradient(weights, *batch).reshape(servers, width))
            table.clock()
        comm.barrier()
        return table.snapshot().reshape(SHAPE)


def downpour(comm, data, n_fetch=5, n_push=5, update=DOWNPOUR):
    """Train a copy of the weights on each rank, which exchanges gradients with the table."""
    with Table(comm, 1, SHAPE[0] * SHAPE[1], update=update) as table:
        pushed = np.zeros(SHAPE, np.float32)
        for step, batch in enumerate(batches(data, comm.rank)):
            if step % n_fetch == 0:
                weights = table.pull(0).reshape(SHAPE)
            found = gradient(weights, *batch)
            weights -= LEARNING_RATE * found
            pushed += found
            if (step + 1) % n_push == 0:
                table.push(0, pushed.ravel())
                pushed[:] = 0
        comm.barrier()
        return table.pull(0).reshape(SHAPE)


def alone(data, workers):
    """Return the weights after the steps of all workers, made by this process in rank order."""
    weights = np.zeros(SHAPE, np.float32)
    for of_step in zip(*(batches(data, worker) for worker in range(workers)), strict=True):
        for found in [gradient(weights, *batch) for batch in of_step]:
            weights -= LEARNING_RATE / np.float32(workers) * found
    return weights


def accuracy(weights, data):
    """Return the share of other images that are recognised."""
    images, labels = (part[TRAINING_IMAGES:] for part in data)
    return float(((images @ weights).argmax(axis=1) == labels).mean())


def with_constant(images):
    """Return images as rows of float32 with a 1 at the end, whose weights are the biases."""
    return np.hstack([images, np.ones((len(images), 1))]).astype(np.float32)


def main(comm, images, labels):
    """Train in all ways; return the weights of each, and on rank 0 those of one process."""
    data = with_constant(images), labels
    found = {
        "synchronous, one server": in_step(comm, data),
        "synchronous, ten servers": in_step(comm, data, servers=10),
        "stale-synchronous, 4 steps": in_step(comm, data, servers=10, mode=Staleness(4)),
        "Downpour": downpour(comm, data),
    }
    if comm.rank > 0:
        return found, None
    expected = alone(data, comm.world_size)
    for name, weights in found.items():
        print(f"{name:28} accuracy on other images {accuracy(weights, data):.1%}")
    same = all((each == expected).all() for each in [*found.values()][:2])
    print(f"synchronous: the same weights, bit for bit, as one process alone: {same}")
    return found, expected


if __name__ == "__main__":
    from sklearn.datasets import load_digits

    digits = load_digits()
    with gpucoll.init() as comm:
        main(comm, digits.data / 16, digits.target)
