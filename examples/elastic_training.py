"""Data-parallel training that loses ranks, goes on without them, and wins others back.

Every rank has a part of each batch, and one all_reduce adds up the gradients. If a rank is lost,
the others shrink the communicator, return to the last step that all of them have made, divide the
batches among the remaining ranks, and train on. The launcher starts a new process in the place of
the lost one. At every tenth step the ranks let it in, and hand the weights over by a broadcast.

    gpucoll-run --elastic 2:4 examples/elastic_training.py 1:42 2:85
    python examples/elastic_training.py

In the first line rank 1 is killed in step 42, and rank 2 in step 85; the second line runs the
first. Without such arguments no rank is killed.

At the end all ranks have the same weights, bit for bit, those that came later too. Rank 0 repeats
the run alone, without any loss. It computes as many parts in each step as there were ranks, and
adds them in rank order, as all_reduce does. So it gets the same weights, bit for bit: no step was
lost, and none was made twice.
"""

import os
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
GROWS_EVERY = 10
WAIT_S = 60.0
"""How long to wait for a new process. A longer program would not wait: it lets in who is there."""
DEADLY_STEPS = ("1:42", "2:85")
LOST = (gpucoll.PeerLostError, gpucoll.DeadlineError, gpucoll.AbortedError)


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


def train(comm, deadly_steps, wait_s):
    """Return the communicator at the end, the weights, and the number of ranks in each step."""
    is_new = comm.epoch > 0  # it has joined ranks that are training
    mine = None if is_new else deadly_steps.get(comm.rank)
    state = None if is_new else (np.zeros(FEATURES), [])
    kept, is_agreed = [(0, state)], False
    while not is_agreed or len(state[1]) < STEPS:
        try:
            if not is_agreed:
                state = comm.broadcast_object(state, root=0)
                kept, is_agreed = [(comm.completed, state)], True
            weights, sizes = state
            step = len(sizes)
            if wait_s and step % GROWS_EVERY == 0 and sizes and comm.world_size < sizes[0]:
                n_ranks = comm.world_size
                comm = comm.grow(at_most=sizes[0] - n_ranks, wait_s=wait_s)
                if comm.world_size > n_ranks:
                    kept, is_agreed = [(0, state)], False
                    tell(comm, f"{comm.world_size - n_ranks} joined before step {step}")
                    continue
            gradient = gradient_of(weights, step, comm.rank, comm.world_size)
            if step == mine:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(gradient, out=gradient)
            state = updated(weights, gradient), [*sizes, comm.world_size]
            kept = [*kept[1 - KEPT :], (comm.completed, state)]
        except LOST:
            comm = comm.shrink()
            # A rank that had made a step more than another one goes back, so all are at the same
            # step now. Rank 0's weights are those of all.
            _, state = [each for each in kept if each[0] <= comm.resumed_from][-1]
            kept, is_agreed = [(0, state)], False
            tell(comm, f"ranks {comm.former_ranks} go on from step {len(state[1])}")
    return comm, *state


def tell(comm, text):
    """Print a line on one rank."""
    if comm.rank == 0:
        print(f"{text}, as {comm.world_size} ranks", flush=True)


def train_alone(sizes):
    """Return the weights from one process that computes all parts of all batches."""
    weights = np.zeros(FEATURES)
    for step, parts in enumerate(sizes):
        gradients = [gradient_of(weights, step, part, parts) for part in range(parts)]
        weights = updated(weights, sum(gradients[1:], gradients[0]))
    return weights


def main(comm, deadly_steps, wait_s=0.0):
    """Train, and compare the result on rank 0."""
    comm, weights, sizes = train(comm, deadly_steps, wait_s)
    bits = comm.all_gather(weights.view(np.uint64)).reshape(comm.world_size, -1)
    rank = comm.rank
    comm.close()
    if rank == 0:
        changes = [step for step in range(1, STEPS) if sizes[step] != sizes[step - 1]]
        print(f"{STEPS} steps; the number of ranks changed at {changes}")
        alike = (bits == bits[0]).all()
        print(f"the same weights on all {len(bits)} ranks: {alike}")
        same = alike and (weights == train_alone(sizes)).all()
        print(f"the same weights as one process without losses: {same}")
        return weights, sizes, bool(same)
    return weights, sizes, None


if __name__ == "__main__":
    if any(name in os.environ for name in ("GPUCOLL_RANK", "GPUCOLL_JOIN")):
        pairs = (argument.split(":") for argument in sys.argv[1:])
        main(gpucoll.init(), {int(rank): int(step) for rank, step in pairs}, WAIT_S)
    else:
        launcher = [sys.executable, "-m", "gpucoll", "run", "--elastic", "2:4"]
        sys.exit(subprocess.run([*launcher, __file__, *DEADLY_STEPS]).returncode)
