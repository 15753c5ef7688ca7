"""What a collective inside `jax.jit` costs: ``python tools/measure_jax.py [--ranks 2]``.

The ways take turns, in one run, so that all see the same machine. Each line has the least mean of
several rounds, in microseconds: jitted functions without a collective, with gpucoll's, through
`jax.pure_callback`, through `io_callback(ordered=True)`, with mpi4jax if it is installed, and
gpucoll's call alone, on NumPy's arrays.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gpucoll

SIZES = {"4 KB": (1 << 10, 3000), "1 MB": (1 << 18, 60)}
"""Elements, and calls in a turn: a rank whose CPU was taken sleeps in its next 1000 waits."""
ROUNDS = 4


def ways(comm: gpucoll.Communicator) -> dict[str, Callable[[Any], Any]]:
    """Return functions of an array of JAX; each is jitted."""
    import jax
    from jax.experimental import io_callback

    from gpucoll.integrations import jax as gcj

    def on_host(x: Any) -> Any:
        return comm.all_reduce(np.asarray(x))

    def callback(x: Any) -> Any:
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def ordered(x: Any) -> Any:
        return io_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    made: dict[str, Callable[[Any], Any]] = {
        "x * 2": lambda x: x * 2,
        "gpucoll's call and nothing else": lambda x: gcj.all_reduce(x),
        "x * 2 + 1": lambda x: x * 2 + 1,
        "gpucoll's call in the middle of it": lambda x: gcj.all_reduce(x * 2) + 1,
        "pure_callback": lambda x: callback(x * 2) + 1,
        "io_callback, ordered": lambda x: ordered(x * 2) + 1,
    }
    if importlib.util.find_spec("mpi4jax") is not None:
        import mpi4jax
        from mpi4py import MPI

        made["mpi4jax"] = lambda x: mpi4jax.allreduce(x * 2, op=MPI.SUM) + 1
    return {name: jax.jit(function) for name, function in made.items()}


def measure(comm: gpucoll.Communicator, asynchronous: bool) -> list[str]:
    """Return a line for each size."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", asynchronous)
    functions, lines = ways(comm), []
    for size, (count, calls) in SIZES.items():
        x = jax.numpy.ones(count, jax.numpy.float32)
        mine, out = np.ones(count, np.float32), np.empty(count, np.float32)
        runs: dict[str, Callable[[], Any]] = {
            name: functools.partial(lambda f, a: f(a).block_until_ready(), function, x)
            for name, function in functions.items()
        }
        runs["gpucoll alone"] = lambda mine=mine, out=out: comm.all_reduce(mine, out=out)  # type: ignore[misc]
        least = dict.fromkeys(runs, float("inf"))
        for _ in range(ROUNDS):
            for name, run in runs.items():
                run()
                comm.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    run()
                least[name] = min(least[name], (time.perf_counter() - start) / calls * 1e6)
        words = "; ".join(f"{name} {value:.1f}" for name, value in least.items())
        how = "asynchronous" if asynchronous else "synchronous"
        lines.append(f"{size}, {how} dispatch, {comm.world_size} ranks, us: {words}")
    return lines


def main() -> None:
    """Print the lines of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    for asynchronous in (True, False):
        for line in gpucoll.launch(measure, ranks=ranks, args=(asynchronous,), prefix=False)[0]:
            print(line, flush=True)


if __name__ == "__main__":
    main()
