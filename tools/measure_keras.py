"""Measure what averaging costs a step of Keras' fit, or a call of MXNet's KVStore, on two ranks.

    KERAS_BACKEND=torch python tools/measure_keras.py
    KERAS_BACKEND=tensorflow python tools/measure_keras.py --python TENSORFLOW/bin/python
    python tools/measure_keras.py --mxnet --python MXNET/bin/python

A step of a network with 1.2 million weights (4.7 MB), and of one with 2,000, on batches of 32 rows
for each rank: with a plain optimizer, where ranks train alone, and with a DistributedOptimizer, in
turns. Figures are medians of epochs, and their range.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WIDTHS = {"1.2 million weights": 1024, "2,000 weights": 32}
STEPS, TURNS = 50, 7


def spelled(seconds: list[float]) -> str:
    """Return median and range in microseconds."""
    us = np.array(seconds) * 1e6
    return f"{np.median(us):.0f} us ({us.min():.0f} to {us.max():.0f})"


def timed(call: Callable[[], Any], meet: Callable[[], Any], n: int) -> float:
    """Return the seconds of one of n parts of a call that all ranks begin together."""
    meet()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) / n


def be_rank_with_keras() -> None:
    """Measure steps of fit."""
    keras = importlib.import_module("keras")
    gck = importlib.import_module("gpucoll.integrations.keras")
    comm = importlib.import_module("gpucoll").init()
    keras.utils.set_random_seed(0)
    for name, width in WIDTHS.items():
        x, y = np.ones((32 * STEPS, width), np.float32), np.ones((32 * STEPS, 1), np.float32)
        fits: dict[str, Callable[[], Any]] = {}
        for kind in ("alone", "averaged"):
            layers = [keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((width,)), *layers])
            optimizer = keras.optimizers.SGD(0.01)
            is_averaged = kind == "averaged"
            model.compile(gck.DistributedOptimizer(optimizer) if is_averaged else optimizer, "mse")
            options = {"verbose": 0, "callbacks": [gck.DataParallel()] if is_averaged else []}
            fits[kind] = functools.partial(model.fit, x, y, **options)
        took: dict[str, list[float]] = {kind: [] for kind in fits}
        for turn in range(TURNS + 1):
            for kind, fit in fits.items():
                seconds = timed(fit, comm.barrier, STEPS)
                if turn:  # the first compiles
                    took[kind].append(seconds)
        if comm.rank == 0:
            for kind, seconds_of_kind in took.items():
                backend = keras.backend.backend()
                print(f"keras ({backend}), {name}, {kind}: {spelled(seconds_of_kind)} a step")


def be_rank_with_mxnet() -> None:
    """Measure pushpull in place."""
    importlib.import_module("gpucoll.integrations.mxnet")
    comm = importlib.import_module("gpucoll").init()
    mx = importlib.import_module("mxnet")
    kv = mx.kv.create("gpucoll")
    for name, n, calls in (("4 KB", 1 << 10, 200), ("4 MB", 1 << 20, 20)):
        x = mx.nd.ones((n,))
        view = np.ones(n, np.float32)

        def store(x: Any = x, calls: int = calls) -> None:
            for _ in range(calls):
                kv.pushpull("x", x)

        def plain(view: Any = view, calls: int = calls) -> None:
            for _ in range(calls):
                comm.all_reduce(view, out=view)

        took: dict[str, list[float]] = {"pushpull": [], "all_reduce of NumPy": []}
        for _ in range(5 * TURNS):
            for kind, call in zip(took, (store, plain), strict=True):
                took[kind].append(timed(call, comm.barrier, calls))
        if comm.rank == 0:
            for kind, seconds in took.items():
                print(f"mxnet, {name}, {kind}: {spelled(seconds)}")


def main() -> None:
    """Start two ranks, or be one."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--python", default=sys.executable)
    arguments.add_argument("--mxnet", action="store_true")
    arguments.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.rank:
        (be_rank_with_mxnet if chosen.mxnet else be_rank_with_keras)()
        return
    command = [chosen.python, "-m", "gpucoll", "run", "--no-prefix", "-n", "2", __file__, "--rank"]
    subprocess.run(command + ["--mxnet"] * chosen.mxnet, check=True, timeout=600)


if __name__ == "__main__":
    main()
