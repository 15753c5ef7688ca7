"""Measure calls with counts, lists of blocks and probed receives, compared with plain calls.

    gpucoll-run -n 2 tools/measure_blocks.py

Each call of 8 bytes per rank is made 50 times in a row, in 300 rows, with the cases taking turns.
The best row is printed, in microseconds on rank 0. Rows are short, so that some of them run
undisturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gpucoll

N_CALLS, ROUNDS = 50, 300


def collectives(comm: gpucoll.Communicator) -> dict[str, Callable[[], Any]]:
    """Return calls by name."""
    size, is_root = comm.world_size, comm.rank == 0
    x, y, whole, every = np.ones(1), np.ones(1), np.empty(size), np.ones(size)
    ones, outs = [1] * size, [np.empty(1) for _ in range(size)]
    blocks = [np.ones(1) for _ in range(size)]
    both: dict[str, Any] = {"send_counts": ones, "recv_counts": ones}
    return {
        "all_gather": lambda: comm.all_gather(x, out=whole),
        "all_gather, counts": lambda: comm.all_gather(x, counts=ones, out=whole),
        "all_gather, list": lambda: comm.all_gather(x, out=outs),
        "all_gather, counts='auto'": lambda: comm.all_gather(x, counts="auto", out=whole),
        "gather, counts": lambda: comm.gather(x, counts=ones, out=whole if is_root else None),
        "scatter, counts": lambda: comm.scatter(every if is_root else None, counts=ones, out=y),
        "reduce_scatter, counts": lambda: comm.reduce_scatter(every, counts=ones, out=y),
        "all_to_all": lambda: comm.all_to_all(every, out=whole),
        "all_to_all, counts": lambda: comm.all_to_all(every, out=whole, **both),
        "all_to_all, lists": lambda: comm.all_to_all(blocks, out=outs),
        "all_to_all, recv_counts asked": lambda: comm.all_to_all(
            every, send_counts=ones, out=whole
        ),
    }


def round_trips(comm: gpucoll.Communicator) -> dict[str, Callable[[], Any]]:
    """Return round trips to the next rank, by the way of receiving."""
    x, out, other = np.ones(1), np.zeros(1), comm.rank ^ 1

    def probed() -> Any:
        comm.probe(other)
        return comm.recv(out, other)

    ways: dict[str, Callable[[], Any]] = {
        "recv": lambda: comm.recv(out, other),
        "recv, info=True": lambda: comm.recv(out, other, info=True),
        "probe, recv": probed,
    }

    def trip(receive: Callable[[], Any]) -> Callable[[], Any]:
        def there_and_back() -> None:
            if comm.rank % 2:
                receive()
                comm.send(x, other)
            else:
                comm.send(x, other)
                receive()

        return there_and_back

    return {f"send, {name}, and back": trip(receive) for name, receive in ways.items()}


def main() -> None:
    """Measure on the ranks that were started."""
    with gpucoll.init() as comm:
        cases = collectives(comm)
        if comm.world_size % 2 == 0:
            cases |= round_trips(comm)
        best = dict.fromkeys(cases, float("inf"))
        for _ in range(ROUNDS):
            for name, call in cases.items():
                comm.barrier()
                begin = time.perf_counter()
                for _ in range(N_CALLS):
                    call()
                best[name] = min(best[name], (time.perf_counter() - begin) / N_CALLS)
        if comm.rank == 0:
            for name, seconds in best.items():
                print(f"{name:32} {seconds * 1e6:8.2f}", flush=True)


if __name__ == "__main__":
    main()
