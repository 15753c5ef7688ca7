"""Measure how long a reader takes to get weights: `Published`, a copy, a Ray actor, torch.rpc.

    python -m gpucoll.launcher.cli -n 2 tools/measure_published.py
    python -m gpucoll.launcher.cli -n 2 tools/measure_published.py --bytes 1000000 --without ray

Rank 0 has the weights, rank 1 reads them. All ways take turns in each repetition, and the table has
the median and the fastest of each. Rank 0 sleeps while rank 1 measures. A Ray actor and a server of
torch.rpc answer with the weights: Ray's reader gets them in memory that it cannot write, torch's
reader in new memory. "Unchanged" is the question whether there is a newer version, if there is
none. gpucoll must be importable; what is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

import gpucoll
from gpucoll.tables import Published

Way = Callable[[], Any]


class Weights:
    """What a parameter server by hand has: weights and the number of their version."""

    def __init__(self, count: int) -> None:
        self.version = 1
        self.arrays = np.ones(count, np.float32)

    def latest(self, newer_than: int) -> Any:
        """Return the version and the weights, or None if none is newer."""
        return None if newer_than >= self.version else (self.version, self.arrays)


def ways_of_ray(count: int) -> dict[str, Way]:
    """Start Ray and an actor."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    actor = ray.remote(Weights).remote(count)
    ray.get(actor.latest.remote(0))
    return {
        "Ray actor: new version": lambda: ray.get(actor.latest.remote(0)),
        "Ray actor: unchanged": lambda: ray.get(actor.latest.remote(1)),
    }


_served: list[Any] = []


def answer(newer_than: int) -> Any:
    """On the server of torch.rpc: return the weights, or None."""
    return None if newer_than >= 1 else (1, _served[0])


def ways_of_rpc(comm: gpucoll.Communicator, count: int) -> dict[str, Way]:
    """Connect both ranks by torch.rpc."""
    import torch
    from torch.distributed import rpc

    _served.append(torch.ones(count))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    port = comm.broadcast_object(free_port() if comm.rank == 0 else None, root=0)
    os.environ["MASTER_PORT"] = str(port)
    rpc.init_rpc(f"rank{comm.rank}", rank=comm.rank, world_size=2)
    return {
        "torch.rpc: new version": lambda: rpc.rpc_sync("rank0", answer, args=(0,)),
        "torch.rpc: unchanged": lambda: rpc.rpc_sync("rank0", answer, args=(1,)),
    }


def free_port() -> int:
    """Return a port that nobody listens at."""
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def timed(way: Way) -> float:
    """Return how long one call takes, in seconds; of many if it is short."""
    calls = 1
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            way()
        took_s = time.perf_counter() - start
        if took_s > 2e-4 or calls >= 10_000:
            return took_s / calls
        calls *= 10


def main() -> None:
    """Measure, and print a table on rank 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=int, default=25_000_000, help="size of the weights")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--without", nargs="*", default=[], choices=["ray", "torch"])
    given = parser.parse_args()
    count = given.bytes // 4
    found: dict[str, list[float]] = defaultdict(list)
    with gpucoll.init() as comm, Published(comm, np.zeros(count, np.float32)) as shared:
        with_torch = "torch" not in given.without and importlib.util.find_spec("torch")
        with_ray = "ray" not in given.without and importlib.util.find_spec("ray")
        ways = ways_of_rpc(comm, count) if with_torch else {}
        out, source = np.ones(count, np.float32), np.ones(count, np.float32)
        own: dict[str, Way] = {
            "latest(out=): new version": lambda: shared.latest(out=out),
            "numpy.copyto": lambda: np.copyto(out, source),
            "latest(): new version": shared.latest,
            "numpy.ndarray.copy": source.copy,
            "latest(newer_than): unchanged": lambda: shared.latest(shared_version),
        }
        if comm.rank == 1:
            ways = {**own, **ways, **(ways_of_ray(count) if with_ray else {})}
        for _ in range(given.repetitions + 1):
            if comm.rank == 0:
                start = time.perf_counter()
                shared.publish(source)
                found["publish"].append(time.perf_counter() - start)
                comm.send(1, dest=1)
                comm.recv(source=1)
                continue
            comm.recv(source=0)
            shared_version = shared.version
            for name, way in ways.items():
                found[name].append(timed(way))
            comm.send(1, dest=0)
        for rank, times in enumerate(comm.all_gather_object(dict(found))):
            if comm.rank == 1:
                for name, each in times.items():
                    shown = each[1:]  # the first one warms up
                    print(
                        f"rank {rank}  {name:32} {1e6 * statistics.median(shown):12.2f} us"
                        f" {1e6 * min(shown):12.2f} us"
                    )
        if with_torch:
            from torch.distributed import rpc

            rpc.shutdown()


if __name__ == "__main__":
    main()
