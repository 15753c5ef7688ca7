"""Time calls between hosts that are played on this machine: arrays, objects, ordered reductions.

    python tools/measure_played.py --placed ab          # two hosts of one rank
    python tools/measure_played.py --placed abab --tls  # two hosts of two ranks, inside of TLS 1.3

Ranks whose letters differ are on different hosts for gpucoll, and connect over loopback. The output
has rank 0's median of each call in microseconds. To compare two versions, run each in turns, with
its own `PYTHONPATH`. ``--tls`` needs the command openssl.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

RANK = """
import statistics, time
import numpy as np
import gpucoll

def timed(comm, name, call, n_calls):
    times = []
    for _ in range(n_calls + 5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    if comm.rank == 0:
        print(f"{name:>27} {1e6 * statistics.median(times[5:]):10.1f}", flush=True)

with gpucoll.init(timeout_s=60) as comm:
    for size in (8, 8192, 65536, 1 << 20):
        x = np.ones(size // 4, np.float32)
        timed(comm, f"all_reduce {size}", lambda: comm.all_reduce(x, out=x), 100)
        timed(comm, f"broadcast {size}", lambda: comm.broadcast(x, out=x), 100)
    for size in (1, 65536, 4 << 20):
        value = np.ones(size, np.uint8)
        timed(comm, f"broadcast_object {size}", lambda: comm.broadcast_object(value), 40)
        timed(comm, f"all_gather_object {size}", lambda: comm.all_gather_object(value), 20)
with gpucoll.init(timeout_s=60, name="in order", deterministic="order") as comm:
    for size in (1 << 20, 16 << 20):
        x = np.ones(size // 4, np.float32)
        timed(comm, f"ordered_all_reduce {size}", lambda: comm.all_reduce(x, out=x), 10)
"""
KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


def certificates(folder: Path) -> dict[str, str]:
    """Make a CA and a certificate; return the variables that name them."""
    commands = (
        f"req -x509 {KEY} -days 1 -subj /CN=CA -keyout ca.key -out ca.pem",
        f"req {KEY} -subj /CN=rank -keyout rank.key -out rank.csr",
        "x509 -req -in rank.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -out rank.pem",
    )
    for command in commands:
        line = ["openssl", *command.split()]
        subprocess.run(line, cwd=folder, check=True, capture_output=True)
    files = {"CERT": "rank.pem", "KEY": "rank.key", "CA": "ca.pem"}
    return {f"GPUCOLL_TLS_{name}": str(folder / file) for name, file in files.items()}


def main() -> int:
    """Parse the command line, run the ranks, and return 0 if all succeeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--placed", default="ab", help="by rank, its host's letter")
    parser.add_argument("--tls", action="store_true")
    given = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        common = {
            **os.environ,
            **(certificates(Path(folder)) if given.tls else {}),
            "GPUCOLL_SECRET": secrets.token_hex(32),
            "GPUCOLL_INTERFACES": "lo",
            "GPUCOLL_MEET": f"127.0.0.1:{port}",
            "GPUCOLL_WORLD_SIZE": str(len(given.placed)),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                env={**common, "GPUCOLL_RANK": str(rank), "GPUCOLL_HOST_ID": f"host {letter}"},
            )
            for rank, letter in enumerate(given.placed)
        ]
        return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
