r"""Time backend="mpi", or another one, and mpi4py itself, in turns, over the same MPI.

    mpiexec -n 2 python tools/measure_mpi.py
    mpiexec -n 2 python tools/measure_mpi.py --sizes 8 65536 --calls all_reduce
    mpiexec -hosts one,two -n 2 python tools/measure_mpi.py --backend cpu

A round times each side once, with as many calls in a row as take about 10 ms; the slowest rank
counts. The output has the medians over the rounds in microseconds per call, gpucoll's extra time,
and the ratio. The last line has the time of `Communicator.from_mpi` in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gpucoll

ROUND_S, SHORT_ROUND_S = 0.01, 0.002


def sides(comm: Any, world: Any, size_bytes: int) -> dict[str, tuple[Callable[[], Any], ...]]:
    """Return the calls to time: one of gpucoll and one of mpi4py, on the same number of bytes."""
    x = np.ones(max(size_bytes // 8, 1))
    out = np.empty_like(x)
    everyone = np.empty(comm.world_size * x.size)
    to, source = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    spread, moved = np.ones(comm.world_size * x.size), np.empty(comm.world_size * x.size)
    return {
        "all_reduce": (lambda: comm.all_reduce(x, out=out), lambda: world.Allreduce(x, out)),
        "broadcast": (lambda: comm.broadcast(x, out=x), lambda: world.Bcast(x)),
        "all_gather": (
            lambda: comm.all_gather(x, out=everyone),
            lambda: world.Allgather(x, everyone),
        ),
        "all_to_all": (
            lambda: comm.all_to_all(spread, out=moved),
            lambda: world.Alltoall(spread, moved),
        ),
        "send_recv": (
            lambda: comm.send_recv(x, to, source, out),
            lambda: world.Sendrecv(x, to, 0, out, source),
        ),
    }


def timed(world: Any, call: Callable[[], Any], n_calls: int) -> float:
    """Return the seconds per call on the slowest rank."""
    world.Barrier()
    start = time.perf_counter()
    for _ in range(n_calls):
        call()
    taken = max(world.allgather(time.perf_counter() - start))
    return float(taken) / n_calls


def measure(
    world: Any, calls: tuple[Callable[[], Any], ...], rounds: int, *, best: bool
) -> list[float]:
    """Return each side's median or best time, in microseconds."""
    for call in calls:
        for _ in range(20):
            call()
    round_s, chosen = (SHORT_ROUND_S, min) if best else (ROUND_S, statistics.median)
    n_calls = max(int(round_s / max(timed(world, calls[1], 5), 1e-6)), 3)
    n_calls = world.bcast(n_calls)
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for times, call in zip(found, calls, strict=True):
            times.append(timed(world, call, n_calls))
    return [1e6 * chosen(times) for times in found]


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [8, 1024, 4096, 65536, 1 << 20, 16 << 20]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes)
    parser.add_argument("--calls", nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="mpi")
    parser.add_argument(
        "--best", action="store_true", help=("use the best time, for a machine with other work")
    )
    options = parser.parse_args()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with gpucoll.Communicator.from_mpi(world, backend=options.backend) as comm:
        if comm.rank == 0:
            facts = comm.describe().facts
            print(f"{facts.get('MPI', options.backend)}, {comm.world_size} ranks")
            print(f"{'':12s}{'bytes':>10s}{'gpucoll':>10s}{'mpi4py':>10s}{'more':>8s}{'ratio':>7s}")
        for size_bytes in options.sizes:
            for name, calls in sides(comm, world, size_bytes).items():
                if options.calls and name not in options.calls:
                    continue
                ours, theirs = measure(world, calls, options.rounds, best=options.best)
                if comm.rank == 0:
                    row = f"{name:12s}{size_bytes:10d}{ours:10.2f}{theirs:10.2f}"
                    print(f"{row}{ours - theirs:8.2f}{ours / theirs:7.2f}", flush=True)
    for _ in range(5):
        start = time.perf_counter()
        gpucoll.Communicator.from_mpi(world).close()
        taken = world.allreduce(time.perf_counter() - start, MPI.MAX)
        if world.rank == 0:
            print(f"from_mpi {1e3 * taken:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
