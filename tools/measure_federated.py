"""Measure how fast a client of a secure sum masks its vector, beside the mod of Flower's old API.

    python tools/measure_federated.py                        50 clients, 1,000,000 values of 32 bits
    python tools/measure_federated.py --clients 20 --values 100000 --repeats 9

Both make a key exchange and a mask for each other client and one of their own, and add all masks to
the vector. Flower's mod (`flwr.client.mod.secaggplus_mod`, flwr 1.42) does so with the functions
that are called here. The two take turns. The first lines have the median, least and greatest
seconds of a client, and its CPU time in all threads. Then come the server's seconds for taking
masks off, if one client has left.
gpucoll must be importable, and flwr installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import generate_key_pairs

from gpucoll.federated import SecureSum
from gpucoll.federated.secure_sum.server import SecureSumServer

Seconds: TypeAlias = tuple[float, float]


def seconds_of(call: Callable[[], object]) -> Seconds:
    """Return how long a call takes, and how much CPU time of all threads."""
    start, start_cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - start_cpu


class Ours:
    """A secure sum whose first client can be asked to mask again and again."""

    def __init__(self, clients: int, values: int) -> None:
        self.settings = SecureSum(clients, clients // 2 + 1, values)
        self.server: SecureSumServer = self.settings.server()
        self.clients = [self.settings.client(number) for number in range(clients)]
        for client in self.clients:
            self.server.receive(client.advertise())
        for number, message in self.server.advance().items():
            self.server.receive(self.clients[number].share_keys(message))
        self.inbox = self.server.advance()
        self.state = self.clients[0].state()
        self.vector = np.ones(values, np.uint32)

    def mask(self) -> Seconds:
        """Return how long the first client takes; a copy of it masks."""
        client = self.settings.resume(self.state)
        return seconds_of(lambda: client.mask(self.inbox[0], self.vector))

    def unmask(self) -> Seconds:
        """Let the others go on without the first client; return how long the server takes."""
        for number in range(1, len(self.clients)):
            masked = self.clients[number].mask(self.inbox[number], self.vector)
            self.server.receive(masked)
        for step in ("confirm", "unmask"):
            for number, message in self.server.advance().items():
                self.server.receive(getattr(self.clients[number], step)(message))
        found = []
        took = seconds_of(lambda: found.append(self.server.sum()))
        assert (found[0] == len(self.clients) - 1).all()
        return took


class Flowers:
    """What Flower's old mod does in the step of masked vectors."""

    def __init__(self, clients: int, values: int) -> None:
        self.private, _ = generate_key_pairs()
        self.others = [generate_key_pairs()[1] for _ in range(clients - 1)]
        self.vector = np.ones(values, np.int64)  # what its quantize returns

    def mask(self) -> Seconds:
        """Return how long a client takes."""
        return seconds_of(self._mask)

    def _mask(self) -> None:
        shapes: list[tuple[int, ...]] = [self.vector.shape]
        own = pseudo_rand_gen(os.urandom(32), 1 << 32, shapes)
        masked = parameters_addition([self.vector], own)
        for number, public in enumerate(self.others):
            key = generate_shared_key(self.private, public)
            mask = pseudo_rand_gen(key, 1 << 32, shapes)
            combine = parameters_addition if number % 2 else parameters_subtraction
            masked = combine(masked, mask)
        parameters_mod(masked, 1 << 32)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--values", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    ours, flowers = Ours(asked.clients, asked.values), Flowers(asked.clients, asked.values)
    took: dict[str, list[Seconds]] = {"gpucoll": [], "Flower": []}
    for _ in range(asked.repeats):
        took["gpucoll"].append(ours.mask())
        took["Flower"].append(flowers.mask())
    masked = asked.clients * asked.values
    medians: list[Seconds] = []
    for name, seconds in took.items():
        walls, cpu = [wall for wall, _ in seconds], statistics.median(cpu for _, cpu in seconds)
        middle = statistics.median(walls)
        medians.append((middle, cpu))
        print(
            f"{name:8} {middle:.3f} s ({min(walls):.3f} to {max(walls):.3f}), {cpu:.3f} s of CPU "
            f"time; {masked / middle / 1e6:.0f} million values of masks a second"
        )
    wall, cpu = (medians[1][n] / medians[0][n] for n in range(2))
    print(f"Flower's takes {wall:.1f} times as long, and {cpu:.1f} times the CPU time")
    print(f"the server takes the masks off in {ours.unmask()[0]:.3f} s, without the first client")


if __name__ == "__main__":
    main()
