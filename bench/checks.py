"""Checks made before anything is measured; they refuse what cannot be measured."""

from __future__ import annotations

import importlib.util
import os

from gpucoll import config
from gpucoll.bench import environment, page, pictures
from gpucoll.bench.arguments import Options
from gpucoll.bench.rank.arrays import TEST_ARRAY
from gpucoll.bench.rank.inputs import STORAGE
from gpucoll.transport.shared import MAX_RANKS

__all__ = [
    "CannotMeasureError",
    "check_dtypes",
    "check_files",
    "check_host_devices",
    "check_launched",
    "check_memory",
    "check_ranks",
]

MEMORY_MARGIN = 0.9  # of the available memory; the libraries' own buffers need the rest

OWN_DEVICE_BYTES = 32 << 20  # memory that the direct backend keeps, and gaps between arrays


class CannotMeasureError(Exception):
    """The measurement is not possible; the message names the reason and the remedy."""


def check_launched(options: Options, ranks: int) -> None:
    """Raise if ranks that a launcher has started cannot do what the options require."""
    if options.compare:
        raise CannotMeasureError(
            "--compare must start the ranks of every library itself, but a launcher has started "
            "these: run gpucoll-bench --ranks P --compare ... without one"
        )
    if options.ranks not in (None, ranks):
        raise CannotMeasureError(
            f"--ranks {options.ranks}: the launcher has started {ranks} ranks; omit --ranks, or "
            "start that many"
        )
    if options.one_cpu:
        raise CannotMeasureError(
            "--one-cpu must start the ranks itself, but a launcher has started these: run "
            "gpucoll-bench --ranks P --one-cpu without one"
        )
    programs = [one.collective for one in options.each() if one.traits.own_program]
    if programs:
        raise CannotMeasureError(
            f"{', '.join(programs)}: the start of ranks is measured, but a launcher has started "
            "these already: run gpucoll-bench --ranks P without one"
        )
    check_ranks(options, ranks)
    check_dtypes(options)
    check_host_devices(options)
    check_files(options)


def check_ranks(options: Options, ranks: int) -> None:
    """Raise if the root is not a rank, or the number of ranks is not supported."""
    if ranks > MAX_RANKS:
        raise CannotMeasureError(f"--ranks {ranks}: one host supports at most {MAX_RANKS}")
    for one in options.each():
        if one.traits.has_root and options.root >= ranks:
            raise CannotMeasureError(
                f"-r {options.root}: there are only {ranks} ranks, 0 to {ranks - 1}"
            )
        if ranks < one.traits.least_ranks:
            raise CannotMeasureError(
                f"{one.collective} needs at least two ranks: name other collectives, or more "
                "--ranks"
            )


def check_dtypes(options: Options) -> None:
    """Raise if ml_dtypes or PyTorch is needed and missing."""
    if options.torch and importlib.util.find_spec("torch") is None:
        raise CannotMeasureError("--torch needs PyTorch, which is not installed: pip install torch")
    needing = {d for one in options.each() for d, _ in one.combinations if d in STORAGE}
    if needing and importlib.util.find_spec("ml_dtypes") is None:
        raise CannotMeasureError(
            f"-d {','.join(sorted(needing))} needs ml_dtypes, which is not installed: "
            "pip install ml_dtypes"
        )


def check_host_devices(options: Options) -> None:
    """Raise if the memory of a Host device is too small for the largest size."""
    if options.array != TEST_ARRAY:
        return
    arrays = 2 + options.limit  # input, output, and the destination of the copy
    needed = arrays * options.asked_sizes_bytes[-1] * options.list_length + OWN_DEVICE_BYTES
    if needed > (there := config.host_device_memory()):
        raise CannotMeasureError(
            f"-e {options.asked_sizes_bytes[-1]} needs {needed} bytes on each Host device, which "
            f"has {there}: choose a smaller -e, or set {config.HOST_DEVICE_MEMORY}"
        )


def check_files(options: Options) -> None:
    """Raise if a file cannot be written or drawn, before minutes of measuring."""
    if options.plot_path is not None and (reason := pictures.why_not(options.plot_path)):
        raise CannotMeasureError(f"--plot {reason}")
    if options.html_path is not None and (reason := page.why_not(options.html_path)):
        raise CannotMeasureError(f"--html {reason}")
    csv_path = None if options.csv_on_stdout else options.csv_path
    files = {"--json": options.json_path, "--csv": csv_path}
    files |= {"--plot": options.plot_path, "--html": options.html_path}
    for option, path in files.items():
        if path is None:
            continue
        is_special = path.exists() and not path.is_file()  # written to, as /dev/null
        place = path if is_special else path.absolute().parent
        if path.is_dir() or not os.access(place, os.W_OK):
            raise CannotMeasureError(f"{option} {path}: cannot write a file there")


def check_memory(options: Options, ranks: int, peers: int) -> None:
    """Raise if this machine has too little memory for the largest size."""
    largest = options.asked_sizes_bytes[-1]
    needed = environment.needed_bytes(options, ranks, peers)
    available = environment.available_bytes()
    if available is not None and needed > MEMORY_MARGIN * available:
        raise CannotMeasureError(
            f"-e {largest} with {ranks} ranks and {1 + peers} libraries needs "
            f"{needed / 2**30:.1f} GiB for the arrays, and {available / 2**30:.1f} GiB are "
            "available: choose a smaller -e, fewer ranks or fewer peers"
        )
