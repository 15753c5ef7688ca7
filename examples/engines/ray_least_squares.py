"""Least squares on the actors of a Ray cluster: each has a part of the rows, one all_reduce a step.

    python examples/engines/ray_least_squares.py     # a cluster of this machine alone
    ray job submit -- python examples/engines/ray_least_squares.py

One worker is killed on the way; the others shrink the communicator and go on, with the rows divided
anew among those who are left.
"""

import os
import signal

import numpy as np
import ray

import gpucoll
from gpucoll.integrations.ray import Workers

ROWS, COLUMNS, STEPS = 4000, 10, 60
TRUTH = np.arange(COLUMNS, dtype=float)


def rows_of(rank, world_size):
    """Return this rank's part of the inputs and targets, as if read from a file."""
    inputs = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))
    mine = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return inputs[mine], inputs[mine] @ TRUTH


def train(comm, deadly_step):
    """Return the weights, and how many ranks there were in the end."""
    weights, step = np.zeros(COLUMNS), 0
    inputs, targets = rows_of(comm.rank, comm.world_size)
    while step < STEPS:
        if step == deadly_step and comm.epoch == 0 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            gradient = comm.all_reduce(inputs.T @ (inputs @ weights - targets)) / ROWS
        except gpucoll.PeerLostError:
            comm = comm.shrink(timeout_s=10)
            inputs, targets = rows_of(comm.rank, comm.world_size)
            continue  # the step once more: all_reduce ends on no rank before all have come
        weights, step = weights - 0.5 * gradient, step + 1
    n_ranks = comm.world_size
    comm.close()
    return weights, n_ranks


def main():
    """Train twice, once with a loss on the way."""
    ray.init(ignore_reinit_error=True)
    with Workers(3, num_cpus=0.5) as workers:
        whole = workers.run(train, (None,))
        after_a_loss = workers.run(train, (STEPS // 2,), elastic=True)
    print("ranks in the end:", whole[0][1], "and", after_a_loss[0][1])
    print("lost:", str(after_a_loss[1]).partition(":")[0])
    found = [weights for weights, _ in (*whole, after_a_loss[0], after_a_loss[2])]
    print("the weights are right:", all(np.allclose(each, TRUTH, atol=1e-3) for each in found))


if __name__ == "__main__":
    main()
