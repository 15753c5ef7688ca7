"""Whether there is room for a segment: asked before the kernel is, which might kill a process."""

from __future__ import annotations

from gpucoll import config
from gpucoll.topology.memory import free_memory_bytes
from gpucoll.transport.shared.layout import SegmentLayout

__all__ = ["check_room"]

_LEFT_OVER = 16
"""One part in so many of what is free is left to others, and to this process itself."""


def check_room(layout: SegmentLayout) -> None:
    """Raise MemoryError if a segment takes more memory than is free on this host."""
    free_bytes = free_memory_bytes()
    if free_bytes is None or layout.size_bytes <= free_bytes - free_bytes // _LEFT_OVER:
        return
    tuning = layout.tuning
    raise MemoryError(
        f"no shared memory for gpucoll-segment: {layout.world_size} ranks need "
        f"{_mib(layout.size_bytes)}, but {_mib(free_bytes)} are free on this host (/proc/meminfo, "
        "or the limit of the cgroup). Free memory, raise the limit, use fewer ranks, or smaller "
        f"values in {config.CPU_TUNING}: chunk_bytes is {tuning.chunk_bytes}, rooted_bytes "
        f"{tuning.rooted_bytes}, one_shot_bytes {tuning.one_shot_bytes}, enqueued_records "
        f"{tuning.enqueued_records}"
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
