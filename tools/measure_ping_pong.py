r"""Time a message and its answer between two ranks on different hosts, and the same on a socket.

    gpucoll-run --nodes 2 --node-rank 0 --meet HOST:PORT -n 1 \
        tools/measure_ping_pong.py --address HOST

and the same with ``--node-rank 1`` on the other host. Or simulate two hosts on one machine with
``--played`` alone. Both kinds of round trip take turns in the same two processes; the socket
blocks, as in simple programs. The output has the median over the rounds of the time in one
direction, in microseconds.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import gpucoll

COUNT = 2000
ROUNDS = 11
SIZES = (4, 1024, 65536, 4 << 20)


def raw_socket(comm: gpucoll.Communicator, address: str) -> socket.socket:
    """Return a plain connection between the two ranks; `address` is that of rank 0."""
    if comm.rank == 0:
        with socket.create_server((address, 0)) as listener:
            comm.broadcast_object(listener.getsockname()[:2], root=0)
            end, _ = listener.accept()
    else:
        end = socket.create_connection(tuple(comm.broadcast_object(None, root=0)))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def receive_all(end: socket.socket, memory: memoryview) -> None:
    """Fill the memory with received bytes."""
    at = 0
    while at < len(memory):
        at += end.recv_into(memory[at:])


def time_one_way(
    rank: int, send: Callable[[], object], receive: Callable[[], object], count: int
) -> float:
    """Return the time in one direction, in microseconds."""
    start = time.perf_counter()
    for _ in range(count):
        for step in (send, receive) if rank == 0 else (receive, send):
            step()
    return (time.perf_counter() - start) / count / 2 * 1e6


def measure(comm: gpucoll.Communicator, address: str) -> None:
    """Print a line for each size."""
    end, other = raw_socket(comm, address), 1 - comm.rank
    for size in SIZES:
        x = np.zeros(size, np.uint8)
        count = max(COUNT * 1024 // max(size, 1024), 10)
        ways = (
            (lambda x=x: comm.send(x, other), lambda x=x: comm.recv(x, other)),
            (lambda x=x: end.sendall(x), lambda x=x: receive_all(end, memoryview(x))),
        )
        found: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for times, (send, receive) in zip(found, ways, strict=True):
                comm.barrier()
                times.append(time_one_way(comm.rank, send, receive, count))
        if comm.rank == 0:
            ours, plain = map(statistics.median, found)
            print(f"{size:9} B: gpucoll {ours:9.1f}, a socket {plain:9.1f}: {ours / plain:.2f}")


def play() -> int:
    """Start both ranks on this machine, as if on two hosts."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {
        "GPUCOLL_MEET": f"tcp://127.0.0.1:{port}",
        "GPUCOLL_SECRET": secrets.token_hex(16),
        "GPUCOLL_WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **shared, "GPUCOLL_RANK": f"{rank}", "GPUCOLL_HOST_ID": f"h{rank}"},
        )
        for rank in range(2)
    ]
    return max(each.wait() for each in ranks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--played", action="store_true", help="simulate two hosts on this machine")
    parser.add_argument("--address", default="127.0.0.1", help="the address of rank 0's host")
    options = parser.parse_args()
    if options.played:
        sys.exit(play())
    with gpucoll.init(timeout_s=60) as made:
        measure(made, options.address)
