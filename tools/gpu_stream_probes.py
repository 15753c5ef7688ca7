"""Probe how streams that wait for words share a GPU, within a process and between two.

::

    python tools/gpu_stream_probes.py --probe queues --connections 8 --output queues.json
    python tools/gpu_stream_probes.py --probe turns --output turns.json

``queues`` finds the number of waiting streams that block another stream, although nothing orders it
behind them. The driver maps streams to work queues, whose number is CUDA_DEVICE_MAX_CONNECTIONS.
``turns`` measures how long two processes on one GPU take to wait for each other's word: with
nothing else on the GPU, and while one, the other or both run kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_rows import Row, Step, run_steps

from gpucoll import config
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.discovery import look_for_gpus
from gpucoll.devices import open_device
from gpucoll.kernels.gpu.reduce import prepare_reduce
from gpucoll.transport.shared import mapping
from gpucoll.transport.shared.mapping import Mapping

MOST_STREAMS = 40
STANDS_S = 0.05
"""A stream that has not completed a copy and a write within this time is blocked."""
GOES_S = 10.0
ROUNDS = 1000
BATCH = 100
"""Rounds that are enqueued on a stream at once; it takes about 1000 operations."""
BUSY_BYTES = 256 << 20
PAGE = 4096
MINE, ITS = 0, 64
"""Offsets of the two processes' words in the page."""


def until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition for a limited time; return whether it became true."""
    due_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > due_s:
            return False
        time.sleep(20e-6)
    return True


# --- within a process -----------------------------------------------------------------------------


def queues(device: Any, most: int) -> Iterator[Step]:
    """Yield what waiting streams block, for urgent streams and ordinary ones."""
    page = device.allocate_pinned(PAGE)
    for waits_urgent in (False, True):
        for writes_urgent in (False, True):
            name = f"{_kind(waits_urgent)} streams wait, {_kind(writes_urgent)} ones go on"
            yield name, partial(stalls, device, page, waits_urgent, writes_urgent, most)


def _kind(is_urgent: bool) -> str:
    return "urgent" if is_urgent else "ordinary"


def stalls(device: Any, page: int, waits_urgent: bool, writes_urgent: bool, most: int) -> Row:
    """Return how many waiting streams block others: one older than all of them, and a newer one.

    A driver assigns its queues in the order in which streams are made, so the waiting streams are
    made in a row.
    """
    word, seen = (ctypes.c_uint32.from_address(page + at) for at in (0, 64))
    memory = device.allocate(PAGE)
    oldest = device.create_stream(writes_urgent)
    all_waiting = [device.create_stream(waits_urgent) for _ in range(most)]
    newest = device.create_stream(writes_urgent)
    found: dict[str, list[int]] = {"newest": [], "oldest": []}
    for count in range(1, most + 1):
        waiting = all_waiting[:count]
        for which, other in (("newest", newest), ("oldest", oldest)):
            word.value = seen.value = 0
            for stream in waiting:
                device.check(device.stream_wait_value(stream, page, 1), "wait for a word")
            device.fill(memory, b"\1", PAGE, other)
            device.check(device.stream_write_value(other, page + 64, 1), "write a word")
            if not until(lambda: seen.value == 1, STANDS_S):
                found[which].append(count)
            word.value = 1
            for stream in (*waiting, other):
                if not until(partial(device.is_stream_done, stream), GOES_S):
                    raise AssertionError(f"with {count} waiting streams one does not go on")
    for stream in (oldest, *all_waiting, newest):
        device.destroy_stream(stream)
    device.free(memory)
    told = [f"the {name} from {min(counts)} on" for name, counts in found.items() if counts]
    return {"stalls": found, "most": most, "detail": "; ".join(told) or f"none up to {most}"}


# --- between two processes ------------------------------------------------------------------------


def turns(device: Any, most: int, kernel_bytes: int = BUSY_BYTES) -> Iterator[Step]:
    """Yield the time of a round in which each of two processes waits for the other's word."""
    fd = mapping.create("gpucoll turns", PAGE, reserve_bytes=PAGE)
    for who in ("neither", "the first", "the second", "both"):
        name = f"two processes in turn, kernels of {who}"
        yield name, partial(play, device, fd, who, most, kernel_bytes)


def play(device: Any, fd: int, who: str, rounds: int, kernel_bytes: int) -> Row:
    """Run rounds with a process that this one starts; return the seconds of a round."""
    os.pwrite(fd, bytes(PAGE), 0)
    command = [sys.executable, __file__, "--partner", str(fd), "--most", str(rounds)]
    command += ["--busy", str(kernel_bytes)] if who in ("the second", "both") else []
    is_busy = who in ("the first", "both")
    with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE, text=True) as partner:
        assert partner.stdout is not None
        try:
            if partner.stdout.readline() != "ready\n":
                raise AssertionError("the other process did not start")
            with kernels(device, kernel_bytes) if is_busy else contextlib.nullcontext():
                times = take_turns(device, fd, rounds, is_first=True)
            if partner.wait(GOES_S):
                raise AssertionError(f"the other process ended with {partner.returncode}")
        finally:
            partner.kill()
    middle = statistics.median(times)
    return {"round_s": middle, "times": times, "detail": f"{middle * 1e6:.1f} us a round"}


def take_turns(device: Any, fd: int, rounds: int, *, is_first: bool) -> list[float]:
    """Alternate writing a word and waiting for the other process's; return each batch's mean."""
    page = Mapping(fd, PAGE, "words of two processes")
    seen, stream = device.register_host(page.address, PAGE), device.create_stream()
    mine, its = (seen + at for at in ((MINE, ITS) if is_first else (ITS, MINE)))
    if not is_first:
        print("ready", flush=True)
    times = []
    for first in range(1, rounds + 1, BATCH):
        begin = time.perf_counter()
        numbers = range(first, min(first + BATCH, rounds + 1))
        for number in numbers:
            steps = [(device.stream_write_value, mine), (device.stream_wait_value, its)]
            for step, word in steps if is_first else steps[::-1]:
                device.check(step(stream, word, number), "use a word")
        if not until(partial(device.is_stream_done, stream), GOES_S):
            for at in (MINE, ITS):  # so that no stream keeps waiting
                ctypes.c_uint32.from_address(page.address + at).value = 1 << 30
            raise AssertionError(f"in {GOES_S:g} s the turns {numbers} were not over")
        times.append((time.perf_counter() - begin) / len(numbers))
    device.destroy_stream(stream)
    device.unregister_host(page.address)
    page.unmap()
    return times


@contextlib.contextmanager
def kernels(device: Any, size_bytes: int) -> Iterator[None]:
    """Keep the GPU busy with reductions of `size_bytes` bytes in direct succession."""
    stream, over = device.create_stream(), threading.Event()
    memory = [device.allocate(size_bytes) for _ in range(2)]
    x, y = (Buffer(at, (size_bytes // 4,), "float32", 4, None, device.label) for at in memory)
    launch = prepare_reduce("sum", [x], [x, y])

    def run() -> None:
        with device:
            while not over.is_set():
                for _ in range(4):
                    launch(stream)
                device.synchronize_stream(stream)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        device.destroy_stream(stream)
        for address in memory:
            device.free(address)


PROBES: dict[str, Callable[..., Iterator[Step]]] = {"queues": queues, "turns": turns}
MOST = {"queues": MOST_STREAMS, "turns": ROUNDS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Probe how streams that wait share a GPU.")
    parser.add_argument("--probe", choices=tuple(PROBES))
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--connections", metavar="N", help="CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--most", type=int, metavar="N", help="number of streams, or of rounds")
    parser.add_argument("--partner", type=int, metavar="FD", help="used internally")
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="BYTES",
        help=("size of the kernels that run meanwhile"),
    )
    given = parser.parse_args(arguments)
    if given.connections:
        os.environ[config.CUDA_DEVICE_MAX_CONNECTIONS] = given.connections
    kind = look_for_gpus().kind
    if not kind:
        print("no GPU is seen here")
        return 2
    device = open_device(kind, 0)
    with device:
        if given.partner is not None:
            with kernels(device, given.busy) if given.busy else contextlib.nullcontext():
                take_turns(device, given.partner, given.most, is_first=False)
            return 0
        if not given.probe or not given.output:
            parser.error("--probe and --output are needed")
        most = given.most or MOST[given.probe]
        sizes = {"kernel_bytes": given.busy or BUSY_BYTES} if given.probe == "turns" else {}
        steps = PROBES[given.probe](device, most, **sizes)
        return 1 if run_steps(steps, given.output) else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what a probe has left on the GPU ends with the process, whatever hangs there
