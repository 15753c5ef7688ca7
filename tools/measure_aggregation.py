"""Measure the weighted mean of many clients' models, compared with a copy, a triad and NumPy.

    python tools/measure_aggregation.py --clients 50 --megabytes 100

Each client's model is one of four arrays, so that its bytes come from memory and not from a cache.
For each client the cases take turns. GB/s count what a case reads and writes: two models for a
copy, three for the others. The last lines are the greatest resident memory of a process that adds
up so many clients, each of which makes its model anew: by `WeightedMean`, and by a list of all
models of which NumPy makes the mean.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gpucoll.federated import WeightedMean

WEIGHT = 3


def measured(clients: int, size_bytes: int, dtype: npt.DTypeLike) -> None:
    """Print the rates of all cases."""
    count = size_bytes // np.dtype(dtype).itemsize
    models = [np.ones(count, dtype) for _ in range(4)]
    singles = [np.ones(count, np.float32) for _ in range(4)]
    total, spare = np.zeros(count, np.float32), np.zeros(count, np.float32)
    mean = WeightedMean([models[0]])
    mean.add([models[0]])
    of_sum = 4 * count
    cases: dict[str, tuple[int, Callable[[int], object]]] = {
        "WeightedMean.add": (size_bytes + 2 * of_sum, lambda n: mean.add([models[n % 4]], WEIGHT)),
        "copy (np.copyto)": (2 * of_sum, lambda n: np.copyto(spare, singles[n % 4])),
        "x += y (np.add)": (3 * of_sum, lambda n: np.add(total, singles[n % 4], out=total)),
        "x = y * z (np.multiply)": (
            3 * of_sum,
            lambda n: np.multiply(singles[n % 4], singles[(n + 1) % 4], out=spare),
        ),
        "sum += weight * model (NumPy)": (
            size_bytes + 2 * of_sum,
            lambda n: total.__iadd__(np.float32(WEIGHT) * models[n % 4].astype(np.float32)),
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(clients):
        for name, (moved_bytes, call) in cases.items():
            start = time.perf_counter()
            call(turn)
            rates[name].append(moved_bytes / (time.perf_counter() - start) / 1e9)
    print(f"{np.dtype(dtype)}: models of {size_bytes / 1e6:g} MB, {clients} clients")
    for name, found in rates.items():
        best, median = max(found), statistics.median(found)
        print(f"  {name:30} median {median:5.1f} GB/s, best {best:5.1f} GB/s")
    start = time.perf_counter()
    mean.result()
    print(f"  result: {(time.perf_counter() - start) * 1e3:.0f} ms")


def peak(how: str, clients: int, size_bytes: int) -> None:
    """Add up clients, and print the resident memory that this took beyond what was there."""
    count = size_bytes // 4
    small = WeightedMean([np.zeros(1, np.float32)])
    small.add([np.zeros(1, np.float32)])
    before = peak_bytes()
    if how == "stream":
        mean = WeightedMean([np.empty(count, np.float32)])
        for client in range(clients):
            mean.add([np.full(count, client, np.float32)], client + 1)
    else:
        models = [np.full(count, client, np.float32) for client in range(clients)]
        sum(np.float32(client + 1) * model for client, model in enumerate(models))
    print(peak_bytes() - before)


def peak_bytes() -> int:
    """Return the greatest resident memory since this program began; ru_maxrss has its parent's."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--peak", choices=["stream", "list"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    size_bytes = int(given.megabytes * 1e6)
    if given.peak:
        peak(given.peak, given.clients, size_bytes)
        return
    measured(given.clients, size_bytes, np.float32)
    measured(given.clients, size_bytes // 2, ml_dtypes.bfloat16)
    for how, title in (("stream", "WeightedMean"), ("list", "a list of models")):
        command = [sys.executable, __file__, "--peak", how]
        sizes = ["--clients", str(given.clients), "--megabytes", str(given.megabytes)]
        done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=True)
        print(f"peak memory, {title}: {int(done.stdout) / size_bytes:.2f} models")


if __name__ == "__main__":
    main()
