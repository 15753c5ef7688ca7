"""Least squares on the actors of a Ray cluster: each has some rows; a step is one all_reduce.

    python examples/engines/ray_least_squares.py     # a cluster of this machine alone
    ray job submit -- python examples/engines/ray_least_squares.py

One worker is killed during the training. The others shrink the communicator, divide the rows among
the remaining workers, and continue.
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
    """Return the weights, and the number of ranks at the end."""
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
            # repeat the step: all_reduce completes on no rank before every rank has called it
            continue
        weights, step = weights - 0.5 * gradient, step + 1
    n_ranks = comm.world_size
    comm.close()
    return weights, n_ranks


def main():
    """Train twice, once with the loss of a worker."""
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
