"""The memory that this process can still take before the kernel kills processes to make room."""

from __future__ import annotations

from pathlib import Path

from gpucoll.topology.cpus import FILE_SYSTEM, cgroup_folders, read_text

_KIB = 1024
_NO_LIMIT = 1 << 60
"""Without a limit, version 1 of cgroups writes the largest whole number of pages."""


def free_memory_bytes(root: Path = FILE_SYSTEM) -> int | None:
    """Return how much memory can still be taken, in bytes; None: the kernel does not tell.

    This is the minimum of what the machine has left and of what the limit of each cgroup of this
    process leaves. Page cache counts as free, and so does free swap space that the cgroup may use.

    Parameters
    ----------
    root : Path
        The file system whose ``/proc`` and ``/sys`` are read.
    """
    lines = (line.split() for line in read_text(root / "proc/meminfo").splitlines())
    sizes = {
        words[0].rstrip(":"): int(words[1]) * _KIB
        for words in lines
        if len(words) > 1 and words[1].isdecimal()
    }
    swap_bytes = sizes.get("SwapFree", 0)
    found = [
        free_bytes
        for folder in cgroup_folders("memory", root)
        if (free_bytes := _free_in_cgroup(folder, swap_bytes)) is not None
    ]
    if "MemAvailable" in sizes:
        found.append(sizes["MemAvailable"] + swap_bytes)
    return min(found, default=None)


def _free_in_cgroup(folder: Path, swap_bytes: int) -> int | None:
    """Return what one cgroup's own limit leaves, in bytes; None: it has no limit."""
    limit = _number_in(folder / "memory.max", folder / "memory.limit_in_bytes")
    used = _number_in(folder / "memory.current", folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    lines = (line.split() for line in read_text(folder / "memory.stat").splitlines())
    counts = {words[0]: int(words[1]) for words in lines if len(words) == 2}
    cached = 0
    for name in ("active_file", "inactive_file"):  # version 1's total_ includes cgroups below
        cached += counts.get(f"total_{name}", counts.get(name, 0))
    swap_limit = _number_in(folder / "memory.swap.max")
    if swap_limit is not None:
        swap_used = _number_in(folder / "memory.swap.current") or 0
        swap_bytes = min(swap_bytes, max(swap_limit - swap_used, 0))
    return max(limit - used + cached, 0) + swap_bytes


def _number_in(*paths: Path) -> int | None:
    """Return the number in the first of the files that has one; "max" is not a number."""
    for path in paths:
        text = read_text(path).strip()
        if text.isdecimal():
            return int(text)
    return None
