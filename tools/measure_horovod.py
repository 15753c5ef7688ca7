"""Measure Horovod's calls on gpucoll beside Horovod itself, with MXNet, in one interleaved run.

    python tools/measure_horovod.py --peer PEER/bin/python --ours OURS/bin/python
    python tools/measure_horovod.py --torch
    python tools/measure_horovod.py --tensorflow --ours OURS/bin/python
    python tools/measure_horovod.py --loss

PEER has Horovod 0.28.1, built with MXNet 1.9.1 and Gloo; OURS has MXNet 1.9.1 and what gpucoll
needs. gpucoll must be importable in OURS. Two ranks. Jobs of both take turns, and each measures
every case: a median of its samples. Figures are medians of the jobs, and their range.

``--torch`` measures a blocking call of ``horovod.torch`` beside gpucoll's own, in this Python;
``--tensorflow`` an eager call in one that has TensorFlow; ``--loss`` the time from a kill of one of
4 ranks until the others have the error that names it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SMALL, LARGE = 1024, 1 << 20
"""Elements of float32: 4 KB and 4 MB."""
MANY = 50
CASES = {
    "4 KB, named, in place": (20, 40),
    f"{MANY} asynchronous of 4 KB, in opposite orders": (1, 200),
    "4 MB, named, in place": (1, 60),
}
"""Calls of a sample, and samples."""
Call = Callable[[], object]


def median_us(call: Call, meet: Call, calls: int, samples: int) -> float:
    """Return the microseconds that a call takes: the median of samples."""
    took = []
    for _ in range(samples):
        call()
        meet()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        took.append((time.perf_counter() - start) / calls)
    return float(np.median(took)) * 1e6


def be_rank_with_mxnet(module: str) -> None:
    """Measure every case with a module of Horovod's names, and print the figures on rank 0."""
    vars(np).setdefault("bool", bool)  # MXNet needs it
    mx = importlib.import_module("mxnet")
    hvd = importlib.import_module(module)
    hvd.init()
    small, large, one = (mx.nd.ones((n,)) for n in (SMALL, LARGE, 1))
    many = [mx.nd.ones((SMALL,)) for _ in range(MANY)]
    names = [f"many.{number}" for number in range(MANY)]
    order = list(range(MANY)) if hvd.rank() == 0 else list(reversed(range(MANY)))
    mx.nd.waitall()

    def one_call(x: Any, name: str) -> Call:
        return lambda: hvd.allreduce_(x, name=name).wait_to_read()

    def many_calls() -> None:
        for number in order:
            hvd.allreduce_(many[number], name=names[number])
        for x in many:
            x.wait_to_read()

    meet = one_call(one, "meet")
    calls = one_call(small, "small"), many_calls, one_call(large, "large")
    figures = [
        median_us(call, meet, *counts) for call, counts in zip(calls, CASES.values(), strict=True)
    ]
    if hvd.rank() == 0:
        print(json.dumps(figures), flush=True)
    hvd.shutdown()


def be_rank_with_torch() -> None:
    """Measure a blocking call of horovod.torch, and gpucoll's own, in turns."""
    torch = importlib.import_module("torch")
    hvd = importlib.import_module("gpucoll.integrations.horovod.torch")
    gpucoll = importlib.import_module("gpucoll")
    hvd.init()
    x = torch.ones(SMALL)
    with gpucoll.init() as comm:
        calls: dict[str, Call] = {
            "gpucoll": lambda: comm.all_reduce(x, "avg", out=x),
            "horovod.torch": lambda: hvd.allreduce_(x, name="x"),
        }
        took: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(20):
            for name, call in calls.items():
                took[name].append(median_us(call, comm.barrier, 100, 3))
        if hvd.rank() == 0:
            for name, figures in took.items():
                print(f"{name}: blocking, 4 KB: {spelled(figures)}")
    hvd.shutdown()


def be_rank_with_tensorflow() -> None:
    """Measure an eager call of horovod.tensorflow, and what TensorFlow's own cheapest op takes."""
    tf = importlib.import_module("tensorflow")
    hvd = importlib.import_module("gpucoll.integrations.horovod.tensorflow")
    hvd.init()
    one = tf.ones(1)
    for name, x in (("4 KB", tf.ones(SMALL)), ("4 MB", tf.ones(LARGE))):
        calls: dict[str, Call] = {
            "x * 2": lambda x=x: x * 2.0,  # type: ignore[misc]
            "allreduce": lambda x=x: hvd.allreduce(x, name="x"),  # type: ignore[misc]
        }
        for kind, call in calls.items():
            took = [
                median_us(call, lambda: hvd.allreduce(one, name="meet"), 5, 20) for _ in "12345"
            ]
            if hvd.rank() == 0:
                print(f"{kind}, {name}: {spelled(took)}")
    hvd.shutdown()


def be_rank_of_a_loss() -> None:
    """Lose rank 1, and print how long the error took."""
    from gpucoll.integrations.horovod import basics as hvd
    from gpucoll.integrations.horovod.exceptions import HorovodInternalError
    from gpucoll.integrations.horovod.objects import allgather_object

    hvd.init()
    allgather_object(hvd.rank())
    start = time.perf_counter()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        allgather_object(hvd.rank())
    except HorovodInternalError as error:
        if "rank 1" not in str(error):
            raise
        print(json.dumps([(time.perf_counter() - start) * 1e3]), flush=True)


def measure_losses(jobs: int = 15) -> None:
    """Run jobs that lose a rank, and print the milliseconds until the others know."""
    command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", "4", __file__]
    took: list[float] = []
    for _ in range(jobs):
        done = subprocess.run(
            [*command, "--rank-of", "loss"], capture_output=True, text=True, timeout=60, check=False
        )
        told = [json.loads(line)[0] for line in done.stdout.splitlines() if line.startswith("[")]
        assert len(told) == 3, done.stderr
        took += told
    print(f"{len(took)} notices: {np.median(took):.0f} ms (at most {max(took):.0f})")


def spelled(figures: list[float]) -> str:
    """Return median and range."""
    return f"{np.median(figures):.1f} us ({min(figures):.1f} to {max(figures):.1f})"


def figures_of(command: list[str]) -> list[float]:
    """Run a job, and return what its rank 0 printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    for line in done.stdout.splitlines():
        if "[" in line and line.endswith("]"):
            found: list[float] = json.loads(line[line.rfind("[") :])
            return found
    raise SystemExit(f"{' '.join(command)} printed no figures:\n{done.stdout}{done.stderr}")


def compare(peer: str, ours: str, rounds: int) -> None:
    """Run jobs in turns, and print what each case took, and its share of Horovod's time."""
    this = str(Path(__file__).resolve())
    runner = str(Path(peer).with_name("horovodrun"))
    of_peer = [runner, "--gloo", "-np", "2", peer, this, "--rank-of", "horovod.mxnet"]
    of_ours = [ours, "-m", "gpucoll", "run", "--no-prefix", "-n", "2", this]
    of_ours += ["--rank-of", "gpucoll.integrations.horovod.mxnet"]
    theirs, own = [], []
    for _ in range(rounds):
        theirs.append(figures_of(of_peer))
        own.append(figures_of(of_ours))
    for case, a, b in zip(CASES, zip(*theirs, strict=True), zip(*own, strict=True), strict=True):
        share = np.median(b) / np.median(a)
        print(f"{case}: Horovod {spelled(list(a))}, gpucoll {spelled(list(b))}, {share:.3f}")


def main() -> None:
    """Measure according to the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--ours", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    for what in ("--torch", "--tensorflow", "--loss"):
        parser.add_argument(what, action="store_true")
    parser.add_argument("--rank-of", metavar="MODULE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of == "torch":
        be_rank_with_torch()
    elif given.rank_of == "tensorflow":
        be_rank_with_tensorflow()
    elif given.rank_of == "loss":
        be_rank_of_a_loss()
    elif given.rank_of:
        be_rank_with_mxnet(given.rank_of)
    elif given.loss:
        measure_losses()
    elif given.torch or given.tensorflow:
        framework = "torch" if given.torch else "tensorflow"
        command = [given.ours, "-m", "gpucoll", "run", "--no-prefix", "-n", "2", __file__]
        subprocess.run([*command, "--rank-of", framework], check=True, timeout=120)
    elif given.peer:
        compare(given.peer, given.ours, given.rounds)
    else:
        parser.error("--peer, --torch, --tensorflow or --loss")


if __name__ == "__main__":
    main()
