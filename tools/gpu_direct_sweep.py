"""Time the direct backend's all_reduce with various sizes of rounds and of one-shot calls.

::

    gpucoll-run -n 4 tools/gpu_direct_sweep.py --output sweep_4.json

A round moves half an exchange (8 MiB, a choice by reasoning). Up to 256 KiB, and with two ranks,
every rank combines the whole array, otherwise its share
(`gpucoll.backends.direct.peer.ONE_SHOT_BYTES`). Both sizes are varied here, on ranks that share GPU
0. With ``--array host-device`` it needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_collectives import KITS, MEETING_S, timed
from gpu_rows import Row, Step, run_on_ranks

import gpucoll
from gpucoll.backends.direct import peer, peer_memory

MIB = 1 << 20
HALVES_BYTES = (2 * MIB, 8 * MIB, 32 * MIB)
ONE_SHOTS_BYTES = (0, 1 << 40)
"""All by shares, or all one-shot: array sizes between the two show where one overtakes the
other."""
SMALL_BYTES = (64 << 10, 128 << 10, 256 << 10, 512 << 10, MIB, 2 * MIB)
LARGE_BYTES = (4 * MIB, 64 * MIB, 256 * MIB)


def measured(kit: Any, half_bytes: int, one_shot_bytes: int, size_bytes: int) -> Row:
    """Return the time of an all_reduce on a communicator made with these sizes."""
    peer_memory.HALF_BYTES = peer_memory.HOST_HALF_BYTES = half_bytes  # type: ignore[misc]
    peer.ONE_SHOT_BYTES = one_shot_bytes  # type: ignore[misc]
    comm = gpucoll.init(
        backend="direct", device=kit.device, timeout_s=MEETING_S, on_async_error="raise"
    )
    with comm:
        row = timed(size_bytes, comm, kit)
        path = comm.describe().facts["GPU path through shared GPU memory"]
    told = f"{row['time_s'] * 1e6:.1f} us"
    return {**row, "half_bytes": half_bytes, "path": path, "detail": told}


def steps_of(kit: Any, world_size: int, most_bytes: int) -> Iterator[Step]:
    """Yield sizes of rounds for large arrays, then one turn and two turns for small ones."""
    for half in HALVES_BYTES:
        for size in (size for size in LARGE_BYTES if size <= most_bytes):
            name = f"{size >> 10} KiB, halves of {half >> 10} KiB"
            yield name, partial(measured, kit, half, peer.ONE_SHOT_BYTES, size)
    for size in SMALL_BYTES if world_size > 2 else ():
        for one_shot in ONE_SHOTS_BYTES:
            name = f"{size >> 10} KiB, {'in one turn' if one_shot else 'by shares'}"
            yield name, partial(measured, kit, HALVES_BYTES[1], one_shot, size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Time the direct backend with other sizes.")
    parser.add_argument("--array", choices=tuple(KITS), default="cupy")
    parser.add_argument("--most", type=int, default=LARGE_BYTES[-1], metavar="BYTES")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    with gpucoll.init(backend="cpu", timeout_s=2 * MEETING_S) as control:
        kit = KITS[given.array]()
        steps = list(steps_of(kit, control.world_size, given.most))
        failed = run_on_ranks(control, steps, given.output)
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
