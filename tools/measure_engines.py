"""Time from a cluster to the first all_reduce with Ray, Dask and `gpucoll.launch`, in turns.

    python tools/measure_engines.py --ranks 2 --rounds 5

Needs ray and distributed. The clusters run on this machine and are started once; their start is not
measured, and the kernels are compiled beforehand. The output has the minimum and the median over
the rounds, in milliseconds, of a run on new workers and of a run on workers that are kept. Ray's
new workers are started within the measured time; Dask's exist before.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import gpucoll


def first_total(comm: gpucoll.Communicator) -> int:
    """Return the number of ranks, computed with one all_reduce."""
    return int(comm.all_reduce(1))


def timed(function: Callable[[], Any], expected: list[int]) -> float:
    """Return the duration of a call, in milliseconds."""
    start = time.perf_counter()
    found = function()
    taken_ms = 1000 * (time.perf_counter() - start)
    assert found == expected, found
    return taken_ms


def measure(ranks: int, rounds: int, client: Any) -> dict[str, list[float]]:
    """Return all times by name."""
    from gpucoll.integrations import dask, ray

    times: dict[str, list[float]] = defaultdict(list)
    expected = [ranks] * ranks
    on_dask = dask.Workers(ranks, client=client)
    gpucoll.launch(first_total, ranks=ranks)
    for _ in range(rounds):
        times["gpucoll.launch, new processes"].append(
            timed(lambda: gpucoll.launch(first_total, ranks=ranks), expected)
        )
        start = time.perf_counter()
        with ray.Workers(ranks, num_cpus=0.1) as on_ray:
            on_ray.run(first_total)
            times["Ray, new actors and their first run"].append(
                1000 * (time.perf_counter() - start)
            )
            for _ in range(3):
                times["Ray, a run on kept actors"].append(
                    timed(lambda: on_ray.run(first_total), expected)
                )
        client.restart()
        client.wait_for_workers(ranks)
        times["Dask, the first run of new workers"].append(
            timed(lambda: on_dask.run(first_total), expected)
        )
        for _ in range(3):
            times["Dask, a run on the same workers"].append(
                timed(lambda: on_dask.run(first_total), expected)
            )
    return times


def main() -> None:
    """Start both clusters, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from distributed import Client, LocalCluster

    ray.init(num_cpus=options.ranks, include_dashboard=False, log_to_driver=False)
    with (
        LocalCluster(
            n_workers=options.ranks, threads_per_worker=1, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        times = measure(options.ranks, options.rounds, client)
    ray.shutdown()
    for name, taken in times.items():
        print(f"{name:40} least {min(taken):8.0f} ms   median {median(taken):8.0f} ms")


if __name__ == "__main__":
    main()
