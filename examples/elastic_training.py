"""Data-parallel training that continues when ranks are killed.

Every rank has a part of each batch, and one all_reduce adds up the gradients. If a rank is lost,
the others shrink the communicator, return to the last step that all of them have made, divide the
batches among the remaining ranks, and train on. Without a launcher the program starts four ranks
and kills two of them during the training:

    python examples/elastic_training.py
    gpucoll-run -n 4 examples/elastic_training.py

gpucoll-run ends a job if one of its ranks dies, so under gpucoll-run no rank is killed.

At the end rank 0 repeats the run alone, without any loss. It computes as many parts in each step as
there were ranks, and adds them in rank order, as all_reduce does. So both runs end with the same
weights, bit for bit: no step was lost, and none was made twice.
"""

import os
import secrets
import signal
import subprocess
import sys

import numpy as np

import gpucoll

STEPS = 120
BATCH = 240
FEATURES = 20
LEARNING_RATE = 0.05
KEPT = 4
DEADLY_STEPS = {1: 40, 2: 80}
"""Original rank -> the step in which it is killed."""


def batch_of(step):
    """Return the inputs and targets of a step; every rank can generate them, as if from a file."""
    random = np.random.default_rng(step)
    inputs = random.normal(size=(BATCH, FEATURES))
    targets = inputs @ np.arange(FEATURES) + random.normal(size=BATCH)
    return inputs, targets


def gradient_of(weights, step, part, parts):
    """Return the gradient of the loss over one part of the step's batch, as a sum."""
    inputs, targets = (np.array_split(array, parts)[part] for array in batch_of(step))
    return inputs.T @ (inputs @ weights - targets)


def updated(weights, gradient):
    """Return the weights after a step."""
    return weights - LEARNING_RATE * gradient / BATCH


def train(comm, deadly_steps):
    """Return the weights, and the number of ranks in each step; closes the communicator."""
    mine = deadly_steps.get(comm.rank)
    weights, sizes = np.zeros(FEATURES), []
    kept = [(comm.completed, weights, sizes)]
    while len(sizes) < STEPS:
        step = len(sizes)
        try:
            gradient = gradient_of(weights, step, comm.rank, comm.world_size)
            if step == mine:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(gradient, out=gradient)
            weights, sizes = updated(weights, gradient), [*sizes, comm.world_size]
            kept = [*kept[1 - KEPT :], (comm.completed, weights, sizes)]
        except (gpucoll.PeerLostError, gpucoll.DeadlineError, gpucoll.AbortedError):
            comm = comm.shrink()
            # A rank that had made a step more than another one goes back, so all are at the same
            # step now.
            _, weights, sizes = [state for state in kept if state[0] <= comm.resumed_from][-1]
            kept = [(0, weights, sizes)]
            if comm.rank == 0:
                former, step = comm.former_ranks, len(sizes)
                print(f"ranks {former} go on from step {step} as {comm.world_size} ranks")
    rank = comm.rank
    comm.close()
    return rank, weights, sizes


def train_alone(sizes):
    """Return the weights from one process that computes all parts of all batches."""
    weights = np.zeros(FEATURES)
    for step, parts in enumerate(sizes):
        gradients = [gradient_of(weights, step, part, parts) for part in range(parts)]
        weights = updated(weights, sum(gradients[1:], gradients[0]))
    return weights


def main(comm, deadly_steps):
    """Train, and compare the result on the first remaining rank."""
    rank, weights, sizes = train(comm, deadly_steps)
    if rank == 0:
        changes = [step for step in range(1, STEPS) if sizes[step] != sizes[step - 1]]
        print(f"{STEPS} steps, in which ranks were lost at {changes}")
        same = (weights == train_alone(sizes)).all()
        print(f"the same weights as one process without losses: {same}")
        return weights, sizes, bool(same)
    return weights, sizes, None


def start_ranks(count):
    """Run this file on `count` ranks that no launcher ends when one of them dies."""
    names = {"GPUCOLL_WORLD_SIZE": str(count), "GPUCOLL_JOB": secrets.token_hex(8)}
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **names, "GPUCOLL_RANK": str(rank)})
        for rank in range(count)
    ]
    ends = [rank.wait() for rank in ranks]
    assert [rank for rank, end in enumerate(ends) if end == -signal.SIGKILL] == [*DEADLY_STEPS]
    assert sum(map(abs, ends)) == len(DEADLY_STEPS) * signal.SIGKILL


if __name__ == "__main__":
    if "GPUCOLL_RANK" in os.environ:
        # a launcher would end all ranks when one dies
        has_launcher = "GPUCOLL_LOCAL_WORLD_SIZE" in os.environ
        main(gpucoll.init(), {} if has_launcher else DEADLY_STEPS)
    else:
        start_ranks(4)
