"""Kill a rank during calls through direct; check the other rank's error and the GPU's memory.

::

    python tools/gpu_killed.py --output killed.json

Two ranks share GPU 0 and make reductions; one is killed. The other must get an error within
moments, and the GPU must have its memory back when both are gone. ``--array host-device`` runs
without a GPU; the memory is not checked then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_collectives import KITS
from gpu_rows import Row, Step, run_steps

import gpucoll
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.devices import open_device
from gpucoll.errors import GpucollError

SIZES_BYTES = {"4 KiB": 4 << 10, "64 MiB": 64 << 20}
CALL_S = 20.0
ENDS_S = 60.0
SETTLES_S = 5.0
"""How long the driver may take to free a process's memory, in seconds."""


def rank_main(rank: int, meeting: str, array: str, size_bytes: int) -> None:
    """Make reductions until one fails; report the error and the time."""
    kit: Any = KITS[array]()
    settings = {"meet": f"file://{meeting}", "backend": "direct", "device": kit.device}
    comm = gpucoll.init(
        rank=rank, world_size=2, timeout_s=CALL_S, on_async_error="raise", **settings
    )
    numpy = __import__("numpy")
    x = kit.array(numpy.ones(size_bytes // 4, numpy.float32))
    out = kit.array(numpy.zeros(size_bytes // 4, numpy.float32))
    comm.all_reduce(x, out=out)
    comm.check()
    print("begun", flush=True)
    try:
        while True:
            comm.all_reduce(x, out=out)
            comm.check()
    except GpucollError as error:
        told = {"at_s": time.time(), "error": type(error).__name__, "text": str(error)[:500]}
    begin = time.perf_counter()
    comm.abort()
    print(json.dumps({**told, "end_s": time.perf_counter() - begin}), flush=True)


def killed(array: str, size_bytes: int) -> Row:
    """Start two ranks, kill one; return the other rank's report and the missing memory."""
    before = free_bytes(array)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--array", array, "--size", str(size_bytes)]
        command += ["--meeting", str(Path(folder, "meeting")), "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            for each in ranks:
                assert each.stdout is not None
                if (line := each.stdout.readline()) != "begun\n":
                    raise AssertionError(f"a rank did not begin, but said {line!r}")
            time.sleep(0.2)  # so that a call is in progress
            killed_at_s = time.time()
            ranks[1].kill()
            said, _ = ranks[0].communicate(timeout=ENDS_S)
        finally:
            for each in ranks:
                each.kill()
                each.wait()
                if each.stdout is not None:
                    each.stdout.close()
    told = json.loads(said)
    row = {**told, "after_s": told["at_s"] - killed_at_s, "size_bytes": size_bytes}
    row["detail"] = f"{told['error']} after {row['after_s']:.3f} s"
    if before is not None:
        row |= {"free_before": before, "free_after": settled(array, before)}
        row["detail"] += f"; {(before - row['free_after']) >> 20} MiB of the GPU are missing"
    if told["error"] != "PeerLostError":
        raise AssertionError(f"the other rank was told {told['error']}: {told['text']}")
    return row


def free_bytes(array: str) -> int | None:
    """Return the GPU's free memory in bytes; None if there is no GPU."""
    if array != "cupy":
        return None
    return int(open_device(look_for_gpus().kind, 0).memory_bytes()[0])


def settled(array: str, wanted: int) -> int:
    """Return the free memory once it reaches `wanted`, or after a while."""
    due_s = time.monotonic() + SETTLES_S
    while (found := free_bytes(array) or 0) < wanted and time.monotonic() < due_s:
        time.sleep(0.05)
    return found


def steps_of(array: str) -> Iterator[Step]:
    """Yield a kill during small calls, and one during large calls."""
    for name, size in SIZES_BYTES.items():
        yield f"a rank is killed in calls of {name}", partial(killed, array, size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Kill a rank in calls through direct.")
    parser.add_argument("--array", choices=tuple(KITS), default="cupy")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--rank", type=int, metavar="N", help="used internally")
    parser.add_argument("--meeting", metavar="FILE", help="used internally")
    parser.add_argument("--size", type=int, metavar="BYTES", help="used internally")
    given = parser.parse_args(arguments)
    if given.rank is not None:
        rank_main(given.rank, given.meeting, given.array, given.size)
        return 0
    if given.output is None:
        parser.error("--output is needed")
    return 1 if run_steps(steps_of(given.array), given.output) else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # end even if the GPU hangs
