"""Measure how long it takes until newcomers that wait are ranks: `grow` and `join`.

    python tools/measure_grow.py                       3 ranks on one host, and a fourth joins
    python tools/measure_grow.py --placed abc+d        3 hosts, and a fourth joins
    python tools/measure_grow.py --placed aabbcc+dd    with two ranks on each

Hosts are played on this machine: they connect over loopback TCP. The time is from the old ranks'
last call before `grow` until the last old rank has its new communicator, in which all have arrived.
Newcomers wait in `join` before that. The second line is the time of a call for which nobody waits.
gpucoll must be importable.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from measure_shrink import fork, spelled, wait_for_idle

import gpucoll

BEFORE_S = 1.0
"""How long newcomers have to reach the door."""
IN_VAIN = 100
"""How often the ranks call `grow` when nobody waits."""


def be_old(variables: dict[str, str], rank: int, n_old: int, n_new: int, said: int) -> None:
    """Be one of the first ranks; report how long the newcomers take."""
    os.environ.update(variables)
    meet = variables.get("GPUCOLL_MEET")
    comm = gpucoll.init(rank=rank, world_size=n_old, timeout_s=60, meet=meet)
    assert comm.grow() is comm  # opens the door
    time.sleep(BEFORE_S)
    comm.barrier()
    start = time.monotonic()
    with comm.grow(at_most=n_new, wait_s=30) as grown:
        took_s = time.monotonic() - start
        assert grown.all_reduce(1) == n_old + n_new
        in_vain_s = grow_in_vain(grown)
    os.write(said, f"{took_s} {in_vain_s}\n".encode())
    os._exit(0)


def be_new(variables: dict[str, str], total: int) -> None:
    """Be a newcomer."""
    os.environ.update(variables)
    with gpucoll.join(timeout_s=60) as comm:
        assert comm.all_reduce(1) == total
        grow_in_vain(comm)
    os._exit(0)


def grow_in_vain(comm: gpucoll.Communicator) -> float:
    """Return how long a call takes for which nobody waits."""
    comm.barrier()
    start = time.monotonic()
    for _ in range(IN_VAIN):
        assert comm.grow() is comm
    return (time.monotonic() - start) / IN_VAIN


def run_job(old: str, new: str) -> tuple[float, float]:
    """Return how long the slowest old rank took with the newcomers, and for a call without any."""
    names = {"GPUCOLL_JOB": secrets.token_hex(8)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        if len({*old, *new}) > 1:
            names["GPUCOLL_MEET"] = f"file://{Path(folder, 'meeting')}"
        pids, lines = [], []
        for rank, letter in enumerate(old):
            mine = {**names, "GPUCOLL_HOST_ID": letter}
            reading, writing = os.pipe()
            pids.append(fork(be_old, mine, rank, len(old), len(new), writing))
            os.close(writing)
            lines.append(files.enter_context(os.fdopen(reading)))
        for letter in new:
            mine = {**names, "GPUCOLL_HOST_ID": letter}
            pids.append(fork(be_new, mine, len(old) + len(new)))
        took = [[float(word) for word in line.readline().split()] for line in lines]
        for pid in pids:
            os.waitpid(pid, 0)
    with_newcomers, in_vain = (max(times) for times in zip(*took, strict=True))
    return with_newcomers, in_vain


def main() -> None:
    """Measure according to the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--placed", default="aaa+a", help="a letter for the host of each rank, + before newcomers"
    )
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument(
        "--patience", type=float, default=20.0, help="how long to wait for idle CPUs, in seconds"
    )
    given = parser.parse_args()
    old, _, new = given.placed.partition("+")
    if not old or not new:
        parser.error("--placed needs ranks before the + and newcomers after it, as in abc+d")
    with gpucoll.init(rank=0, world_size=1) as alone:
        alone.all_reduce(np.ones(3))  # so that forked processes have everything loaded
    n_idle, took, in_vain = 0, [], []
    for _ in range(given.jobs):
        n_idle += wait_for_idle(given.patience)
        with_newcomers, without = run_job(old, new)
        took.append(with_newcomers)
        in_vain.append(without)
    print(f"{given.placed}: until all go on with the newcomers: {spelled(took)}")
    print(f"where nobody waits: median {1e6 * float(np.median(in_vain)):.0f} us")
    print(f"{n_idle} of {given.jobs} jobs began on idle CPUs")


if __name__ == "__main__":
    main()
