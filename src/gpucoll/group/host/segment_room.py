"""Check whether the host has memory for a segment, before the kernel kills a process for it.

The check runs when the segment is made, and again when a rank has used up what it was granted.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from gpucoll import config
from gpucoll.errors import SharedMemoryError
from gpucoll.topology.memory import free_memory_bytes
from gpucoll.transport.shared.layout import NEVER, SegmentLayout
from gpucoll.transport.shared.words import Context
from gpucoll.wording import rank_of

_LEFT_OVER = 16
"""This fraction (1/16) of the free memory is left to other processes and to this one itself."""
_GRANTED = 16
"""The ranks together may take this fraction (1/16) of the free memory before one checks again."""


def check_room(layout: SegmentLayout) -> int:
    """Raise SharedMemoryError if a segment takes more memory than is free on this host.

    Returns how many bytes more each rank may take, for parts of the segment that it uses for the
    first time, before it checks again (`make_room`).
    """
    free_bytes = free_memory_bytes()
    if free_bytes is None:
        return NEVER
    if layout.first_bytes <= _most_bytes(free_bytes):
        return _granted_bytes(free_bytes, layout.world_size)
    raise SharedMemoryError(
        f"no shared memory for gpucoll-segment: {layout.world_size} ranks need "
        f"{_mib(layout.first_bytes)}, but {_mib(free_bytes)} are free on this host (/proc/meminfo, "
        "or the limit of the cgroup). Free memory, raise the limit, or use fewer ranks"
    )


def make_room(context: npt.NDArray[np.int64]) -> None:
    """Let a rank take more memory after `Status.NO_ROOM`; the rank then repeats its step.

    Raises
    ------
    SharedMemoryError
        The kernel has refused, or the host has too little. The communicator is as it was before.
    """
    wanted_bytes, number = int(context[Context.refused_bytes]), int(context[Context.refused_error])
    rank, world_size = int(context[Context.rank]), int(context[Context.world_size])
    who = f"{rank_of(rank, world_size)}: no shared memory for the next part of gpucoll-segment: "
    remedy = (
        "Free memory, raise the limit of the process or its cgroup, use fewer ranks, or smaller "
        f"values in {config.CPU_TUNING} (chunk_bytes, n_stages, streamed_bytes, rooted_bytes)"
    )
    if number:
        raise SharedMemoryError(
            f"{who}{_mib(wanted_bytes)} were refused ({os.strerror(number)}). {remedy}"
        )
    free_bytes = free_memory_bytes()
    if free_bytes is not None and wanted_bytes > _most_bytes(free_bytes):
        raise SharedMemoryError(
            f"{who}it takes {_mib(wanted_bytes)}, but {_mib(free_bytes)} are free on this host "
            f"(/proc/meminfo, or the limit of the cgroup). {remedy}"
        )
    more_bytes = NEVER if free_bytes is None else _granted_bytes(free_bytes, world_size)
    context[Context.room_bytes] = wanted_bytes + more_bytes


def _most_bytes(free_bytes: int) -> int:
    return free_bytes - free_bytes // _LEFT_OVER


def _granted_bytes(free_bytes: int, world_size: int) -> int:
    return free_bytes // _GRANTED // world_size


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
