r"""Time a training step of DistributedDataParallel through gpucoll and other backends, in turns.

    python tools/measure_torch_training.py --ranks 2
    python tools/measure_torch_training.py --bind --views --json FILE

The model has 25 million parameters, whose gradients are averaged. The same processes have a model
for each backend, and take turns. Two steps without communication show how much of a step is
communication: one with a hook that returns the gradients unchanged (they are copied into buckets
and back), and one under `no_sync` (they are not copied). The slowest rank counts; the output has
medians in milliseconds. FILE has the steps in the form of ``gpucoll-bench --json``: the collective
is ``ddp_step``, the size that of all gradients, and the limit the step with the hook.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import socket
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

LAYERS, WIDTH, BATCH = 6, 2048, 8


def network() -> Any:
    """Return a network of 25 million parameters, the same on all ranks."""
    import torch

    torch.manual_seed(0)
    layers = [(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(LAYERS)]
    return torch.nn.Sequential(*(part for layer in layers for part in layer))


def give_back(_: object, bucket: Any) -> Any:
    """Return the bucket unchanged, as a hook of DistributedDataParallel."""
    import torch

    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DistributedDataParallel would compare the names in them with types
give_back.__annotations__.clear()


def time_step(model: Any, x: Any, is_synchronised: bool) -> float:
    """Return the seconds of forward and backward on the slowest rank."""
    import torch
    from torch import distributed as dist

    dist.barrier()
    with contextlib.nullcontext() if is_synchronised else model.no_sync():
        start = time.perf_counter()
        model(x).sum().backward()
        taken = torch.tensor(time.perf_counter() - start)
    model.zero_grad(set_to_none=False)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def run_rank(rank: int, given: argparse.Namespace, port: int) -> None:
    """Run one rank."""
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gpucoll.integrations.torch  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    place = {"rank": rank, "world_size": given.ranks}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", **place)
    if given.bind:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    models = {}
    for name in [*given.backends, "no communication"]:
        group = dist.new_group(backend=name if name in given.backends else "gloo")
        options = {"process_group": group, "gradient_as_bucket_view": given.views}
        models[name] = DistributedDataParallel(network(), **options)
    models["no communication"].register_comm_hook(None, give_back)
    x = torch.randn(BATCH, WIDTH)
    times: dict[str, list[float]] = {name: [] for name in [*models, "no_sync"]}
    for turn in range(given.rounds + 2):
        for name, model in models.items():
            taken = time_step(model, x, True)
            if turn > 1:  # buckets are made anew after the first step
                times[name].append(taken)
        taken = time_step(models["no communication"], x, False)
        if turn > 1:
            times["no_sync"].append(taken)
    if rank == 0:
        report(times, given.backends)
        if given.json is not None:
            from gpucoll.bench.results import compact, write_whole

            count = sum(one.numel() for one in models["no communication"].parameters())
            content = as_json(times, given, count)
            write_whole(given.json, compact(json.dumps(content, indent=1)) + "\n")
    dist.destroy_process_group()


def report(times: dict[str, list[float]], backends: list[str]) -> None:
    """Print the medians, and how much of them is communication."""
    medians = {name: statistics.median(taken) * 1e3 for name, taken in times.items()}
    for name, taken in medians.items():
        print(f"{name:18} {taken:8.1f} ms a step")
    for without in ("no communication", "no_sync"):
        parts = {name: medians[name] - medians[without] for name in backends}
        first = parts[backends[0]]
        told = ", ".join(
            f"{name} {part:.1f} ms ({part / first:.2f})" for name, part in parts.items()
        )
        print(f"above {without}: {told}")


def as_json(times: dict[str, list[float]], given: argparse.Namespace, count: int) -> dict[str, Any]:
    """Return the steps in the form of ``gpucoll-bench --json``; `count` is that of the weights."""

    def entry(library: str, taken: list[float]) -> dict[str, Any]:
        samples_us = [round(step_s * 1e6, 1) for step_s in taken]
        unknown = dict.fromkeys(("alg_bw", "bus_bw", "cpu_time", "nwrong"))
        side = {"time": statistics.median(samples_us), **unknown, "path": "", "reps": 1}
        what = {"collective": "ddp_step", "placement": "private", "ranks": given.ranks}
        data = {"size": 4 * count, "count": count, "type": "float32", "redop": "avg", "root": -1}
        sides = {"out_of_place": None, "in_place": {**side, "samples_us": [samples_us]}}
        return {"library": library, **what, **data, "list_length": 1, **sides}

    return {
        "results": [entry(name, times[name]) for name in given.backends],
        "limit": [entry("limit", times["no communication"])],
        "environment": given.environment,
    }


def environment(given: argparse.Namespace) -> dict[str, Any]:
    """Return the machine and the versions, as ``gpucoll-bench --json`` writes them."""
    import torch

    from gpucoll.bench.environment import cpu_model, version_of
    from gpucoll.version import __version__

    titles = {"gpucoll": f"gpucoll {__version__}", "gloo": f"Gloo in torch {torch.__version__}"}
    cpus = sorted(os.sched_getaffinity(0))
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "gpucoll": __version__,
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "cpu": cpu_model(),
        "usable_cpus": len(cpus),
        "ranks": given.ranks,
        "pinned_cpus": [cpus[rank % len(cpus)] for rank in range(given.ranks * given.bind)] or None,
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "array": "torch",
        "test_device": None,
        "rounds": given.rounds,
        "timing": "A sample is one forward and backward step. The backends take turns, step by "
        "step, in the same processes. Its value is the time of the slowest rank.",
        "libraries": {name: {"library": titles.get(name, name)} for name in given.backends},
        "failures": [],
    }


def main() -> int:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backends", nargs="+", default=["gloo", "gpucoll"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bind", action="store_true", help="bind each rank to a CPU of its own")
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view=True")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the times of all steps")
    given = parser.parse_args()
    from torch import multiprocessing

    if given.json is not None:
        given.environment = environment(given)
    with socket.create_server(("127.0.0.1", 0)) as end:
        port = end.getsockname()[1]
    multiprocessing.spawn(run_rank, (given, port), given.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
