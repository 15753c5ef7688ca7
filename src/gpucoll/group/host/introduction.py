"""The introduction that a rank sends when the ranks meet, and the check of another rank's."""

from __future__ import annotations

import os
import resource
import stat
from typing import Any

from gpucoll.errors import RendezvousError
from gpucoll.memory.arena import Arena
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared import layout, peer_memory
from gpucoll.version import __version__
from gpucoll.wording import rank_of

_MOST = 1 << 63
_DESCRIPTORS = 3
"""Descriptors for each rank: its connection, its arena, and its life line, which stays open."""
_MORE_DESCRIPTORS = 2
"""Further descriptors: the segment's, which stays open too, and rank 0's listening socket."""


def introduction_of(
    job: Job, arena: Arena, facts: dict[str, Any], same: dict[str, Any]
) -> dict[str, Any]:
    """Return this process's introduction; see `joining.join` for its parts."""
    return {
        "rank": job.rank,
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "arena_bytes": arena.size_bytes,
        "probe": peer_memory.own_probe(),
        "same": {
            "world_size": job.world_size,
            "the version of gpucoll": __version__,
            "the layout of the segment": layout.LAYOUT_VERSION,
            **same,
        },
        **facts,
    }


def check_descriptors(job: Job) -> None:
    """Raise RendezvousError if this process may not open what it needs to meet so many ranks.

    Every rank counts what rank 0 needs, which needs most. So ranks with the same limit all raise
    the error, and none waits for another.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        in_use = len(os.listdir("/proc/self/fd")) - 1  # without listdir's own
    except OSError:
        return
    needed = in_use + _DESCRIPTORS * job.world_size + _MORE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise RendezvousError(
            f"{rank_of(job.rank, job.world_size)}: {job.world_size} ranks take {needed} file "
            f"descriptors while they meet ({in_use} are open already), and the limit of this "
            f"process is {limit}: raise it with ulimit -n"
        )


def check_introduction(introduction: dict[str, Any], fds: list[int], facts: dict[str, Any]) -> None:
    """Raise ValueError unless an introduction and its descriptors can be a rank's.

    `facts` are this rank's: every rank's introduction has the same kinds of facts.
    """
    if not _is_number(introduction.get("pid"), 1, 1 << 31):
        raise ValueError("without a process number")
    cpus = introduction.get("cpus")
    if not isinstance(cpus, list) or not cpus or not all(_is_number(cpu) for cpu in cpus):
        raise ValueError("without its CPUs")
    probe = introduction.get("probe")
    if not isinstance(probe, list) or len(probe) != 2 or not _is_probe(*probe):
        raise ValueError("without a token to read")
    size_bytes = introduction.get("arena_bytes")
    status = os.fstat(fds[0])
    if not stat.S_ISREG(status.st_mode) or not _is_number(size_bytes, 1):
        raise ValueError("without an arena")
    if status.st_size != size_bytes:
        raise ValueError(f"its arena has {status.st_size} bytes, not {size_bytes}")
    check_facts(introduction, facts)


def check_facts(introduction: dict[str, Any], facts: dict[str, Any]) -> None:
    """Raise ValueError unless an introduction has the same kinds of facts as this rank's."""
    for name, ours in facts.items():
        if not _is_like(introduction.get(name), ours):
            raise ValueError(f"without {name!r}")


def _is_number(value: object, least: int = 0, bound: int = _MOST) -> bool:
    return type(value) is int and least <= value < bound


def _is_probe(address: object, token: object) -> bool:
    if not _is_number(address, 0, 1 << 64) or not isinstance(token, str):
        return False
    try:
        return len(bytes.fromhex(token)) == peer_memory.TOKEN_BYTES
    except ValueError:
        return False


def _is_like(theirs: object, ours: object) -> bool:
    """Return whether two facts are of one kind; for a tuple, a list of as many such facts."""
    if isinstance(ours, tuple):
        return (
            isinstance(theirs, list)
            and len(theirs) == len(ours)
            and all(_is_like(*pair) for pair in zip(theirs, ours, strict=True))
        )
    if ours is None or theirs is None:
        return True
    kinds = (list, dict, str, bool, int | float)
    return any(isinstance(theirs, kind) and isinstance(ours, kind) for kind in kinds)
