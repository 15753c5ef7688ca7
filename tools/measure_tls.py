"""Time bulk data over TLS on loopback: Python's ssl alone, the loop of schedules, a broadcast.

    python tools/measure_tls.py [--rounds 9] [--bytes 268435456]

Two processes send the same bytes in turns: with `ssl` alone, in calls of 256 KiB; with a schedule
of `gpucoll.transport.tcp.secure_streams` over another connection of the same kind; and with
``comm.broadcast`` between two simulated hosts with certificates. The output has the median over the
rounds in GB/s, and the ratio to `ssl`. Needs the command openssl.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

CALL_BYTES = 256 << 10
LIMIT_S = 300
_EC = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


def certificates(folder: Path) -> dict[str, str]:
    """Make a certificate that is its own CA; return the variables that name it."""
    certificate, key = str(folder / "job.pem"), str(folder / "job.key")
    line = f"openssl req -x509 {_EC} -days 2 -subj /CN=job -keyout {key} -out {certificate}"
    subprocess.run(line.split(), check=True, capture_output=True)
    names = ("GPUCOLL_TLS_CERT", "GPUCOLL_TLS_KEY", "GPUCOLL_TLS_CA")
    return dict(zip(names, (certificate, key, certificate), strict=True))


def secured(end: socket.socket, rank: int) -> Any:
    """Return a connection on which TLS has been set up as between ranks."""
    from gpucoll.transport.tcp.credentials import job_tls
    from gpucoll.transport.tcp.handshake import Role

    tls = job_tls(f"rank {rank}")
    assert tls is not None
    end.setblocking(False)
    made = tls.socket(end, Role.ACCEPTS if rank == 0 else Role.CONNECTS)
    while not made.proceed():
        time.sleep(0)
    return made.detach()


def by_ssl(rank: int, end: Any, data: np.ndarray[Any, Any]) -> Callable[[], None]:
    """Return a function that sends all data on rank 0, and receives it on rank 1."""
    end.setblocking(True)
    whole = data.data.cast("B")

    def send() -> None:
        for at in range(0, len(whole), CALL_BYTES):
            end.sendall(whole[at : at + CALL_BYTES])

    def receive() -> None:
        at = 0
        while at < len(whole):
            at += end.recv_into(whole[at : at + CALL_BYTES])

    return send if rank == 0 else receive


def by_streams(rank: int, end: Any, data: np.ndarray[Any, Any]) -> Callable[[], object]:
    """Return the same with a schedule of one row."""
    from gpucoll.transport.tcp.secure_streams import secure_streams

    streams = secure_streams([end])
    sends, receives = (0, 0, data.nbytes), (-1, 0, 0)
    if rank == 1:
        sends, receives = receives, sends
    rows = np.array([[0, *sends, *receives, 0, 0, 0, 0, 1, 0]], np.int64)
    return lambda: streams.run(rows, data.ctypes.data, data.nbytes, (0, 1, 2))


def run_rank(rank: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Run one of the two ranks; return the seconds of each round by method."""
    import gpucoll

    with gpucoll.init(timeout_s=LIMIT_S) as comm:
        data = np.full(options.bytes, 1 - rank, np.uint8)
        ways: dict[str, Callable[[], object]] = {
            "ssl alone": by_ssl(rank, secured(connected(comm, rank), rank), data),
            "schedules": by_streams(rank, secured(connected(comm, rank), rank), data),
            "broadcast": lambda: comm.broadcast(data, root=0, out=data),
        }
        found = defaultdict(list)
        for _ in range(options.rounds + 1):
            for name, way in ways.items():
                comm.barrier()
                start = time.perf_counter()
                way()
                comm.barrier()
                found[name].append(time.perf_counter() - start)
        assert data.all()
        print(f"rank {rank}: {dict(comm.describe().facts)['links']}", file=sys.stderr)
    return {name: times[1:] for name, times in found.items()}


def connected(comm: Any, rank: int) -> socket.socket:
    """Return a connection between the two ranks."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            comm.broadcast_object(listener.getsockname(), root=0)
            return listener.accept()[0]
    return socket.create_connection(comm.broadcast_object(None, root=0))


def main() -> None:
    """Start both ranks, and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bytes", type=int, default=256 << 20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        job = {
            **certificates(Path(folder)),
            "GPUCOLL_WORLD_SIZE": "2",
            "GPUCOLL_SECRET": secrets.token_hex(32),
            "GPUCOLL_MEET": f"tcp://127.0.0.1:{free.getsockname()[1]}",
        }
        free.close()
        other = os.fork()
        rank = int(other == 0)
        os.environ.update(job, GPUCOLL_RANK=str(rank), GPUCOLL_HOST_ID=f"host {rank}")
        times = run_rank(rank, options)
        if rank == 1:
            os._exit(0)
        os.waitpid(other, 0)
    rates = {name: options.bytes / median(taken) / 1e9 for name, taken in times.items()}
    print(f"{options.bytes >> 20} MiB, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, rate in rates.items():
        print(f"{name:12} {rate:6.2f} GB/s  {rate / rates['ssl alone']:5.2f}")


if __name__ == "__main__":
    main()
