"""Measure how long ranks take after one is killed: until they notice, and until they continue.

    python tools/measure_shrink.py                    4 ranks on one host, in all_reduce
    python tools/measure_shrink.py --placed aabb      on two hosts, which are played on this machine
    python tools/measure_shrink.py --call barrier     where they wait, and use no CPU
    python tools/measure_shrink.py --busy 4           beside four processes that use a CPU each

The first time is from the signal to each rank's error, over all ranks and jobs. The second is from
the last rank's error to the last rank's return from `shrink`, over all jobs. A job begins when the
CPUs have been idle for a moment, or when the patience is over; the last line has the number of jobs
that began on idle CPUs. gpucoll must be importable.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any

import numpy as np

import gpucoll

IDLE_SHARE, IDLE_S = 0.9, 0.3


def all_reduce(comm: gpucoll.Communicator, victim: int) -> None:
    """Make calls in a row, on the victim as well."""
    while True:
        comm.all_reduce(np.ones(100))


def barrier(comm: gpucoll.Communicator, victim: int) -> None:
    """Wait for the victim, which does not arrive."""
    if comm.rank == victim:
        signal.pause()
    comm.barrier()


def recv(comm: gpucoll.Communicator, victim: int) -> None:
    """Wait for a message from the victim, which does not send one."""
    if comm.rank == victim:
        signal.pause()
    comm.recv(np.ones(100), victim)


CALLS: dict[str, Callable[[gpucoll.Communicator, int], None]] = {
    function.__name__: function for function in (all_reduce, barrier, recv)
}


def run_rank(variables: dict[str, str], call: str, victim: int, said: int) -> None:
    """Run one rank of a job: report when it waits, when it gets the error, when it continues."""
    os.environ.update(variables)
    comm = gpucoll.init(timeout_s=60)
    comm.all_reduce(np.ones(100))
    comm.barrier()
    os.write(said, b"ready\n")
    try:
        CALLS[call](comm, victim)
    except gpucoll.PeerLostError:
        told = time.monotonic()
    with comm.shrink() as made:
        done = time.monotonic()
        assert made.all_reduce(1) == made.world_size
    os.write(said, json.dumps([told, done]).encode() + b"\n")
    os._exit(0)


def fork(function: Callable[..., None], *given: Any) -> int:
    """Call a function in a new process; return the process id."""
    if (pid := os.fork()) == 0:
        try:
            function(*given)
        finally:
            os._exit(1)
    return pid


def run_job(placed: str, call: str, victim: int) -> list[list[float]]:
    """Return for every remaining rank the times until it noticed and until it continued."""
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
    pids, lines = [], []
    with ExitStack() as files:
        for rank, letter in enumerate(placed):
            mine = {**names, "GPUCOLL_RANK": str(rank), "GPUCOLL_HOST_ID": letter}
            reading, writing = os.pipe()
            pids.append(fork(run_rank, mine, call, victim, writing))
            os.close(writing)
            lines.append(files.enter_context(os.fdopen(reading)))
        for line in lines:
            assert line.readline() == "ready\n"
        time.sleep(0.2)
        start = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        moments = [json.loads(line.readline()) for line in lines if line is not lines[victim]]
        for pid in pids:
            os.waitpid(pid, 0)
    return [[moment - start for moment in found] for found in moments]


def idle_seconds() -> float:
    """Return the total idle time of all CPUs since the machine was started, in seconds."""
    with open("/proc/stat") as file:
        return float(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK")


def wait_for_idle(patience_s: float) -> bool:
    """Wait until the CPUs are idle, for a limited time; return whether they are."""
    stop = time.monotonic() + patience_s
    while time.monotonic() < stop:
        before = idle_seconds()
        time.sleep(IDLE_S)
        if idle_seconds() - before > IDLE_SHARE * IDLE_S * (os.cpu_count() or 1):
            return True
    return False


def use_cpu() -> None:
    """Use one CPU until the process is ended."""
    while True:
        pass


def spelled(times: Sequence[float]) -> str:
    """Format percentiles of times, in milliseconds."""
    names = {50: "median", 90: "90 %", 99: "99 %", 100: "longest"}
    return ", ".join(
        f"{name} {1000 * float(np.percentile(times, share)):.0f} ms"
        for share, name in names.items()
    )


def main() -> None:
    """Measure according to the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--placed", default="aaaa", help="a letter for the host of each rank")
    parser.add_argument(
        "--call", default="all_reduce", choices=CALLS, help=("the call that the ranks make")
    )
    parser.add_argument(
        "--busy", type=int, default=0, help=("number of other processes that use a CPU each")
    )
    parser.add_argument(
        "--patience", type=float, default=20.0, help=("how long to wait for idle CPUs, in seconds")
    )
    parser.add_argument("--jobs", type=int, default=20)
    given = parser.parse_args()
    if len(given.placed) < 3:
        parser.error("--placed needs three ranks or more: of two, rank 1 alone does not go on")
    with gpucoll.init(rank=0, world_size=1) as alone:
        alone.barrier()  # so that forked processes have everything loaded
    told, gone_on, n_idle = [], [], 0
    for job in range(given.jobs):
        n_idle += wait_for_idle(given.patience)
        beside = [get_context("fork").Process(target=use_cpu) for _ in range(given.busy)]
        for process in beside:
            process.start()
        try:
            moments = run_job(given.placed, given.call, job % len(given.placed))
        finally:
            for process in beside:
                process.kill()
                process.join()
        told += [told for told, _ in moments]
        gone_on.append(max(done for _, done in moments) - max(told for told, _ in moments))
    print(f"until a rank knows: {spelled(told)}")
    print(f"until all go on: {spelled(gone_on)}")
    print(f"{n_idle} of {given.jobs} jobs began on idle CPUs, beside {given.busy} busy processes")


if __name__ == "__main__":
    main()
