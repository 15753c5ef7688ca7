"""Measure the calls of mpi4py on gpucoll and on mpi4py itself, in turns, with the same program.

    python tools/measure_mpi4py.py --ranks 2 --mpi ENVIRONMENT ...

Each ENVIRONMENT is a virtual environment with mpi4py, NumPy and an MPI whose mpiexec is next to its
Python. The rounds of all environments take turns. The output has the best time of each, and the
ratio to the best MPI. Rows of calls are short, so that the best one ran undisturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES = (8, 64 << 10, 16 << 20)
ROOT = Path(__file__).resolve().parent.parent


def measure(mpi: Any) -> dict[str, float]:
    """Return the microseconds of each call and size on this rank's MPI, those of the slowest rank.

    Each is the best of several rows of calls.
    """
    import numpy as np

    comm = mpi.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    found = {}
    for n_bytes in SIZES:
        x = np.ones(n_bytes // 8)
        y, whole = np.empty_like(x), np.empty(x.size * size)
        blocks = np.ones(max(n_bytes // 8 // size, 1) * size)
        others = np.empty_like(blocks)
        sent, parts = [x.size] * size, [blocks.size // size] * size
        right, left = (rank + 1) % size, (rank - 1) % size

        def exchange(x: Any = x, y: Any = y, right: int = right, left: int = left) -> None:
            receive = comm.Irecv(y, left)
            send = comm.Isend(x, right)
            receive.Wait()
            send.Wait()

        calls: dict[str, Any] = {
            "Allreduce": lambda x=x, y=y: comm.Allreduce(x, y),
            "Bcast": lambda y=y: comm.Bcast(y, 0),
            "Allgather": lambda x=x, w=whole: comm.Allgather(x, w),
            "Alltoall": lambda b=blocks, o=others: comm.Alltoall(b, o),
            "Isend/Irecv": exchange,
            "Allgatherv": lambda x=x, w=whole, c=sent: comm.Allgatherv(x, [w, c]),
            "Alltoallv": lambda b=blocks, o=others, c=parts: comm.Alltoallv([b, c], [o, c]),
        }
        n_rows, n_calls = {8: (60, 50), 64 << 10: (40, 12), 16 << 20: (5, 1)}[n_bytes]
        for name, call in calls.items():
            call()
            best = float("inf")
            for _ in range(n_rows):
                comm.Barrier()
                begin = time.perf_counter()
                for _ in range(n_calls):
                    call()
                best = min(best, time.perf_counter() - begin)
            found[f"{name} {n_bytes}"] = max(comm.allgather(best / n_calls * 1e6))
    return found


def command(python: Path | None, ranks: int) -> list[str]:
    """Return the command that starts one round: on gpucoll, or on the MPI of an environment."""
    script = [str(Path(__file__).resolve()), "--inside"]
    if python is None:
        starter = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", str(ranks)]
        return [*starter, "-m", "gpucoll.integrations.mpi4py", *script]
    mpiexec = [str(python.parent / "mpiexec"), "-n", str(ranks)]
    has_open_mpi = (python.parent / "ompi_info").exists()
    more = ["--oversubscribe", "--allow-run-as-root"] if has_open_mpi else []
    return [*mpiexec, *more, str(python), *script]


def one_round(python: Path | None, ranks: int) -> dict[str, float]:
    """Start the ranks once; return the results, which rank 0 prints last."""
    environment = {**os.environ, "PMIX_MCA_gds": "hash"}
    if python is not None:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command(python, ranks), env=environment, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{command(python, ranks)} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


def main() -> None:
    """Measure as the command line requires."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mpi", type=Path, nargs="*", default=[])
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        from mpi4py import MPI

        found = measure(MPI)
        if MPI.COMM_WORLD.Get_rank() == 0:
            print(json.dumps(found), flush=True)
        return
    peers = {"gpucoll": None, **{path.name: path / "bin/python" for path in options.mpi}}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for _ in range(options.rounds):
        for name, python in peers.items():
            rounds[name].append(one_round(python, options.ranks))
    best = {
        name: {row: min(item[row] for item in items) for row in items[0]}
        for name, items in rounds.items()
    }
    print(f"{options.ranks} ranks, best of {options.rounds}, us")
    print(f"{'call, bytes':24}" + "".join(f"{name:>12}" for name in best) + "   to best MPI")
    for row, mine in best["gpucoll"].items():
        others = [items[row] for name, items in best.items() if name != "gpucoll"]
        ratio = f"{mine / min(others):14.2f}" if others else ""
        print(f"{row:24}" + "".join(f"{items[row]:12.2f}" for items in best.values()) + ratio)


if __name__ == "__main__":
    main()
