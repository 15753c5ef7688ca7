"""Measure how long ranks take to go on after one is killed: until all know, and until all go on.

    python tools/measure_shrink.py                 4 ranks on one host
    python tools/measure_shrink.py --placed aabb   on two hosts, which are played on this machine

Each line is one job, in milliseconds: from the signal to the last rank's error, and from that to
the last rank's return from `shrink`. Then medians and the longest. gpucoll must be importable.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time

RANK = """
import sys, time, gpucoll, numpy as np
comm = gpucoll.init(timeout_s=60)
comm.barrier()
print("ready", flush=True)
try:
    while True:
        comm.all_reduce(np.ones(100))
except gpucoll.PeerLostError:
    told = time.monotonic()
with comm.shrink() as made:
    done = time.monotonic()
    assert made.all_reduce(1) == made.world_size
print(told, done, flush=True)
"""


def run_job(placed: str, victim: int) -> tuple[float, float]:
    """Return both times of one job, in seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = {
        "GPUCOLL_WORLD_SIZE": str(len(placed)),
        "GPUCOLL_JOB": secrets.token_hex(8),
        "GPUCOLL_SECRET": secrets.token_hex(16),
    }
    if len(set(placed)) > 1:
        names["GPUCOLL_MEET"] = f"tcp://127.0.0.1:{port}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, **names, "GPUCOLL_RANK": str(rank), "GPUCOLL_HOST_ID": letter},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, letter in enumerate(placed)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.readline()
    time.sleep(0.2)
    start = time.monotonic()
    ranks[victim].send_signal(signal.SIGKILL)
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    moments = [line.split() for rank, line in enumerate(outputs) if rank != victim]
    told = max(float(moment[0]) for moment in moments)
    return told - start, max(float(moment[1]) for moment in moments) - told


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--placed", default="aaaa", help="by rank, a letter for its host")
    parser.add_argument("--jobs", type=int, default=20)
    given = parser.parse_args()
    found = []
    for job in range(given.jobs):
        victim = job % len(given.placed)
        found.append(run_job(given.placed, victim))
        print(f"rank {victim} killed:", *(f"{1000 * moment:.0f}" for moment in found[-1]))
    names = ("until all know", "until all go on")
    for name, times in zip(names, zip(*found, strict=True), strict=True):
        median, longest = statistics.median(times), max(times)
        print(f"{name}: median {1000 * median:.0f} ms, longest {1000 * longest:.0f} ms")


if __name__ == "__main__":
    main()
