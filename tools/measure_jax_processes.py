"""Measure JAX's collectives between two processes: over gpucoll, and over JAX's own Gloo, in turns.

``python tools/measure_jax_processes.py [--rounds 3] [--ranks 2]``. Each round starts both programs,
one after the other; a figure is the median over rounds of the median call. Prints one line for each
collective and size.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

SIZES_BYTES = (4 << 10, 1 << 20)
COLLECTIVES = ("psum", "all_gather", "psum_scatter", "ppermute", "all_to_all")
MOST_CALLS, MOST_S = 400, 1.0


def measure(collectives: list[str]) -> None:
    """Be one process of a program; rank 0 prints the median of each call, in microseconds."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    n = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("i",))
    split = NamedSharding(mesh, P("i"))
    calls = {
        "psum": lambda x: jax.lax.psum(x, "i"),
        "all_gather": lambda x: jax.lax.all_gather(x, "i"),
        "psum_scatter": lambda x: jax.lax.psum_scatter(x, "i", tiled=True),
        "ppermute": lambda x: jax.lax.ppermute(x, "i", [(k, (k + 1) % n) for k in range(n)]),
        "all_to_all": lambda x: jax.lax.all_to_all(x, "i", 0, 0, tiled=True),
    }
    for name in collectives:
        for size_bytes in SIZES_BYTES:
            items = np.ones(n * size_bytes // 4, np.float32)
            x = jax.make_array_from_callback(items.shape, split, items.__getitem__)
            out = P() if name == "psum" else P("i")
            run = jax.jit(
                jax.shard_map(
                    calls[name], mesh=mesh, in_specs=P("i"), out_specs=out, check_vma=False
                )
            )
            run(x).block_until_ready()
            # Every process makes the same number of calls.
            start = time.perf_counter()
            for _ in range(5):
                run(x).block_until_ready()
            estimate = np.array([(time.perf_counter() - start) / 5], np.float32)
            slowest = float(np.max(_everyones(estimate)))
            times = []
            for _ in range(min(MOST_CALLS, max(5, int(MOST_S / slowest)))):
                start = time.perf_counter()
                run(x).block_until_ready()
                times.append(time.perf_counter() - start)
            if jax.process_index() == 0:
                print("RESULT", json.dumps([name, size_bytes, statistics.median(times) * 1e6]))


def _everyones(x: Any) -> Any:
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(x)


def _results_of(over: str, ranks: int, collectives: list[str]) -> dict[tuple[str, int], float]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "gpucoll.launcher.cli", "-n", str(ranks), "--timeout", "120"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "GPUCOLL_JAX": str(int(over == "gpucoll"))}
    command += ["--no-prefix", __file__, "--be", over, str(port), *collectives]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode:
        print(f"{over} ended with {done.returncode}: {done.stderr[-600:]}", file=sys.stderr)
    rows = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    return {(name, size_bytes): microseconds for name, size_bytes, microseconds in rows}


def main() -> None:
    """Run both programs in turns, and print the medians and their ratio."""
    if sys.argv[1:2] == ["--be"]:
        over, port, *collectives = sys.argv[2:]
        if over == "gloo":
            import jax

            rank, size = (int(os.environ[f"GPUCOLL_{name}"]) for name in ("RANK", "WORLD_SIZE"))
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
        measure(collectives)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("collectives", nargs="*", default=["psum"], help=", ".join(COLLECTIVES))
    given = parser.parse_args()
    found: defaultdict[tuple[str, int], dict[str, list[float]]] = defaultdict(
        lambda: {"gpucoll": [], "gloo": []}
    )
    for _ in range(given.rounds):
        for over in ("gpucoll", "gloo"):
            for key, value in _results_of(over, given.ranks, given.collectives).items():
                found[key][over].append(value)
    for (name, size_bytes), sides in found.items():
        medians = {over: statistics.median(times) for over, times in sides.items() if times}
        ours, theirs = medians.get("gpucoll", float("nan")), medians.get("gloo", float("nan"))
        print(
            f"{name:13} {size_bytes >> 10:5} KiB  gpucoll {ours:9.1f} us  gloo {theirs:9.1f} us  "
            f"ratio {ours / theirs:.3f}"
        )


if __name__ == "__main__":
    main()
