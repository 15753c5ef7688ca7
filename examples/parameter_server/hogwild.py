"""Hogwild! (Recht et al. 2011): all ranks update one sparse model at the same time.

A linear support vector machine with 10,000 weights learns 20,000 examples of twenty features each.
The weights are a `gpucoll.tables.Table` of one number a row. For each example a rank pulls the
weights of its features, and pushes a step to these. No rank waits for another one: two examples
seldom have features in common, so it hardly matters that weights change between pull and push.
(The table updates a row in one piece, so that even then no step is lost.)

    python examples/parameter_server/hogwild.py
    gpucoll-run -n 4 examples/parameter_server/hogwild.py

Rank 0 then learns the same examples alone, in the arrays of NumPy. The ranks together must not make
many more errors on other examples.
"""

import time

import numpy as np

import gpucoll
from gpucoll.tables import Table

FEATURES, OF_EXAMPLE = 10_000, 20
TRAINING, OTHERS, EPOCHS = 20_000, 10_000, 2
LEARNING_RATE, DECAY = np.float32(0.05), np.float32(1e-5)


def examples(seed=0):
    """Return the features of examples, shape (n, 20), their values, and their classes -1 and 1.

    As in texts, few features are frequent and most are rare.
    """
    random = np.random.default_rng(seed)
    shape = TRAINING + OTHERS, OF_EXAMPLE
    ids = (FEATURES * random.random(shape) ** 3).astype(np.int64)
    values = random.random(shape, np.float32)
    truth = random.normal(size=FEATURES).astype(np.float32)
    return ids, values, np.sign((truth[ids] * values).sum(axis=1))


def step(weights, values, label, epoch):
    """Return what an example adds to the weights of its features: a step down the hinge loss."""
    rate = LEARNING_RATE / np.float32(1 + epoch)
    change = -rate * DECAY * weights
    if label * (weights @ values) < 1:
        change += rate * label * values
    return change


def train(comm, table, data):
    """Learn this rank's share of the examples, in an order of its own."""
    random = np.random.default_rng(comm.rank)
    share = np.arange(comm.rank, TRAINING, comm.world_size)
    for epoch in range(EPOCHS):
        for chosen in random.permutation(share):
            ids, values, label = (part[chosen] for part in data)
            table.push(ids, step(table.pull(ids)[:, 0], values, label, epoch)[:, None])


def alone(data):
    """Return the weights after all examples, in one process and in the order of a rank alone."""
    random, weights = np.random.default_rng(0), np.zeros(FEATURES, np.float32)
    for epoch in range(EPOCHS):
        for chosen in random.permutation(TRAINING):
            ids, values, label = (part[chosen] for part in data)
            np.add.at(weights, ids, step(weights[ids], values, label, epoch))
    return weights


def error(weights, data):
    """Return the share of other examples whose class is not recognised."""
    ids, values, labels = (part[TRAINING:] for part in data)
    return float((np.sign((weights[ids] * values).sum(axis=1)) != labels).mean())


def main(comm):
    """Train on all ranks, then on rank 0 alone; return both weights and errors."""
    data = examples()
    with Table(comm, FEATURES, 1) as table:
        comm.barrier()
        start = time.perf_counter()
        train(comm, table, data)
        comm.barrier()
        took_s = time.perf_counter() - start
        weights = table.snapshot()[:, 0]
    if comm.rank > 0:
        return None
    expected = alone(data)
    errors = error(weights, data), error(expected, data)
    print(f"{comm.world_size} ranks: {EPOCHS * TRAINING / took_s:,.0f} examples a second")
    print(f"errors on other examples: {errors[0]:.1%}; of one process alone: {errors[1]:.1%}")
    print(f"at most two percentage points more: {errors[0] < errors[1] + 0.02}")
    return weights, expected, errors


if __name__ == "__main__":
    with gpucoll.init() as comm:
        main(comm)
