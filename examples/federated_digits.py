"""Federated learning: eight silos, a sum that nobody can look into, noise, and two that drop out.

Eight processes have 188 handwritten digits each, and give none of them away. In each of 30 rounds a
client computes the gradient of each of its examples, clips and rounds it, and adds its share of the
noise. `SecureSum` adds up what the clients send: the server sees the sum alone. Client 5 dies in
round 10, before it has sent its vector, and client 2 in round 20, after it has. The other six go
on, and their noise suffices for the epsilon that the program prints. The digits come with
scikit-learn:

    pip install scikit-learn 'gpucoll[federated]'
    python examples/federated_digits.py

The program compares the accuracy with that of training at one place without noise. Then it repeats
eight rounds with seeds, once by these processes and once alone. Both have the same weights, bit for
bit. (With seeds the noise protects nobody: they are for this check.) `--plot FILE` draws accuracy
and epsilon with matplotlib.
"""

import argparse
import multiprocessing
import os

import numpy as np

from gpucoll.federated import DistributedNoise, SecureSum, epsilon_of_gaussian

CLIENTS, LEAST_CLIENTS = 8, 6
TRAINING_IMAGES = 1500
ROUNDS, CHECKED_ROUNDS = 30, 8
LEARNING_RATE, MOMENTUM = 2.0, 0.9
DELTA = 1e-5
NOISE = DistributedNoise(
    "gaussian", clip=1.0, noise_multiplier=8.0, clients=LEAST_CLIENTS, size=650, levels=1000
)
BITS = NOISE.bits_for(TRAINING_IMAGES, CLIENTS)
DROPOUTS = {5: (10, "mask"), 2: (20, "confirm")}
"""Client -> the round in which it dies, and the step that it does not make."""
CHECKED_DROPOUTS = {5: (2, "mask"), 2: (5, "confirm")}
STEPS = ("advertise", "share_keys", "mask", "confirm", "unmask")
PATIENCE_S = 20


def gradients(weights, images, labels):
    """Return the gradient of each example's loss, shape (examples, 650), for ten linear scores."""
    scores = images @ weights.reshape(65, 10)
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = odds / odds.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    return (images[:, :, None] * error[:, None, :]).reshape(len(labels), -1)


def part_of(client, images, labels):
    """Return the examples of one client."""
    return images[client::CLIENTS], labels[client::CLIENTS]


def accuracy_of(weights, images, labels):
    """Return the share of images whose digit has the highest score."""
    return float(((images @ weights.reshape(65, 10)).argmax(axis=1) == labels).mean())


def seed_of(client, turn, is_seeded):
    """Return the seed of a client's rounding and noise in a round; None for real noise."""
    return 1000 * turn + client if is_seeded else None


def settings_of(turn):
    """Return the settings of a round's sum, which all parties have alike."""
    return SecureSum(CLIENTS, LEAST_CLIENTS, NOISE.size, BITS, round_id=turn)


class Server:
    """The common weights, and the step that the server makes with each sum."""

    def __init__(self):
        self.weights, self.velocity = np.zeros(NOISE.size), np.zeros(NOISE.size)

    def step(self, total, examples):
        """Make a step of gradient descent with momentum."""
        self.velocity = MOMENTUM * self.velocity + total / examples
        self.weights = self.weights - LEARNING_RATE * self.velocity


# --- a client, in a process of its own ------------------------------------------------------------


def run_client(number, images, labels, link, dropouts, is_seeded):
    """Answer the server's messages until it has no more; die where `dropouts` says so."""
    while (asked := link.recv()) is not None:
        turn, step, message, weights = asked
        if dropouts.get(number) == (turn, step):
            os._exit(1)
        if step == "advertise":
            client = settings_of(turn).client(number)
            link.send(client.advertise())
        elif step == "mask":
            rows = gradients(weights, images, labels)
            words = NOISE.encode(rows, BITS, seed_of(number, turn, is_seeded))
            link.send(client.mask(message, words))
        else:
            link.send(getattr(client, step)(message))


# --- the server -----------------------------------------------------------------------------------


def secure_sum(links, turn, weights):
    """Return the sum of the clients' vectors modulo 2**BITS, and the clients that are in it.

    `links` loses the clients that do not answer in time.
    """
    server = settings_of(turn).server()
    messages = dict.fromkeys(links)
    for step in STEPS:
        for number, message in messages.items():
            send(links, number, (turn, step, message, weights if step == "mask" else None))
        for number in messages:
            if number in links and (answer := receive(links, number)) is not None:
                server.receive(answer, sender=number)
        if step != STEPS[-1]:
            messages = {to: text for to, text in server.advance().items() if to in links}
    return server.sum(), server.included


def send(links, number, message):
    """Send to a client; drop it if it is gone."""
    try:
        links[number].send(message)
    except OSError:
        del links[number]


def receive(links, number):
    """Return a client's answer; drop it and return None if there is none."""
    try:
        if links[number].poll(PATIENCE_S):
            return links[number].recv()
    except (EOFError, OSError):
        pass
    del links[number]
    return None


def train(images, labels, rounds, dropouts, evaluate=None, is_seeded=False):
    """Return the weights of federated training, what `evaluate` made of them, and who took part."""
    context, links, processes = multiprocessing.get_context("fork"), {}, []
    for number in range(CLIENTS):
        links[number], far = context.Pipe()
        given = number, *part_of(number, images, labels), far, dropouts, is_seeded
        processes.append(context.Process(target=run_client, args=given))
        processes[-1].start()
        far.close()
    server, found, included = Server(), [], []
    try:
        for turn in range(1, rounds + 1):
            words, clients = secure_sum(links, turn, server.weights)
            examples = sum(len(part_of(client, images, labels)[1]) for client in clients)
            server.step(NOISE.decode(words, BITS), examples)
            included.append(sorted(clients))
            if evaluate is not None:
                found.append(evaluate(server.weights))
    finally:
        for number in [*links]:
            send(links, number, None)
        for process in processes:
            process.join(PATIENCE_S)
            process.kill()
            process.join()
    return server.weights, found, included


# --- what it is compared with ---------------------------------------------------------------------


def train_alone(images, labels, included):
    """Return the weights of one process that adds up what the same clients would have sent."""
    server = Server()
    for turn, clients in enumerate(included, 1):
        total, examples = np.zeros(NOISE.size, np.uint64), 0
        for client in clients:
            own = part_of(client, images, labels)
            seed = seed_of(client, turn, is_seeded=True)
            total += NOISE.encode(gradients(server.weights, *own), BITS, seed)
            examples += len(own[1])
        server.step(NOISE.decode(total, BITS), examples)
    return server.weights


def train_centrally(images, labels, rounds, evaluate):
    """Return what `evaluate` made of the weights of training at one place, without noise."""
    server, found = Server(), []
    for _ in range(rounds):
        server.step(gradients(server.weights, images, labels).sum(axis=0), len(labels))
        found.append(evaluate(server.weights))
    return found


def is_the_same_alone(images, labels):
    """Return whether some rounds with seeds end with the bits of one process."""
    weights, _, included = train(images, labels, CHECKED_ROUNDS, CHECKED_DROPOUTS, is_seeded=True)
    return train_alone(images, labels, included).tobytes() == weights.tobytes()


def plot(path, central, federated):
    """Draw the accuracy after each round, and epsilon."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": 10, "svg.hashsalt": "federated_digits", "svg.fonttype": "none"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
    turns = np.arange(1, len(federated) + 1)
    left.plot(turns, central, "--", color="#6b7280", label="at one place, without noise")
    left.plot(turns, federated, color="#0072b2", label="eight silos, secure sum, noise")
    for turn, step in DROPOUTS.values():
        left.axvline(turn, ymin=0.3, color="#d55e00", linewidth=1, linestyle=":")
        text = "a silo drops out" if step == "mask" else "another one"
        left.text(turn + 0.4, 0.72, text, color="#b34a00")
    left.set(xlabel="round", ylabel="accuracy on other images", xlim=(1, len(turns)), ylim=(0.5, 1))
    left.legend(loc="lower right", frameon=False)
    epsilons = [NOISE.epsilon(DELTA, int(turn)) for turn in turns]
    right.plot(turns, epsilons, color="#0072b2")
    right.set(xlabel="round", ylabel="ε spent (δ = 0.00001)", xlim=(1, len(turns)))
    right.set_ylim(0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main(images, labels, rounds=ROUNDS, path=None):
    """Train with eight processes; return accuracies after each round, epsilon, and the check.

    Parameters
    ----------
    images, labels : array
        The whole data set, shapes (n, 64) and (n,).
    rounds : int
        Number of rounds.
    path : str, optional
        Where to draw the picture.

    Returns
    -------
    federated, central : list of float
    epsilon : float
    included : list of list of int
        The clients in each round's sum.
    same : bool
    """
    images = np.column_stack([images, np.ones(len(images))])  # the last column: a constant
    order = np.random.default_rng(0).permutation(len(labels))
    first, rest = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
    training = images[first], labels[first]

    def evaluate(weights):
        return accuracy_of(weights, images[rest], labels[rest])

    _, federated, included = train(*training, rounds, DROPOUTS, evaluate)
    central = train_centrally(*training, rounds, evaluate)
    epsilon = NOISE.epsilon(DELTA, rounds)
    trusted = epsilon_of_gaussian(NOISE.noise_multiplier, DELTA, rounds)
    print(f"clients in the sums: {len(included[0])} at first, {len(included[-1])} in the end")
    print(f"epsilon {epsilon:.2f} for delta {DELTA:g} after {rounds} rounds, by Rényi divergence")
    print(f"({trusted:.2f} if a trusted server added Gaussian noise, counted tightly)")
    print(f"accuracy on other images: {federated[-1]:.1%}")
    print(f"the same training at one place, without noise: {central[-1]:.1%}")
    if path:
        plot(path, central, federated)
    same = is_the_same_alone(*training)
    print(f"the same weights, bit for bit, as one process alone: {same}")
    return federated, central, epsilon, included, same


if __name__ == "__main__":
    from sklearn.datasets import load_digits

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--plot", metavar="FILE", help="draw accuracy and epsilon (matplotlib)")
    given = parser.parse_args()
    digits = load_digits()
    main(digits.data / 16, digits.target, given.rounds, given.plot)
