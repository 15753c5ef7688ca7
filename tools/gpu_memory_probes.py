"""Probe what the direct backend needs from a GPU: pinned memory, exported memory, words.

::

    python tools/gpu_memory_probes.py --probe copies --output copies.json

tools/gpu_check.py runs each probe in a separate process. All calls go through gpucoll's own
bindings of the driver. The results are written after each step, so that a step that hangs or
crashes loses no earlier ones; a step that fails is a row as well.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu_rows import Row, Step, run_steps

from gpucoll.backends.discovery import look_for_gpus
from gpucoll.devices import open_device

MIB = 1 << 20
SIZES_BYTES = (64 << 10, MIB, 16 * MIB, 256 * MIB)
REPETITIONS = 7
CHILD_S = 60.0
PATTERN = 0x5A


def rate_of(device: Any, size_bytes: int, enqueue: Callable[[], None], streams: list[int]) -> Row:
    """Return the rate in bytes per second of the median of several runs, by the host's clock."""
    times = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        enqueue()
        for stream in streams:
            device.synchronize_stream(stream)
        times.append(time.perf_counter() - begin)
    return {"size_bytes": size_bytes, "rate": size_bytes / statistics.median(times), "times": times}


def copies(device: Any, most: int) -> Iterator[Step]:
    """Yield copies within the GPU, and between it and pinned, pageable and registered memory."""
    first, second = device.create_stream(), device.create_stream()
    mine, other = device.allocate(most), device.allocate(most)
    pinned, back = device.allocate_pinned(most), device.allocate_pinned(most)
    pageable = ctypes.create_string_buffer(most)
    plain = ctypes.addressof(pageable)
    ctypes.memset(pinned, 0, most)
    ctypes.memset(back, 0, most)
    ways = {
        "within the GPU": (other, mine),
        "GPU to pinned": (pinned, mine),
        "pinned to GPU": (mine, pinned),
        "GPU to pageable": (plain, mine),
        "pageable to GPU": (mine, plain),
    }

    def one(destination: int, source: int, size: int) -> Row:
        return rate_of(device, size, lambda: device.copy(destination, source, size, first), [first])

    def both(size: int) -> Row:
        def enqueue() -> None:
            device.copy(pinned, mine, size, first)
            device.copy(other, back, size, second)

        return rate_of(device, 2 * size, enqueue, [first, second])

    for size in (size for size in SIZES_BYTES if size <= most):
        for name, (destination, source) in ways.items():
            yield f"{name}, {size >> 10} KiB", partial(one, destination, source, size)
        yield f"both ways at once, 2 times {size >> 10} KiB", partial(both, size)


def words(device: Any, most: int) -> Iterator[Step]:
    """Yield writes of words in pinned memory, and waits for them, on two streams."""
    first, second = device.create_stream(), device.create_stream()
    word = device.allocate_pinned(4096)
    value = ctypes.c_uint32.from_address(word)

    def check(code: int, what: str) -> None:
        device.check(code, what)

    def write() -> Row:
        value.value = 0
        check(device.stream_write_value(first, word, 7), "write a word")
        device.synchronize_stream(first)
        if value.value != 7:
            raise AssertionError(f"the stream wrote {value.value} instead of 7")
        return {}

    def wait_for_another_stream() -> Row:
        value.value = 0
        target = device.allocate_pinned(4096)
        seen = ctypes.c_uint32.from_address(target)
        seen.value = 0
        check(device.stream_wait_value(second, word, 3), "wait for a word")
        check(device.stream_write_value(second, target, 1), "write behind the wait")
        if seen.value:
            raise AssertionError("the stream went on before the word was there")
        check(device.stream_write_value(first, word, 3), "write the word")
        device.synchronize_stream(second)
        return {"seen": seen.value}

    def wait_for_the_host() -> Row:
        value.value = 0
        check(device.stream_wait_value(second, word, 5), "wait for a word")
        begin = time.perf_counter()
        value.value = 5
        device.synchronize_stream(second)
        return {"latency_s": time.perf_counter() - begin}

    yield "can wait for values", lambda: {"answer": bool(device.can_wait_for_values)}
    yield "a stream writes a word", write
    if device.can_wait_for_values:  # otherwise a wait would never end
        yield "a stream waits for another stream's word", wait_for_another_stream
        yield "a stream waits for the host's word", wait_for_the_host


def exported(device: Any, most: int) -> Iterator[Step]:
    """Yield opening of this process's memory in another process, which reads and writes it."""
    size = min(most, 64 * MIB)
    stream = device.create_stream()
    memory = device.allocate(size)

    def filled(byte: int) -> None:
        device.fill(memory, bytes([byte]), size, stream)
        device.synchronize_stream(stream)

    def first_byte(at: int) -> int:
        found = device.allocate_pinned(4096)
        device.copy(found, memory + at, 1, stream)
        device.synchronize_stream(stream)
        read = ctypes.c_ubyte.from_address(found).value
        device.free_pinned(found)
        return read

    def opened() -> Row:
        handle = device.export_memory(memory + 512)
        if handle is None:
            raise AssertionError("the driver exports no memory here")
        filled(PATTERN)
        told = {
            "kind": device.kind,
            "number": device.number,
            "handle": handle.handle.hex(),
            "offset": handle.offset,
            "size_bytes": size - 512,
        }
        command = [sys.executable, __file__, "--open", json.dumps(told)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S)
        if done.returncode:
            raise AssertionError(f"the other process: {done.stderr.strip()[-500:]}")
        if (read := first_byte(512)) != PATTERN ^ 0xFF:
            raise AssertionError(f"the other process's byte is {read} here")
        if (read := first_byte(0)) != PATTERN:
            raise AssertionError("the other process wrote before the place that it was given")
        return {"export_offset": handle.offset, **json.loads(done.stdout.splitlines()[-1])}

    yield "another process reads and writes exported memory", opened
    yield "it does so again", opened
    yield "which GPUs are reached", lambda: {"itself": device.can_access(device.number)}


def open_here(told: Row) -> None:
    """Read and write memory of the process that started this one."""
    device = open_device(told["kind"], told["number"])
    with device:
        stream, size = device.create_stream(), told["size_bytes"]
        base = device.open_exported(bytes.fromhex(told["handle"]))
        place = base + told["offset"]
        found = device.allocate_pinned(4096)
        device.copy(found, place, 1, stream)
        device.synchronize_stream(stream)
        if (read := ctypes.c_ubyte.from_address(found).value) != PATTERN:
            raise AssertionError(f"read {read} instead of {PATTERN}")
        own = device.allocate(size)
        row = rate_of(device, size, lambda: device.copy(own, place, size, stream), [stream])
        device.fill(place, bytes([PATTERN ^ 0xFF]), 1, stream)
        device.synchronize_stream(stream)
        device.close_exported(base)
    print(json.dumps(row))


PROBES = {"copies": copies, "words": words, "exported": exported}


def run(device: Any, probe: str, output: Path, most: int) -> int:
    """Run each step of a probe, write the rows after each one, return how many failed."""
    with device:
        return run_steps(PROBES[probe](device, most), output)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Probe what the direct backend needs of a GPU.")
    parser.add_argument("--probe", choices=tuple(PROBES))
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--most", type=int, default=SIZES_BYTES[-1], metavar="BYTES")
    parser.add_argument("--open", metavar="JSON", help="used internally")
    given = parser.parse_args(arguments)
    if given.open:
        open_here(json.loads(given.open))
        return 0
    if not given.probe or not given.output:
        parser.error("--probe and --output are needed")
    kind = look_for_gpus().kind
    if not kind:
        print("no GPU is seen here")
        return 2
    return 1 if run(open_device(kind, 0), given.probe, given.output, given.most) else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what a probe has left on the GPU ends with the process, whatever hangs there
