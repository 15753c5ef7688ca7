"""Measure pulls and pushes of a table's rows, beside other parameter servers, in turns.

    python tools/measure_tables.py --mpi ENVIRONMENT [--peers gpucoll hosts mpi ray rpc]

ENVIRONMENT is a virtual environment with mpi4py, NumPy and an MPI. Ray and PyTorch are in this
Python's environment. There are two processes; one pulls and pushes 4096 rows of 64 float32, of a
table of 100,000 rows, and the other only has rows. All ids of a push differ, since MPI forbids
entries of a datatype that overlap. The output has the best time of each, in microseconds:

- hosts: the same table on two hosts, which are played on this machine and linked by loopback TCP.
  "pull" and "push" are of rows of the other host, the latter with a `flush`.
- gpucoll: `pull` into an array, `numpy.take` in turns with it, `push` in mode "async".
- mpi: MPI_Get and MPI_Accumulate with an indexed datatype for each owner, then MPI_Win_flush_all,
  within a passive-target epoch; each rank has half of the rows. "rows": one call for each row.
- ray: an actor with a NumPy array. rpc: a torch.rpc worker with a tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS, WIDTH, COUNT = 100_000, 64, 4096
PEERS = ("gpucoll", "hosts", "mpi", "ray", "rpc")
Times = dict[str, float]


def inputs() -> tuple[Any, Any]:
    """Return ids, all different, and values."""
    generator = np.random.default_rng(0)
    ids = generator.choice(ROWS, COUNT, replace=False)
    return ids, generator.normal(size=(COUNT, WIDTH)).astype(np.float32)


def best_of(calls: dict[str, Callable[[], object]], n_turns: int) -> Times:
    """Return the best time of each call, in microseconds; they take turns."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(n_turns):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            found[name] = min(found[name], (time.perf_counter() - begin) * 1e6)
    return found


def on_gpucoll() -> Times | None:
    """Measure a table; rank 1 waits."""
    import gpucoll
    from gpucoll.tables import Table

    ids, values = inputs()
    with gpucoll.init() as comm, Table(comm, ROWS, WIDTH, init=1.0) as table:
        found = None
        if comm.rank == 0:
            whole, out = np.ones((ROWS, WIDTH), np.float32), np.empty_like(values)
            calls = {
                "pull": lambda: table.pull(ids, out=out),
                "numpy.take": lambda: np.take(whole, ids, axis=0, out=out, mode="clip"),
                "push": lambda: table.push(ids, values),
            }
            found = best_of(calls, 200)
        comm.barrier()
    return found


def on_hosts() -> Times | None:
    """Measure a table of two hosts; rank 1 serves."""
    import gpucoll
    from gpucoll import config
    from gpucoll.tables import Table

    rank = int(os.environ["GPUCOLL_RANK"])
    os.environ[config.HOST_ID] = f"host {rank}"
    os.environ[config.INTERFACES] = "lo"
    _, values = inputs()
    made = gpucoll.init(rank=rank, world_size=2, meet=os.environ["MEASURED_MEET"])
    with made as comm, Table(comm, ROWS, WIDTH, init=1.0) as table:
        found = None
        if rank == 0:
            ids, out = table._owners.owned_by(1)[:COUNT], np.empty_like(values)

            def push() -> None:
                table.push(ids, values)
                table.flush()

            found = best_of({"pull": lambda: table.pull(ids, out=out), "push": push}, 200)
        comm.barrier()
    return found


def on_mpi() -> Times | None:
    """Measure one-sided calls; rank 1 waits."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    ids, values = inputs()
    share = ROWS // comm.size
    window = MPI.Win.Allocate(share * WIDTH * 4, 4, comm=comm)
    found = None
    comm.Barrier()
    window.Lock_all()
    if comm.rank == 0:
        owners, places = ids // share, ids % share
        parts = []
        for owner in range(comm.size):
            mine = np.ascontiguousarray(values[owners == owner])
            kind = MPI.FLOAT.Create_indexed_block(WIDTH, (places[owners == owner] * WIDTH).tolist())
            parts.append((owner, mine, np.empty_like(mine), (0, 1, kind.Commit())))

        def push() -> None:
            for owner, mine, _, target in parts:
                window.Accumulate([mine, MPI.FLOAT], owner, target, MPI.SUM)
            window.Flush_all()

        def pull() -> None:
            for owner, _, out, target in parts:
                window.Get([out, MPI.FLOAT], owner, target)
            window.Flush_all()

        def push_rows() -> None:
            for value, owner, place in zip(values, owners.tolist(), places.tolist(), strict=True):
                target = (place * WIDTH, WIDTH, MPI.FLOAT)
                window.Accumulate([value, MPI.FLOAT], owner, target, MPI.SUM)
            window.Flush_all()

        found = best_of({"pull": pull, "push": push, "push, rows": push_rows}, 30)
    window.Unlock_all()
    comm.Barrier()
    window.Free()
    return found


def on_ray() -> Times:
    """Measure an actor of Ray."""
    import logging

    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)

    class Server:
        def __init__(self) -> None:
            self.table = np.ones((ROWS, WIDTH), np.float32)

        def pull(self, ids: Any) -> Any:
            return self.table[ids]

        def push(self, ids: Any, values: Any) -> None:
            np.add.at(self.table, ids, values)

    remote: Any = ray.remote(Server)
    server = remote.remote()
    ids, values = inputs()
    calls = {
        "pull": lambda: ray.get(server.pull.remote(ids)),
        "push": lambda: ray.get(server.push.remote(ids, values)),
    }
    found = best_of(calls, 30)
    ray.shutdown()
    return found


table: Any = None
"""On the worker of torch.rpc: its tensor."""


def rpc_pull(ids: Any) -> Any:
    """Return rows of this worker's tensor."""
    global table
    if table is None:
        import torch

        table = torch.ones(ROWS, WIDTH)
    return table[ids]


def rpc_push(ids: Any, values: Any) -> None:
    """Add to rows of this worker's tensor."""
    table.index_add_(0, ids, values)


def on_rpc(rank: int, port: int) -> Times | None:
    """Measure a worker of torch.rpc."""
    import torch
    from torch.distributed import rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    found = None
    if rank == 0:
        ids, values = (torch.from_numpy(x) for x in inputs())
        calls = {
            "pull": lambda: rpc.rpc_sync("worker1", rpc_pull, (ids,)),
            "push": lambda: rpc.rpc_sync("worker1", rpc_push, (ids, values)),
        }
        found = best_of(calls, 30)
    rpc.shutdown()
    return found


def round_of(peer: str, mpi: Path | None) -> Times:
    """Start the processes of a peer once; return its times."""
    script = [str(Path(__file__).resolve()), "--inside", peer]
    environment = dict(os.environ)
    if peer in ("gpucoll", "hosts"):
        commands = [[sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", "2", *script]]
        environment["MEASURED_MEET"] = f"file://{tempfile.gettempdir()}/measured-{os.getpid()}"
    elif peer == "mpi":
        assert mpi is not None
        environment.pop("PYTHONPATH", None)
        commands = [[str(mpi / "bin/mpiexec"), "-n", "2", str(mpi / "bin/python"), *script]]
    elif peer == "ray":
        commands = [[sys.executable, *script]]
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        commands = [
            [sys.executable, *script, "--rank", str(rank), "--port", str(port)] for rank in (0, 1)
        ]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("{")]
    if any(process.returncode for process in started) or not lines:
        raise SystemExit(f"{commands} failed:\n{outputs}")
    found: Times = json.loads(lines[-1])
    return found


def main() -> None:
    """Measure as the command line requires."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mpi", type=Path)
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside = {"gpucoll": on_gpucoll, "hosts": on_hosts, "mpi": on_mpi, "ray": on_ray}
        rpc = options.inside == "rpc"
        found = on_rpc(options.rank, options.port) if rpc else inside[options.inside]()
        if found is not None:
            print(json.dumps(found), flush=True)
        return
    peers = [peer for peer in options.peers if peer != "mpi" or options.mpi]
    rounds: dict[str, list[Times]] = {peer: [] for peer in peers}
    for _ in range(options.rounds):
        for peer in peers:
            rounds[peer].append(round_of(peer, options.mpi))
    print(f"{COUNT} rows of {WIDTH} float32, best of {options.rounds} rounds, us")
    for peer, items in rounds.items():
        for call in items[0]:
            print(f"{peer:10}{call:14}{min(item[call] for item in items):12.1f}")


if __name__ == "__main__":
    main()
