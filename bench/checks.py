"""What is refused before anything is measured, because it cannot be."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from gpucoll import config
from gpucoll.bench import environment
from gpucoll.bench.arguments import Options
from gpucoll.bench.rank.arrays import TEST_ARRAY
from gpucoll.bench.rank.inputs import STORAGE
from gpucoll.transport.shared.layout import MAX_RANKS

__all__ = [
    "CannotMeasureError",
    "check_dtypes",
    "check_host_devices",
    "check_json_path",
    "check_launched",
    "check_memory",
    "check_ranks",
]

MEMORY_MARGIN = 0.9  # of what is available: buffers of the libraries themselves come on top

OWN_DEVICE_BYTES = 32 << 20  # what the direct backend keeps, and what lies between arrays


class CannotMeasureError(Exception):
    """Nothing can be measured this way; the message says why, and what to do."""


def check_launched(options: Options, ranks: int) -> None:
    """Refuse what the ranks of a launcher cannot do."""
    if options.compare:
        raise CannotMeasureError(
            "--compare starts the ranks of every library itself, and these have been started by a "
            "launcher: run gpucoll-bench --ranks P --compare ... without one"
        )
    if options.ranks not in (None, ranks):
        raise CannotMeasureError(
            f"--ranks {options.ranks}: the launcher has started {ranks} ranks; leave --ranks out, "
            "or start as many"
        )
    if options.one_cpu:
        raise CannotMeasureError(
            "--one-cpu starts ranks itself, and these have been started by a launcher: run "
            "gpucoll-bench --ranks P --one-cpu without one"
        )
    programs = [one.collective for one in options.each() if one.traits.own_program]
    if programs:
        raise CannotMeasureError(
            f"{', '.join(programs)}: what is measured is starting ranks, and these have been "
            "started by a launcher: run gpucoll-bench --ranks P without one"
        )
    check_ranks(options, ranks)
    check_dtypes(options)
    check_host_devices(options)
    check_json_path(options.json_path)


def check_ranks(options: Options, ranks: int) -> None:
    """Refuse a root that is none of the ranks, and more or fewer ranks than there can be."""
    if ranks > MAX_RANKS:
        raise CannotMeasureError(f"--ranks {ranks}: one host has {MAX_RANKS} at most")
    for one in options.each():
        if one.traits.has_root and options.root >= ranks:
            raise CannotMeasureError(
                f"-r {options.root}: there are only {ranks} ranks, 0 to {ranks - 1}"
            )
        if ranks < one.traits.least_ranks:
            raise CannotMeasureError(
                f"{one.collective} is between two ranks at least: name others, or more --ranks"
            )


def check_dtypes(options: Options) -> None:
    """Refuse the dtypes that NumPy has through ml_dtypes alone, and tensors, where missing."""
    if options.torch and importlib.util.find_spec("torch") is None:
        raise CannotMeasureError("--torch needs PyTorch, which is not installed: pip install torch")
    needing = {d for one in options.each() for d, _ in one.combinations if d in STORAGE}
    if needing and importlib.util.find_spec("ml_dtypes") is None:
        raise CannotMeasureError(
            f"-d {','.join(sorted(needing))} needs ml_dtypes, which is not installed: "
            "pip install ml_dtypes"
        )


def check_host_devices(options: Options) -> None:
    """Refuse a size that a Host device has not the memory for."""
    if options.array != TEST_ARRAY:
        return
    arrays = 2 + options.limit  # input, output, and where a copy goes
    needed = arrays * options.asked_sizes_bytes[-1] * options.list_length + OWN_DEVICE_BYTES
    if needed > (there := config.host_device_memory()):
        raise CannotMeasureError(
            f"-e {options.asked_sizes_bytes[-1]} needs {needed} bytes of each Host device, which "
            f"has {there}: choose a smaller -e, or set {config.HOST_DEVICE_MEMORY}"
        )


def check_json_path(path: Path | None) -> None:
    """Refuse a place that cannot be written to, before minutes of measuring."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise CannotMeasureError(f"--json {path}: no file can be written there")


def check_memory(options: Options, ranks: int, peers: int) -> None:
    """Refuse a size that this machine has not the memory for."""
    largest = options.asked_sizes_bytes[-1]
    needed = environment.needed_bytes(options, ranks, peers)
    available = environment.available_bytes()
    if available is not None and needed > MEMORY_MARGIN * available:
        raise CannotMeasureError(
            f"-e {largest} with {ranks} ranks and {1 + peers} libraries needs "
            f"{needed / 2**30:.1f} GiB for the arrays, and {available / 2**30:.1f} GiB are "
            "available: choose a smaller -e, fewer ranks or fewer peers"
        )
