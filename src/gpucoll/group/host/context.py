"""Make the context of a group: the words that every compiled loop gets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpucoll.group.host.members import Members
from gpucoll.kernels.cpu.addresses import (
    INTO_SLOT,
    OUT_OF_PEER,
    OUT_OF_SLOT,
    PLAIN,
    POSTED,
    copy_kernel,
    refill_kernel,
    string_copy_kernel,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import wait_long
from gpucoll.transport.shared.layout import NEVER, SMALL_BYTES
from gpucoll.transport.shared.peer_arena import map_more
from gpucoll.transport.shared.room import take_memory
from gpucoll.transport.shared.words import CONTEXT_WORDS, Context


def new_context(
    members: Members, tables: npt.NDArray[np.int64], waiting: tuple[int, int]
) -> npt.NDArray[np.int64]:
    """Return the context of this rank.

    Parameters
    ----------
    members : Members
        What the ranks share.
    tables : array
        Room for every rank's source and destination; must live as long as the context.
    waiting : (int, int)
        How often a wait spins, and yields, before it sleeps.
    """
    # Not NumPy's memory: that may be shared with a forked child, which writes to these words.
    words = bytearray(8 * CONTEXT_WORDS)
    context: npt.NDArray[np.int64] = np.frombuffer(words, np.int64)
    for field, value in _values(members, tables, waiting).items():
        context[field] = value
    return context


def _values(
    members: Members, tables: npt.NDArray[np.int64], waiting: tuple[int, int]
) -> dict[Context, int]:
    tuning, place = members.tuning, members.layout
    string_copy = string_copy_kernel() if tuning.string_copies else None
    base = members.segment.address
    start = tuning.initial_sequence
    return {
        Context.RANK: members.rank,
        Context.WORLD_SIZE: members.world_size,
        Context.SEQUENCE: start,
        Context.VERIFIED: start,
        Context.CHUNK: start,
        Context.SPINS: waiting[0],
        Context.FULL_SPINS: waiting[0],
        Context.CPUS: base + place.cpus,
        Context.YIELDS: waiting[1],
        Context.EVENT_LINE: base,
        Context.STATUS_LINES: base + place.status_lines,
        Context.FILLED: base + place.filled,
        Context.READ: base + place.read,
        Context.RECORDS: base + place.records,
        Context.ENQUEUED_LINES: base + place.enqueued_lines,
        Context.ENQUEUED: base + place.enqueued,
        Context.ENQUEUED_COUNT: tuning.enqueued_records,
        Context.SLOTS: base + place.slots,
        Context.PAYLOAD_STRIDE: place.payload_stride,
        Context.ONE_SHOT_BYTES: tuning.one_shot_bytes,
        Context.STAGES: base + place.stages,
        Context.CHUNK_BYTES: tuning.chunk_bytes,
        Context.SYMMETRIC_MIN_BYTES: tuning.symmetric_min_bytes,
        Context.PREFETCH_BYTES: tuning.prefetch_bytes,
        Context.ARENAS: members.arenas.ctypes.data,
        Context.ARENA_BASE: members.arena.mapping.address,
        Context.ARENA_BYTES: members.arena.size_bytes,
        Context.SOURCES: tables[0].ctypes.data,
        Context.DESTINATIONS: tables[1].ctypes.data,
        Context.BELLS: base + place.bells,
        Context.MAILBOXES: base + place.mailboxes,
        Context.MAILBOX_STRIDE: place.mailbox_stride,
        Context.POST_BYTES: layout.POST_BYTES,
        Context.OPENED: base + place.opened,
        Context.ACKNOWLEDGED: base + place.acknowledged,
        Context.LARGE_RING_BYTES: place.large_ring_bytes,
        Context.EAGER_ROOM_BYTES: tuning.eager_room_bytes,
        Context.EAGER_BYTES: place.eager_bytes,
        Context.PIDS: members.pid_table.ctypes.data,
        Context.ROOTED_BYTES: tuning.rooted_bytes,
        Context.SINGLE_COPY_MIN_BYTES: tuning.single_copy_min_bytes,
        Context.SINGLE_COPY_MAX_BYTES: tuning.single_copy_max_bytes,
        Context.GATHER_COPY_MAX_BYTES: tuning.gather_copy_max_bytes,
        Context.POLL_FDS: members.poll_table.ctypes.data,
        Context.WAIT_LONG: wait_long.address,
        Context.COPY_PLAIN: copy_kernel(PLAIN),
        Context.COPY_POSTED: string_copy or copy_kernel(POSTED),
        Context.COPY_IN: copy_kernel(INTO_SLOT),
        Context.COPY_OUT: copy_kernel(OUT_OF_SLOT),
        Context.REFILL: refill_kernel(),
        Context.COPY_TAKE: copy_kernel(OUT_OF_PEER),
        Context.SEGMENT_FD: members.segment_fd,
        Context.ROOM_BYTES: members.room_bytes,
        Context.PAYLOADS: base + place.payloads,
        Context.READY_BYTES: SMALL_BYTES if members.world_size > 1 else NEVER,
        Context.READY_PAYLOADS: SMALL_BYTES,
        Context.MAKE_READY: take_memory.address,
        Context.MAP_MORE: map_more.address,
        Context.COPY_EXCHANGED: string_copy or copy_kernel(OUT_OF_PEER),
        Context.ROOT_COPY_MIN_BYTES: tuning.root_copy_min_bytes,
    }
