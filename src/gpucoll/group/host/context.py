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
    streaming_copy_kernel,
    string_copy_kernel,
)
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.filling import ALWAYS
from gpucoll.transport.shared.flags import wait_long
from gpucoll.transport.shared.layout import NEVER, SMALL_BYTES
from gpucoll.transport.shared.peer_memory import map_more
from gpucoll.transport.shared.room import take_memory
from gpucoll.transport.shared.spans import note_arrival, note_end, note_message
from gpucoll.transport.shared.words import Context


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
    words = bytearray(Context.n_bytes)
    context: npt.NDArray[np.int64] = np.frombuffer(words, np.int64)
    for field, value in _values(members, tables, waiting).items():
        context[field] = value
    return context


def _values(
    members: Members, tables: npt.NDArray[np.int64], waiting: tuple[int, int]
) -> dict[int, int]:
    tuning, place = members.tuning, members.layout
    string_copy = string_copy_kernel() if tuning.string_copies else None
    base = members.segment.address
    start = tuning.initial_sequence
    return {
        Context.rank: members.rank,
        Context.world_size: members.world_size,
        Context.sequence: start,
        Context.verified: start,
        Context.chunk: start,
        Context.spins: waiting[0],
        Context.full_spins: waiting[0],
        Context.cpus: base + place.cpus,
        Context.yields: waiting[1],
        Context.event_line: base,
        Context.status_lines: base + place.status_lines,
        Context.filled: base + place.filled,
        Context.read: base + place.read,
        Context.records: base + place.records,
        Context.enqueued_lines: base + place.enqueued_lines,
        Context.enqueued: base + place.enqueued,
        Context.enqueued_count: tuning.enqueued_records,
        Context.slots: base + place.slots,
        Context.payload_stride: place.payload_stride,
        Context.one_shot_bytes: tuning.one_shot_bytes,
        Context.stages: base + place.stages,
        Context.chunk_bytes: tuning.chunk_bytes,
        Context.n_stages: tuning.n_stages,
        Context.symmetric_min_bytes: tuning.symmetric_min_bytes,
        Context.prefetch_bytes: tuning.prefetch_bytes,
        Context.arenas: members.arenas.ctypes.data,
        Context.arena_base: members.arena.mapping.address,
        Context.arena_bytes: members.arena.size_bytes,
        Context.sources: tables[0].ctypes.data,
        Context.destinations: tables[1].ctypes.data,
        Context.bells: base + place.bells,
        Context.mailboxes: base + place.mailboxes,
        Context.mailbox_stride: place.mailbox_stride,
        Context.post_bytes: layout.POST_BYTES,
        Context.opened: base + place.opened,
        Context.acknowledged: base + place.acknowledged,
        Context.large_ring_bytes: place.large_ring_bytes,
        Context.eager_room_bytes: tuning.eager_room_bytes,
        Context.streamed_bytes: tuning.streamed_bytes,
        Context.fetched_min_bytes: tuning.fetched_min_bytes,
        Context.eager_bytes: place.eager_bytes,
        Context.pids: members.pid_table.ctypes.data,
        Context.rooted_bytes: tuning.rooted_bytes,
        Context.single_copy_min_bytes: tuning.single_copy_min_bytes,
        Context.single_copy_max_bytes: tuning.single_copy_max_bytes,
        Context.gather_copy_max_bytes: tuning.gather_copy_max_bytes,
        Context.poll_fds: members.poll_table.ctypes.data,
        Context.wait_long: wait_long.address,
        Context.copy_nontemporal: streaming_copy_kernel() if tuning.nontemporal_fills else 0,
        Context.nontemporal_left: NEVER if tuning.nontemporal_fills == ALWAYS else 0,
        Context.copy_plain: copy_kernel(PLAIN),
        Context.copy_posted: string_copy or copy_kernel(POSTED),
        Context.copy_in: copy_kernel(INTO_SLOT),
        Context.copy_out: copy_kernel(OUT_OF_SLOT),
        Context.refill: refill_kernel(),
        Context.copy_take: copy_kernel(OUT_OF_PEER),
        Context.segment_fd: members.segment_fd,
        Context.room_bytes: members.room_bytes,
        Context.payloads: base + place.payloads,
        Context.ready_bytes: SMALL_BYTES if members.world_size > 1 else NEVER,
        Context.ready_payloads: SMALL_BYTES,
        Context.make_ready: take_memory.address,
        Context.map_more: map_more.address,
        Context.copy_exchanged: string_copy or copy_kernel(OUT_OF_PEER),
        Context.root_copy_min_bytes: tuning.root_copy_min_bytes,
        Context.spans: base + place.spans + members.rank * layout.SPANS_BYTES,
        Context.note_arrival: note_arrival.address,
        Context.note_end: note_end.address,
        Context.note_message: note_message.address,
    }
