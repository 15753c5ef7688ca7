"""Compare the GPU kernels with copies within the device, in the same run.

::

    python tools/gpu_benchmarks.py --group reduce --output reduce.json

tools/gpu_check.py runs each group in a separate process. A rate counts bytes read and written. Each
repetition times a copy that moves the same number of bytes, then the kernel, so that a disturbance
affects both. Rates and ratios are those of the median times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gpu_rows import write_rows

from gpucoll.arrays.buffer import Buffer
from gpucoll.kernels.block_message import message_bytes
from gpucoll.kernels.gpu.pack import cast, prepare_pack, prepare_unpack
from gpucoll.kernels.gpu.quantise import dequantise, quantise
from gpucoll.kernels.gpu.reduce import reduce_arrays, ring_step
from gpucoll.types import ReduceOp

MIB = 1 << 20
REPETITIONS = 15
WARM_UPS = 3
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
}


class Device(Protocol):
    """What the benchmarks need from a GPU; tests have their own implementation."""

    def allocate(self, size_bytes: int) -> Buffer:
        """Return zeroed memory of dtype uint8, aligned to 256 bytes."""

    def copy(self, destination: Buffer, source: Buffer, size_bytes: int) -> None:
        """Enqueue a copy."""

    def device_s(self, run: Callable[[], None]) -> float:
        """Return how long the device works on what `run` enqueues, in seconds."""

    def wall_s(self, run: Callable[[], None]) -> float:
        """Return the seconds from the call of `run` until its work is done."""


class CupyDevice:
    """Device 0, on a stream of its own."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        kind = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
        self._place = f"{kind}:{cupy.cuda.runtime.getDevice()}"

    def allocate(self, size_bytes: int) -> Buffer:
        """Return zeroed memory."""
        memory = self._cupy.zeros(size_bytes, "u1")
        self._cupy.cuda.runtime.deviceSynchronize()
        where = self._stream.ptr
        return Buffer(memory.data.ptr, (size_bytes,), "uint8", 1, memory, self._place, where)

    def copy(self, destination: Buffer, source: Buffer, size_bytes: int) -> None:
        """Enqueue a copy within the device."""
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            destination.address,
            source.address,
            size_bytes,
            runtime.memcpyDeviceToDevice,
            self._stream.ptr,
        )

    def device_s(self, run: Callable[[], None]) -> float:
        """Return the time between two events around the work."""
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(self._stream)
        run()
        end.record(self._stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1000

    def wall_s(self, run: Callable[[], None]) -> float:
        """Return the time on the host, with an idle stream before and after."""
        self._stream.synchronize()
        begin = time.perf_counter()
        run()
        self._stream.synchronize()
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes
    ----------
    name : str
    moved_bytes : int
        Bytes read and written.
    run : callable
        Enqueues the work.
    target : float or None
        The wanted ratio; None for a case without a target.
    against : callable or None
        Enqueues the work to compare with; None for a copy that moves the same number of bytes.
    by_wall : bool
        Whether to use the host's time, since many calls are slow there.
    """

    name: str
    moved_bytes: int
    run: Callable[[], None]
    target: float | None = None
    against: Callable[[], None] | None = None
    by_wall: bool = False


@dataclass(frozen=True)
class Measured:
    """A measurement; times in seconds, rates in bytes read and written per second."""

    name: str
    moved_bytes: int
    time_s: float
    against_s: float
    rate: float
    against_rate: float
    ratio: float
    """How many times as fast as the work that it is compared with."""
    target: float | None
    against: str
    times_s: list[float]
    against_times_s: list[float]


def measure(device: Device, case: Case, repetitions: int = REPETITIONS) -> Measured:
    """Measure a case and the work that it is compared with, in turn."""
    against, what = case.against, "one by one"
    if against is None:
        what, half = "copy", case.moved_bytes // 2
        source, destination = device.allocate(half), device.allocate(half)

        def against() -> None:
            device.copy(destination, source, half)

    time_of = device.wall_s if case.by_wall else device.device_s
    for _ in range(WARM_UPS):
        time_of(against)
        time_of(case.run)
    pairs = [(time_of(against), time_of(case.run)) for _ in range(repetitions)]
    others, times = [list(each) for each in zip(*pairs, strict=True)]
    other_s, time_s = statistics.median(others), statistics.median(times)
    return Measured(
        name=case.name,
        moved_bytes=case.moved_bytes,
        time_s=time_s,
        against_s=other_s,
        rate=case.moved_bytes / time_s,
        against_rate=case.moved_bytes / other_s,
        ratio=other_s / time_s,
        target=case.target,
        against=what,
        times_s=times,
        against_times_s=others,
    )


def part(buffer: Buffer, dtype: str, count: int, offset: int = 0) -> Buffer:
    """Return `count` elements of a dtype, from a byte offset in the buffer on."""
    item_bytes = ITEM_BYTES[dtype]
    assert offset + count * item_bytes <= buffer.size_bytes
    address = buffer.address + offset
    return Buffer(address, (count,), dtype, item_bytes, buffer, buffer.device, buffer.stream)


def arrays(device: Device, n: int, dtype: str, size_bytes: int, offset: int = 0) -> list[Buffer]:
    """Return arrays of a dtype, each `size_bytes` long, `offset` bytes after aligned addresses."""
    count = size_bytes // ITEM_BYTES[dtype]
    return [part(device.allocate(size_bytes + offset), dtype, count, offset) for _ in range(n)]


def reduce_cases(device: Device, sizes_bytes: Sequence[int]) -> Iterator[Case]:
    """Yield reductions of 2 and 4 arrays, and a ring's step."""
    for size in sizes_bytes:
        for dtype in ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int8"):
            target = 0.9 if ITEM_BYTES[dtype] > 1 else None
            made = arrays(device, 3, dtype, size)
            run = partial(reduce_arrays, "sum", made[:1], made[1:])
            yield Case(f"reduce 2 {dtype} {size >> 20} MiB", 3 * size, run, target)
        made = arrays(device, 5, "float32", size)
        run = partial(reduce_arrays, "sum", made[:1], made[1:])
        yield Case(f"reduce 4 float32 {size >> 20} MiB", 5 * size, run, 0.9)
        step = partial(ring_step, "sum", made[:2], *made[2:4])
        yield Case(f"ring step float32 {size >> 20} MiB", 4 * size, step, 0.9)
    size = sizes_bytes[0]
    for dtype, offset in (("float32", 4), ("bfloat16", 4), ("bfloat16", 2), ("float8_e4m3fn", 1)):
        made = [*arrays(device, 1, dtype, size), *arrays(device, 2, dtype, size, offset=offset)]
        run = partial(reduce_arrays, "sum", made[:1], made[1:])
        yield Case(f"reduce 2 {dtype} differently aligned, by {offset}", 3 * size, run)


def cast_cases(device: Device, sizes_bytes: Sequence[int]) -> Iterator[Case]:
    """Yield casts; the size is that of the float32 side."""
    for size in sizes_bytes:
        (wide,) = arrays(device, 1, "float32", size)
        for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
            half_size = wide.count * ITEM_BYTES[dtype]
            (half,) = arrays(device, 1, dtype, half_size)
            target = 0.9 if ITEM_BYTES[dtype] > 1 else None
            for source, destination in ((wide, half), (half, wide)):
                name = f"cast {source.dtype} to {destination.dtype} {size >> 20} MiB"
                run = partial(cast, source, destination)
                yield Case(name, size + half_size, run, target)


def pack_cases(device: Device, n_arrays: int = 500, largest_bytes: int = 4 * MIB) -> Iterator[Case]:
    """Yield packs of arrays of log-uniform size, compared with a copy and with single copies."""
    generator = np.random.default_rng(7)
    exponents = generator.uniform(np.log(4096), np.log(largest_bytes), n_arrays)
    sizes = [int(size) // 4 * 4 for size in np.exp(exponents)]
    offsets = np.cumsum([0] + [(size + 15) // 16 * 16 for size in sizes]).tolist()
    parts = [part(device.allocate(size), "float32", size // 4) for size in sizes]
    buffer = device.allocate(offsets[-1])
    places = [
        part(buffer, "float32", x.count, start) for x, start in zip(parts, offsets, strict=False)
    ]
    into, out = prepare_pack(parts, buffer, offsets), prepare_unpack(parts, buffer, offsets)

    def one_by_one() -> None:
        for x, place in zip(parts, places, strict=True):
            device.copy(place, x, x.size_bytes)

    moved = 2 * sum(sizes)
    yield Case(f"pack {n_arrays} arrays", moved, into, 0.9)
    yield Case(f"unpack {n_arrays} arrays", moved, out, 0.9)
    yield Case(f"pack {n_arrays} arrays, host time", moved, into, 5, one_by_one, by_wall=True)

    def prepare_and_pack() -> None:
        prepare_pack(parts, buffer, offsets)()

    name = f"prepare and pack {n_arrays} arrays, host time"
    yield Case(name, moved, prepare_and_pack, None, one_by_one, by_wall=True)
    for offset in (4, 2):
        lying = [
            part(device.allocate(size + offset), "bfloat16", size // 2, offset) for size in sizes
        ]
        away = prepare_pack(lying, buffer, offsets)
        yield Case(f"pack {n_arrays} arrays that lie {offset} bytes off", moved, away)
    halved = np.cumsum([0] + [(size // 2 + 15) // 16 * 16 for size in sizes]).tolist()
    narrow = prepare_pack(parts, buffer, halved, dtype="bfloat16", scale=0.5)
    yield Case(f"pack {n_arrays} float32 as bfloat16", moved * 3 // 4, narrow, 0.9)


def quantise_cases(device: Device, sizes_bytes: Sequence[int]) -> Iterator[Case]:
    """Yield quantisation and dequantisation; the size is that of the float32 side."""
    for size in sizes_bytes:
        (x,) = arrays(device, 1, "float32", size)
        blocks = -(-x.count // 256)
        message = device.allocate(message_bytes(blocks))
        moved = size + message.size_bytes
        for name in ("int8", "float8_e4m3fn"):
            for seed, way in ((None, "nearest"), (1, "stochastic")):
                narrow = partial(quantise, x, message, name, blocks=blocks, seed=seed)
                yield Case(f"quantise {name} {way} {size >> 20} MiB", moved, narrow, 0.8)
            widen = partial(dequantise, message, x, name, blocks=blocks)
            yield Case(f"dequantise {name} {size >> 20} MiB", moved, widen, 0.8)


def custom_cases(device: Device, sizes_bytes: Sequence[int]) -> Iterator[Case]:
    """Yield a user's operation."""
    op, size = ReduceOp.custom(lambda a, b: a + b), sizes_bytes[0]
    for dtype in ("float32", "bfloat16"):
        made = arrays(device, 3, dtype, size)
        run = partial(reduce_arrays, op, made[:1], made[1:])
        yield Case(f"user's operation {dtype} {size >> 20} MiB", 3 * size, run)


SIZES_BYTES = (64 * MIB, 256 * MIB)
GROUPS: dict[str, Callable[[Device], Iterator[Case]]] = {
    "reduce": lambda device: reduce_cases(device, SIZES_BYTES),
    "cast": lambda device: cast_cases(device, SIZES_BYTES),
    "pack": pack_cases,
    "quantise": lambda device: quantise_cases(device, SIZES_BYTES),
    "custom": lambda device: custom_cases(device, SIZES_BYTES),
}


def run_group(
    device: Device, cases: Iterator[Case], write: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Measure each case; `write` gets all results so far after each case."""
    done: list[dict[str, Any]] = []
    for case in cases:
        done.append(asdict(measure(device, case)))
        write(done)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure the GPU kernels.")
    parser.add_argument("--group", choices=list(GROUPS), required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    device = CupyDevice()

    def write(done: list[dict[str, Any]]) -> None:
        write_rows(done, options.output)
        last = done[-1]
        print(
            f"{last['name']}: {last['rate'] / 1e9:.0f} GB/s, ratio {last['ratio']:.2f}", flush=True
        )

    run_group(device, GROUPS[options.group](device), write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
