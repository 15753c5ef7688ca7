"""The machine and the versions that belong to every figure, and the available memory."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from gpucoll.bench.arguments import Options
from gpucoll.bench.rank.arrays import TEST_ARRAY
from gpucoll.topology import usable_cpu_count
from gpucoll.version import __version__

__all__ = ["available_bytes", "describe", "needed_bytes", "timing"]


class Versions(Protocol):
    """A library that is measured: its ranks or its program."""

    name: str
    versions: dict[str, str]


PROGRAM_TIMING = (
    "A sample of startup is one run of a program by the library's own launcher, from the "
    "launcher's start to its end. Each library has one run before the first sample. The program "
    "makes one all-reduce of the rank numbers. Figures per rank are those of the rank with the "
    "largest value."
)

SINGLE_CALLS = (
    "p50 and p99 are percentiles of calls that are timed one by one after the samples, in turns, "
    "too: of the slowest rank's time of each call. The calls follow one another without a barrier, "
    "so the time in a call includes waiting for ranks that come later. Each time includes the "
    "clock's {clock_ns:.0f} ns. N/A: 200 calls would take more than 2 s."
)

TEST_DEVICE = (
    "Host devices are a test device made of host memory and threads: the times below are "
    "meaningless for GPUs."
)


def describe(
    options: Options,
    ranks: int,
    cpus: list[int],
    groups: Iterable[Versions],
    clock_ns: float | None = None,
) -> dict[str, Any]:
    """Return the JSON's ``environment``.

    Parameters
    ----------
    options : Options
        The options of the run.
    ranks : int
        The number of ranks of each library.
    cpus : list of int
        The CPU of each rank; empty if they are not pinned.
    groups : iterable of Group or Program
        Every library, with its versions.
    clock_ns : float or None
        Nanoseconds that the timing of a single call takes, if single calls are timed.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": options.command_line,
        "gpucoll": __version__,
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "numba": version_of("numba"),
        "cpu": cpu_model(),
        "usable_cpus": usable_cpu_count(),
        "ranks": ranks,
        "pinned_cpus": cpus or None,
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "array": options.array,
        "test_device": TEST_DEVICE if options.array == TEST_ARRAY else None,
        "rounds": options.rounds,
        "sample_s": options.sample_s,
        "timing": " ".join(timings(options, clock_ns)),
        "clock_ns": clock_ns,
        "libraries": {group.name: group.versions for group in groups},
    }


def timings(options: Options, clock_ns: float | None = None) -> Iterator[str]:
    """Yield sentences that describe how the times were measured."""
    programs = [one.traits.own_program for one in options.each()]
    if not all(programs):
        where = "device" if options.array == TEST_ARRAY else "GPU"
        yield timing(options.rounds, where if options.on_gpus else "")
    if clock_ns is not None:
        yield SINGLE_CALLS.format(clock_ns=clock_ns)
    if any(programs):
        yield PROGRAM_TIMING


def timing(rounds: int, where: str = "") -> str:
    """Describe the timing loop; `where` names the device if calls are only enqueued."""
    ending = f"It ends when the {where} has completed all of them. " if where else ""
    return (
        "A sample is a loop of calls with nothing between them, not even a barrier; one call and "
        f"one barrier precede it. {ending}Its value is the loop's time divided by the number of "
        "calls. The libraries take turns, sample by sample, and so do in place and out of place. "
        f"The time shown is the slowest rank's: the largest of the ranks' medians over {rounds} "
        "samples. If a call need not wait for other ranks (a small broadcast, reduce, gather, "
        "scatter or scan), ranks run ahead of each other, in gpucoll and in its peers."
    )


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model name."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def available_bytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory that is available without swapping."""
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def needed_bytes(options: Options, ranks: int, peers: int) -> int:
    """Return the memory for the largest size: an input and an output per rank and library."""
    placements = 1 + options.symmetric + peers
    if options.array == TEST_ARRAY:
        placements += 1  # NumPy's arrays in addition
    largest = max(max(each.sizes_bytes) for each in options.each())
    return 2 * largest * options.list_length * ranks * placements
