r"""Time the start of torch.distributed's process groups in forked ranks.

    python tools/measure_torch_start.py --ranks 4

Each round forks new ranks from a process that has loaded torch, once for each way: Gloo, gpucoll,
and gpucoll loaded by the forking process. It measures the start (`init_process_group`) and the
median of several `new_group` with a first `all_reduce`. The slowest rank of each round counts; the
output has the medians over the rounds in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from typing import Any

WAYS = ("gloo", "gpucoll", "gpucoll, loaded before")
N_GROUPS = 7
Times = tuple[float, float]


def run_rank(rank: int, way: str, n_ranks: int, path: str, queue: Any) -> None:
    """Start a group and several more, and put the times in seconds into the queue."""
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    x, backend = torch.ones(1), way.partition(",")[0]
    begun = time.perf_counter()
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=n_ranks)
    started_s = time.perf_counter() - begun
    more = []
    for _ in range(N_GROUPS):
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(x, group=dist.new_group(list(range(n_ranks))))
        more.append(time.perf_counter() - begun)
    queue.put((started_s, statistics.median(more)))
    dist.destroy_process_group()


def measure(way: str, n_ranks: int) -> Times:
    """Fork the ranks, and return the times of the slowest one, in seconds."""
    from torch import multiprocessing

    queue = multiprocessing.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = way, n_ranks, os.path.join(folder, "store"), queue
        multiprocessing.start_processes(run_rank, given, n_ranks, start_method="fork")
    found = [queue.get() for _ in range(n_ranks)]
    return max(one[0] for one in found), max(one[1] for one in found)


def measure_in_child(way: str, n_ranks: int) -> Times:
    """Measure from a process that is forked for this, and that loads what this way requires."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if "loaded" in way:
            import gpucoll
            from gpucoll.integrations.torch import ProcessGroup  # noqa: F401

            gpucoll.init(rank=0, world_size=1).close()
        os.write(writer, repr(measure(way, n_ranks)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        text = file.read()
    os.waitpid(child, 0)
    start, more = text.strip("()").split(",")
    return float(start), float(more)


def main() -> int:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    import torch.distributed  # noqa: F401

    import gpucoll.integrations.torch  # noqa: F401

    found: dict[str, list[Times]] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way in WAYS:
            found[way].append(measure_in_child(way, given.ranks))
    for way, times in found.items():
        start, more = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        print(f"{way:24} start {start:6.1f} ms   new_group and a call {more:6.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
