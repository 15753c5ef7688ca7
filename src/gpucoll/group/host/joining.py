"""Let the ranks of one host meet and map what they share."""

from __future__ import annotations

import os
import resource
import select
import stat
from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.errors import ArgumentError, RendezvousError
from gpucoll.group.host.facts import write_facts
from gpucoll.group.host.members import NO_DESCRIPTOR, Members
from gpucoll.group.host.segment_room import check_room
from gpucoll.memory import peer_processes
from gpucoll.memory.arena import Arena, process_arena
from gpucoll.rendezvous import frames
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meet import Meeting, Watch, meet
from gpucoll.transport.shared import MAX_RANKS, layout, mapping, peer_memory
from gpucoll.transport.shared.layout import SegmentLayout, Tuning
from gpucoll.transport.shared.peer_memory import GROWTHS, PeerArena
from gpucoll.version import __version__
from gpucoll.wording import rank_of

# --- introductions --------------------------------------------------------------------------------


_MOST = 1 << 63
_DESCRIPTORS = 3
"""Descriptors for each rank: its connection, its arena, and its life line, which stays open."""
_MORE_DESCRIPTORS = 3
"""Further descriptors: the segment's, which stays open too, rank 0's listening socket, a mark."""


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


# --- the meeting ----------------------------------------------------------------------------------


def life_line() -> int:
    """Return a descriptor that peers can poll for the end of this process.

    A pidfd if the kernel has them (5.3); else the reading end of a pipe whose writing end stays
    open in this process until it ends.
    """
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        reading, writing = os.pipe()
        _held_life_lines.append(writing)
        return reading


_held_life_lines: list[int] = []


def join(
    job: Job,
    tune: Callable[[list[dict[str, Any]]], Tuning],
    timeout_s: float,
    facts: dict[str, Any] | None = None,
    same: dict[str, Any] | None = None,
    watch: Watch | None = None,
    make_further: Callable[[], list[int]] = list,
) -> Members:
    """Meet the ranks of `job` and map what they share.

    Parameters
    ----------
    job : Job
        This rank, and the ranks that it meets.
    tune : callable
        Called on rank 0 with all introductions; returns the `Tuning` for all.
    timeout_s : float
        How long to wait for the others.
    facts : dict, optional
        Facts about this rank that every rank gets with its introduction; they must fit JSON.
    same : dict, optional
        Values that must be equal on all ranks, by the names that errors give them.
    watch : Watch, optional
        Knows, beyond the meeting's own connections, which ranks can never come.
    make_further : callable, optional
        Called on rank 0; returns further descriptors that all ranks get.

    Raises
    ------
    RendezvousError
        A rank did not come, or runs another version of gpucoll; or the limit of open files is too
        low for the number of ranks.
    PeerLostError, AbortedError
        A rank's process has ended, or a rank has given up.
    SharedMemoryError
        There is no memory for the segment.
    """
    if job.world_size > MAX_RANKS:
        raise ArgumentError(
            f"world_size is {job.world_size}, but the segment of one host allows {MAX_RANKS} ranks"
        )
    check_descriptors(job)
    facts = facts or {}

    def decide(introductions: list[dict[str, Any]]) -> tuple[dict[str, Any], list[int]]:
        tuning = tune(introductions)
        place = _layout_of(job, tuning)
        room_bytes = check_room(place)
        fd = mapping.create("gpucoll-segment", place.size_bytes, reserve_bytes=place.first_bytes)
        try:
            write_facts(fd, job, place, [one["pid"] for one in introductions])
            return {"tuning": tuning.words(), "room": room_bytes}, [fd, *make_further()]
        except BaseException:
            os.close(fd)
            raise

    with held_signals():
        arena = process_arena()
        introduction = introduction_of(job, arena, facts, same or {})
        life = life_line()
        try:
            return meet(
                job,
                introduction,
                [arena.fd, life],
                check=lambda other, fds: check_introduction(other, fds, facts),
                decide=decide,
                settle=lambda meeting: _settle(meeting, arena),
                undo=lambda members: members.leave(),
                timeout_s=timeout_s,
                watch=watch,
            )
        finally:
            os.close(life)


def _settle(meeting: Meeting, arena: Arena) -> Members:
    """Map what the ranks share; close the descriptors that are not kept."""
    kept: list[int] = []
    try:
        return _map_members(meeting, arena, kept)
    finally:
        frames.close_all([fd for fd in meeting.fds if fd not in kept])


def _layout_of(job: Job, tuning: Tuning) -> SegmentLayout:
    return SegmentLayout(job.world_size, tuning, max(job.total - job.world_size, 0))


def _map_members(meeting: Meeting, arena: Arena, kept: list[int]) -> Members:
    job, tuning = meeting.job, Tuning(*meeting.decision["tuning"])
    place = _layout_of(job, tuning)
    segment = mapping.Mapping(meeting.shared_fds[0], place.size_bytes, "the segment")
    try:
        members = Members(
            job=job,
            tuning=tuning,
            layout=place,
            segment=segment,
            segment_fd=meeting.shared_fds[0],
            room_bytes=meeting.decision["room"],
            arena=arena,
            arenas=np.zeros(place.ends, np.int64),
            own_arena=peer_processes.arena_words(arena.size_bytes),
            peers=[],
            poll_table=np.full(place.ends, NO_DESCRIPTOR, np.int64),
            pid_table=np.zeros(place.ends, np.int64),
            introductions=meeting.introductions,
            further_fds=meeting.shared_fds[1:],
        )
    except BaseException:
        segment.unmap()
        raise
    kept += meeting.shared_fds
    members.pid_table[: job.world_size] = [member["pid"] for member in meeting.introductions]
    members.own_arena[PeerArena.mapped] = GROWTHS
    members.own_arena[PeerArena.mappings + GROWTHS] = arena.mapping.address
    members.arenas[job.rank] = members.own_arena.ctypes.data
    try:
        for rank, (arena_fd, life_fd) in enumerate(meeting.rank_fds):
            if rank != job.rank:
                size_bytes = meeting.introductions[rank]["arena_bytes"]
                peer = peer_processes.meet(arena_fd, size_bytes, life_fd)
                kept.append(life_fd)
                members.peers.append(peer)
                members.arenas[rank] = peer.arena_address
                members.poll_table[rank] = peer.life_fd | (select.POLLIN << 32)
        # A rank that cannot use single copies must not use them in any call, messages included.
        can_copy = members.tuning.single_copy_min_bytes < layout.NEVER and all(
            peer_memory.is_readable(member["pid"], *member["probe"])
            for member in meeting.introductions
        )
        members.store(members.status_offset(job.rank) + layout.STATUS_COPIES, can_copy)
    except BaseException:
        frames.close_all(members.further_fds)
        members.close()
        raise
    return members
