"""A segment for which there is no room is refused before the kernel kills a process for it."""

from __future__ import annotations

import pytest
from tests.ranks import Reply

from gpucoll.errors import RendezvousError
from gpucoll.group.host import segment_room
from gpucoll.transport.shared.layout import NEVER, SegmentLayout, Tuning

TUNING = Tuning(65536, 131072, 2048, 65536, 65536, 1 << 20, 1 << 19, 1024, 0, 256)
LAYOUT = SegmentLayout(64, TUNING)


def test_room(monkeypatch):
    monkeypatch.setattr(segment_room, "free_memory_bytes", lambda: 2 * LAYOUT.first_bytes)
    assert segment_room.check_room(LAYOUT) == 2 * LAYOUT.first_bytes // 16 // 64


def test_where_the_kernel_does_not_say(monkeypatch):
    monkeypatch.setattr(segment_room, "free_memory_bytes", lambda: None)
    assert segment_room.check_room(LAYOUT) == NEVER


def test_not_all_that_is_free(monkeypatch):
    monkeypatch.setattr(segment_room, "free_memory_bytes", lambda: LAYOUT.first_bytes)
    with pytest.raises(MemoryError):
        segment_room.check_room(LAYOUT)


def test_no_room(monkeypatch):
    monkeypatch.setattr(segment_room, "free_memory_bytes", lambda: 1 << 20)
    with pytest.raises(MemoryError) as raised:
        segment_room.check_room(LAYOUT)
    needed = f"64 ranks need {LAYOUT.first_bytes / 2**20:.1f} MiB, but 1.0 MiB are free"
    for text in ("fewer ranks", needed):
        assert text in str(raised.value)


def join_without_room(seat):
    if seat.rank == 0:
        vars(segment_room)["free_memory_bytes"] = lambda: 1 << 20
        # The kernel would be asked for more than any machine has.
        type.__setattr__(SegmentLayout, "first_bytes", property(lambda layout: 1 << 45))
    with seat.init(5.0) as comm:
        return comm.rank


def test_every_rank_is_told(rank_server):
    with rank_server.fork(3) as pool:
        pool.start(join_without_room, gives="seat")
        replies = pool.collect()
    assert all(isinstance(reply, Reply) for reply in replies), replies
    errors = [reply.error for reply in replies]
    assert isinstance(errors[0], MemoryError)
    assert all(isinstance(error, RendezvousError) for error in errors[1:])
    assert all("3 ranks need 33554432.0 MiB, but 1.0 MiB are free" in str(e) for e in errors)
