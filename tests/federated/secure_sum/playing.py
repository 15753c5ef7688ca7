"""A secure sum played in one process, with clients that fall silent, and seeded randomness."""

from __future__ import annotations

import hashlib

import numpy as np

from gpucoll.federated import SecureSum

STEPS = ("advertise", "share_keys", "mask", "confirm", "unmask")
TO_THE_END = len(STEPS)


class Seeded:
    """random(n_bytes) for a party, the same for the same seed."""

    def __init__(self, *seed):
        self.seed, self.calls = repr(seed).encode(), 0

    def __call__(self, size):
        self.calls += 1
        return hashlib.shake_256(self.seed + b"%d" % self.calls).digest(size)


def clients_of(settings, seed=0, signing_keys=None):
    """Return a sum's clients."""
    return [
        settings.client(
            number,
            signing_key=None if signing_keys is None else signing_keys[number],
            random=Seeded(seed, number),
        )
        for number in range(settings.clients)
    ]


def answer(client, step, message, x):
    """Return a client's message of a step."""
    given = ([], [message], [message, x], [message], [message])[step]
    return getattr(client, STEPS[step])(*given)


def play(settings, vectors, stops=None, seed=0, until=TO_THE_END, clients=None):
    """Play the steps before `until`; client i is silent from step stops[i] on.

    Returns the server, the clients, the last messages to them, and all messages to the server.
    """
    clients = clients or clients_of(settings, seed)
    server, inbox = settings.server(), dict.fromkeys(range(settings.clients))
    transcript = []
    for step in range(until):
        for number, message in inbox.items():
            if stops is None or stops[number] > step:
                said = answer(clients[number], step, message, vectors[number])
                assert server.receive(said, sender=number) == number
                transcript.append(said)
        if step < TO_THE_END - 1:
            inbox = server.advance()
            transcript += inbox.values()
    return server, clients, inbox, transcript


def vectors_of(settings, seed=0):
    """Return a random vector for each client."""
    generator = np.random.default_rng(seed)
    shape = (settings.clients, settings.length)
    return generator.integers(0, 1 << settings.bits, shape, settings.dtype, endpoint=False)


def plain_sum(settings, vectors, included):
    """Return the sum of some vectors modulo 2**bits, by Python's integers."""
    columns = np.asarray(vectors, object)[sorted(included)].sum(axis=0, initial=0)
    return np.array([int(value) % (1 << settings.bits) for value in columns], settings.dtype)


def small(**given):
    """Return the settings of a small sum."""
    return SecureSum(**{"clients": 3, "threshold": 2, "length": 7, **given})
