r"""Time torch.distributed's calls through gpucoll and through other backends, in turns.

    python tools/measure_torch.py --ranks 2                 # all calls, 4 B to 64 MiB, beside gloo
    python tools/measure_torch.py --calls all_reduce --bind

The same processes have a group of each backend. A round times every backend once, with as many
calls in a row as take about 10 ms; the slowest rank counts. The output has the median over the
rounds in microseconds per call, and the ratio to the first backend.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
ROUND_S = 0.01
Call = Callable[[Any], object]


def calls(x: Any, group: Any, world_size: int) -> dict[str, Call]:
    """Return the calls to time, each on about the size of x."""
    import torch
    from torch import distributed as dist

    part = max(x.numel() // world_size, 1)
    whole, moved = torch.ones(part * world_size), torch.ones(part * world_size)
    mine = torch.ones(part)
    blocks = list(torch.ones(part * world_size).split(part))
    others = list(torch.ones(part * world_size).split(part))
    rank = dist.get_rank(group)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size

    def pass_on(_: Any) -> None:
        sent = dist.isend(x, right, group=group)
        dist.recv(whole[: x.numel()] if x.numel() <= whole.numel() else x, left, group=group)
        sent.wait()

    root = {"gather_list": blocks} if rank == 0 else {}
    given = {"scatter_list": blocks} if rank == 0 else {}
    return {
        "all_reduce": lambda g: dist.all_reduce(x, group=g),
        "all_reduce async": lambda g: dist.all_reduce(x, group=g, async_op=True).wait(),
        "reduce": lambda g: dist.reduce(x, 0, group=g),
        "broadcast": lambda g: dist.broadcast(x, 0, group=g),
        "all_gather": lambda g: dist.all_gather(blocks, mine, group=g),
        "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(whole, mine, group=g),
        "gather": lambda g: dist.gather(mine, dst=0, group=g, **root),
        "scatter": lambda g: dist.scatter(mine, src=0, group=g, **given),
        "reduce_scatter": lambda g: dist.reduce_scatter(mine, blocks, group=g),
        "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(mine, whole, group=g),
        "all_to_all": lambda g: dist.all_to_all(others, blocks, group=g),
        "all_to_all_single": lambda g: dist.all_to_all_single(moved, whole, group=g),
        "barrier": lambda g: dist.barrier(group=g),
        "send, recv": pass_on,
    }


def time_call(call: Call, group: Any, count: int) -> float:
    """Return the seconds per call."""
    start = time.perf_counter()
    for _ in range(count):
        call(group)
    return (time.perf_counter() - start) / count


def slowest(seconds: float) -> float:
    """Return the longest time of all ranks."""
    import torch
    from torch import distributed as dist

    worst = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def measure_size(
    groups: dict[str, Any], size_bytes: int, wanted: list[str], rounds: int, world_size: int
) -> dict[str, dict[str, float]]:
    """Return microseconds by call and backend."""
    import torch
    from torch import distributed as dist

    found: dict[str, dict[str, float]] = {}
    for name in calls(torch.ones(1), None, world_size):
        if wanted and name not in wanted:
            continue
        times: dict[str, list[float]] = {backend: [] for backend in groups}
        count: dict[str, int] = {}
        for turn in range(rounds + 1):
            for backend, group in groups.items():
                x = torch.ones(size_bytes // 4)
                call = calls(x, group, world_size)[name]
                dist.barrier()
                if turn == 0:
                    call(group)
                    once = slowest(time_call(call, group, 3))
                    count[backend] = min(max(int(ROUND_S / once), 1), 500)
                else:
                    call(group)
                    times[backend].append(slowest(time_call(call, group, count[backend])))
        found[name] = {key: statistics.median(value) * 1e6 for key, value in times.items()}
    return found


def print_size(size_bytes: int, found: dict[str, dict[str, float]]) -> None:
    """Print the table of one size."""
    for name, times in found.items():
        first = next(iter(times.values()))
        cells = [f"{key} {value:10.1f} us" for key, value in times.items()]
        ratios = [f"{value / first:.3f}" for value in list(times.values())[1:]]
        print(f"{size_bytes:>9} {name:24}", *cells, "ratio", *ratios, flush=True)


def run_rank(rank: int, given: argparse.Namespace, port: int) -> None:
    """Run one rank."""
    import torch
    from torch import distributed as dist

    from gpucoll.integrations.torch import Options

    torch.set_num_threads(1)
    place = {"rank": rank, "world_size": given.ranks}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **place)
    if given.bind:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    groups = {
        name: dist.new_group(backend=name, pg_options=Options() if name == "gpucoll" else None)
        for name in given.backends
    }
    results = {}
    for size_bytes in given.sizes:
        found = measure_size(groups, size_bytes, given.calls, given.rounds, given.ranks)
        results[size_bytes] = found
        if rank == 0:
            print_size(size_bytes, found)
    if rank == 0 and given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"ranks": given.ranks, "microseconds": results}, file, indent=1)
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", nargs="+", default=["gloo", "gpucoll"])
    parser.add_argument("--calls", nargs="+", default=[])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="in bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bind", action="store_true", help="bind each rank to a CPU of its own")
    parser.add_argument("--json", help="write the figures to this file")
    given = parser.parse_args()
    from torch import multiprocessing

    with socket.create_server(("127.0.0.1", 0)) as end:
        port = end.getsockname()[1]
    multiprocessing.spawn(run_rank, (given, port), given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
