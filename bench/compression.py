"""``python -m gpucoll.bench.compression``: costs and gains of packing, casts and quantisation.

Each kernel takes turns with a memcpy of the same memory, round by round. A rate counts the bytes
read and written. The medians over the rounds are shown, of rates and of ratios to memcpy. Then
ranks on this host reduce with and without compression in turns. The rates of the kernels give the
link speed below which compression saves time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import gpucoll
from gpucoll.arrays.buffer import Buffer
from gpucoll.bench.argument_types import count, size
from gpucoll.bench.environment import cpu_model, version_of
from gpucoll.kernels.block_message import BLOCK, HALVES, message_bytes
from gpucoll.kernels.cpu import pack, quantise
from gpucoll.kernels.cpu.addresses import convert_kernel
from gpucoll.types import COMPRESSIONS
from gpucoll.version import __version__

__all__ = ["break_even", "main"]

WIRE_FORMATS = ("float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
OF_COMPRESSION = dict(zip(COMPRESSIONS, WIRE_FORMATS, strict=False))
SMALLEST_BYTES, LARGEST_BYTES = 4 << 10, 4 << 20
REDUCED_BYTES = (1 << 20, 16 << 20, 64 << 20)
WORLD_SIZES = (2, 8, 64)
CALLS_A_SAMPLE_S = 0.02


class Case(NamedTuple):
    """A kernel to time."""

    name: str
    call: Callable[[], object]
    read_bytes: int
    written_bytes: int


class Rate(NamedTuple):
    """A result: bytes read and written in GB/s, and the ratio to memcpy's."""

    name: str
    gb_per_s: float
    of_memcpy: float


def measure(cases: Sequence[Case], rounds: int) -> list[Rate]:
    """Time the cases in turns; the first is the memcpy to compare with."""
    rates: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds + 1):
        for case, found in zip(cases, rates, strict=True):
            start = time.perf_counter()
            case.call()
            seconds = time.perf_counter() - start
            if turn:  # the first round touches the memory and compiles
                found.append((case.read_bytes + case.written_bytes) / seconds / 1e9)
    return [
        Rate(
            case.name,
            statistics.median(found),
            statistics.median(x / y for x, y in zip(found, rates[0], strict=True)),
        )
        for case, found in zip(cases, rates, strict=True)
    ]


# --- kernels --------------------------------------------------------------------------------------


def memcpy(size_bytes: int) -> Case:
    """Return a copy of `size_bytes` bytes."""
    source, destination = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)

    def copy() -> None:
        ctypes.memmove(destination.ctypes.data, source.ctypes.data, size_bytes)

    return Case("memcpy", copy, size_bytes, size_bytes)


def kernel_cases(size_bytes: int) -> Iterator[Case]:
    """Yield casts, quantisation and dequantisation of float32 arrays of `size_bytes` bytes."""
    length = size_bytes // 4 // BLOCK * BLOCK
    blocks, wide_bytes = length // BLOCK, 4 * length
    x = np.random.default_rng(0).standard_normal(length, dtype=np.float32)
    y = np.empty_like(x)
    yield memcpy(wide_bytes)
    for dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        half_bytes = length * (2 if dtype in HALVES else 1)
        half = np.empty(half_bytes, np.uint8)
        narrow, widen = (
            ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(convert_kernel(*ends))
            for ends in (("float32", dtype), (dtype, "float32"))
        )
        at = x.ctypes.data, half.ctypes.data, y.ctypes.data

        def to_half(narrow: Any = narrow, at: Any = at, keep: Any = half) -> None:
            narrow(at[1], at[0], length, 0)

        def from_half(widen: Any = widen, at: Any = at, keep: Any = half) -> None:
            widen(at[2], at[1], length, 0)

        yield Case(f"float32 to {dtype}", to_half, wide_bytes, half_bytes)
        yield Case(f"{dtype} to float32", from_half, half_bytes, wide_bytes)
    for name in ("int8", "float8_e4m3fn", "float8_e5m2"):
        message = np.empty(message_bytes(blocks, name), np.uint8)
        for seed in (None, 1):

            def pack_up(name: str = name, message: Any = message, seed: Any = seed) -> None:
                quantise.quantise(x, message, name, blocks=blocks, seed=seed)

            how = "" if seed is None else ", stochastic"
            yield Case(f"quantise {name}{how}", pack_up, wide_bytes, message.size)
        yield reduction_case(name, message, y, blocks, 1)
    for name in quantise.WIRE_FORMATS:
        pair = np.empty((2, message_bytes(blocks, name)), np.uint8)
        for message in pair:
            quantise.quantise(x, message, name, blocks=blocks)
        yield reduction_case(name, pair, y, blocks, 2)


def reduction_case(name: str, messages: Any, y: Any, blocks: int, sources: int) -> Case:
    """Return the dequantised sum of messages."""

    def add_up() -> None:
        quantise.dequantise(messages, y, name, blocks=blocks, sources=sources)

    what = f"dequantise {name}" if sources == 1 else f"dequantise and add {sources} {name}"
    return Case(what, add_up, messages.size, y.nbytes)


def pack_cases(n_arrays: int) -> Iterator[Case]:
    """Yield packs of arrays of log-uniform size between 4 KiB and 4 MiB."""
    logarithms = np.random.default_rng(1).uniform(
        np.log(SMALLEST_BYTES), np.log(LARGEST_BYTES), n_arrays
    )
    arrays = [np.ones(int(length), np.float32) for length in np.exp(logarithms) // 4]
    pieces = [Buffer(x.ctypes.data, x.shape, "float32", 4, x) for x in arrays]
    offsets = pack.layout([x.nbytes for x in arrays])
    buffer = np.zeros(offsets[-1], np.uint8)
    total, at = offsets[-1], buffer.ctypes.data

    def one_by_one(keep: Any = buffer) -> None:
        for offset, piece in zip(offsets, pieces, strict=False):
            ctypes.memmove(at + offset, piece.address, 4 * piece.count)

    yield memcpy(total)
    yield Case("memcpy, array by array", one_by_one, total, total)
    yield Case("pack", pack.prepare_pack(pieces, at, offsets), total, total)
    yield Case("unpack", pack.prepare_unpack(pieces, at, offsets), total, total)
    halves = pack.layout([x.nbytes // 2 for x in arrays])
    how: dict[str, Any] = {"dtype": "bfloat16", "scale": 0.5}
    packs = pack.prepare_pack(pieces, at, halves, **how)
    yield Case("pack as bfloat16, scaled", packs, total, halves[-1])
    unpacks = pack.prepare_unpack(pieces, at, halves, **how)
    yield Case("unpack from bfloat16, scaled", unpacks, halves[-1], total)


# --- all_reduce -----------------------------------------------------------------------------------


def time_all_reduce(comm: Any, size_bytes: int, rounds: int) -> list[float]:
    """Return the seconds of a call without and with each compression, as this rank's medians."""
    x = np.random.default_rng(comm.rank).standard_normal(size_bytes // 4, dtype=np.float32)
    out = np.empty_like(x)
    ways = (None, *COMPRESSIONS)
    found: list[list[float]] = [[] for _ in ways]
    calls = 1
    for turn in range(rounds + 1):
        for name, seconds in zip(ways, found, strict=True):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                comm.all_reduce(x, out=out, compression=name)
            seconds.append((time.perf_counter() - start) / calls)
        if turn == 0:
            slowest = comm.all_reduce(found[0].pop(), "max")
            for seconds in found[1:]:
                seconds.pop()
            calls = max(1, round(CALLS_A_SAMPLE_S / slowest))
    return [statistics.median(seconds) for seconds in found]


def reduced(ranks: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the times of each size in microseconds, of the slowest rank."""
    for size_bytes in REDUCED_BYTES:
        times = gpucoll.launch(time_all_reduce, ranks, (size_bytes, rounds))
        slowest = [1e6 * max(row) for row in zip(*times, strict=True)]
        names = ("none", *COMPRESSIONS)
        yield {"size": size_bytes, **dict(zip(names, slowest, strict=True))}


# --- when compression pays ------------------------------------------------------------------------


def break_even(name: str, world_size: int, gb_per_s: dict[str, float]) -> float:
    """Return the speed of each rank's link, in GB/s, below which a compression saves time.

    Without compression, each rank sends and receives 2 (P-1)/P times its float32 data. With
    compression it sends codes instead, and the kernels run in addition: quantise everything, add up
    a share of P messages, quantise the share, dequantise everything. The estimate is conservative,
    since it does not subtract the reduction of the plain call.

    Parameters
    ----------
    name : str
        A compression.
    world_size : int
        P.
    gb_per_s : dict
        Rates of the kernels by the names of `kernel_cases`, in bytes read and written.
    """
    wire = OF_COMPRESSION[name]
    is_half = wire in HALVES
    code = 2.0 if is_half else 1 + 4 / BLOCK
    there = gb_per_s[f"float32 to {wire}" if is_half else f"quantise {wire}"]
    back = gb_per_s[f"{wire} to float32" if is_half else f"dequantise {wire}"]
    adding = gb_per_s[f"dequantise and add 2 {wire}"]
    kernel_s = (
        (4 + code) / there * (1 + 1 / world_size)
        + (code + 4 / world_size) / adding
        + (4 + code) / back
    )
    saved_bytes = 2 * (world_size - 1) / world_size * (4 - code)
    return saved_bytes / kernel_s


# --- the command ----------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m gpucoll.bench.compression",
        description=(
            "Measure packing, casts and quantisation against memcpy, and derive where compression "
            "pays."
        ),
    )
    parser.add_argument(
        "--size", type=size, default=64 << 20, help=("bytes of float32 for each kernel")
    )
    parser.add_argument("--arrays", type=count(1), default=500, help="number of arrays to pack")
    parser.add_argument(
        "--ranks", type=count(1), default=2, help=("ranks of the all_reduce on this host")
    )
    parser.add_argument("--rounds", type=count(1), default=7, help="number of timings of each")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parse(arguments)
    found: dict[str, Any] = {"environment": environment()}
    print("# " + ", ".join(f"{key} {value}" for key, value in found["environment"].items()))
    for title, key, cases in (
        (f"{options.size} bytes of float32, one thread", "kernels", kernel_cases(options.size)),
        (
            f"{options.arrays} arrays of 4 KiB to 4 MiB, one thread",
            "pack",
            pack_cases(options.arrays),
        ),
    ):
        rates = measure([*cases], options.rounds)
        found[key] = [rate._asdict() for rate in rates]
        print(f"#\n# {title}\n#{'GB/s':>9} {'of memcpy':>10}")
        for rate in rates:
            print(f"{rate.gb_per_s:10.2f} {rate.of_memcpy:10.2f}  {rate.name}")
    found["all_reduce"] = show_all_reduce(options.ranks, options.rounds)
    known = {rate["name"]: rate["gb_per_s"] for rate in found["kernels"]}
    found["break_even"] = show_break_even(known)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def show_all_reduce(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Measure, print and return the reductions on this host."""
    print(f"#\n# all_reduce of float32, {ranks} ranks on this host, microseconds")
    print(f"#{'bytes':>10} {'none':>12} " + " ".join(f"{name:>12}" for name in COMPRESSIONS))
    rows = []
    for row in reduced(ranks, rounds):
        rows.append(row)
        times = " ".join(f"{row[name]:12.1f}" for name in ("none", *COMPRESSIONS))
        print(f"{row['size']:11} {times}", flush=True)
    return rows


def show_break_even(gb_per_s: dict[str, float]) -> list[dict[str, Any]]:
    """Print and return the link speeds below which compression pays."""
    print("#\n# pays if each rank's link is slower than (GB/s each way; from the rates above)")
    print(f"#{'ranks':>10} " + " ".join(f"{name:>12}" for name in COMPRESSIONS))
    rows = []
    for world_size in WORLD_SIZES:
        speeds = {name: break_even(name, world_size, gb_per_s) for name in COMPRESSIONS}
        rows.append({"ranks": world_size, **speeds})
        print(f"{world_size:11} " + " ".join(f"{speed:12.2f}" for speed in speeds.values()))
    return rows


def environment() -> dict[str, Any]:
    """Return the machine and the versions that belong to the figures."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpucoll": __version__,
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "cpu": cpu_model(),
        "usable_cpus": len(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    sys.exit(main())
