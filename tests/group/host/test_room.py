"""Memory for a part of the segment is taken when it is first used, and refused with an error."""

from __future__ import annotations

import ctypes
import os
import signal

import numpy as np
import pytest

from gpucoll.errors import SharedMemoryError
from gpucoll.group.host import segment_room
from gpucoll.transport.shared import mapping, room
from gpucoll.transport.shared.layout import NEVER
from gpucoll.transport.shared.words import Context, Status

MIB = 1 << 20
SIZE_BYTES = 256 * MIB


class Sparse:
    """A sparse segment, and the context through which parts of it are reserved."""

    def __init__(self):
        self.fd = mapping.create("gpucoll-test", SIZE_BYTES)
        self.mapping = mapping.Mapping(self.fd, SIZE_BYTES)
        self.context = np.zeros(Context.n_words, np.int64)
        self.context[Context.segment_fd] = self.fd
        self.context[Context.event_line] = self.mapping.address
        self.context[Context.room_bytes] = NEVER
        self.context[Context.rank], self.context[Context.world_size] = 1, 4

    def reserve(self, offset, size_bytes):
        address = self.mapping.address + offset
        return room.reserve_part.ctypes(self.context.ctypes.data, address, size_bytes)

    @property
    def taken_bytes(self):
        return os.fstat(self.fd).st_blocks * 512


@pytest.fixture
def sparse():
    made = Sparse()
    yield made
    made.mapping.unmap()
    os.close(made.fd)


def test_a_part_is_reserved_and_nothing_else(sparse):
    assert sparse.taken_bytes == 0
    assert sparse.reserve(5 * MIB, 3 * MIB) == Status.OK
    assert sparse.taken_bytes == 3 * MIB
    assert sparse.reserve(5 * MIB + 100, 200) == Status.OK
    assert sparse.taken_bytes == 3 * MIB
    assert sparse.reserve(100, 4096) == Status.OK  # whole pages around it
    assert sparse.taken_bytes == 3 * MIB + 2 * mapping.PAGE_BYTES


def test_what_is_there_stays(sparse):
    bytes_there = (ctypes.c_uint8 * MIB).from_address(sparse.mapping.address + MIB)
    words = np.ctypeslib.as_array(bytes_there)
    words[:] = 7
    assert sparse.reserve(0, 4 * MIB) == Status.OK
    assert (words == 7).all()


def test_signals_do_not_end_it(sparse):
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while not came:
            assert sparse.reserve(0, SIZE_BYTES) == Status.OK
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert sparse.taken_bytes == SIZE_BYTES


def test_beyond_what_was_granted(sparse, monkeypatch):
    sparse.context[Context.room_bytes] = MIB
    assert sparse.reserve(0, MIB) == Status.OK
    assert sparse.reserve(MIB, MIB) == Status.NO_ROOM
    assert sparse.taken_bytes == MIB
    monkeypatch.setattr(segment_room, "free_memory_bytes", lambda: 64 * MIB)
    segment_room.make_room(sparse.context)
    assert sparse.context[Context.room_bytes] == MIB + 64 * MIB // 16 // 4
    assert sparse.reserve(MIB, MIB) == Status.OK
    assert sparse.reserve(2 * MIB, MIB) == Status.OK
    assert sparse.taken_bytes == 3 * MIB


def test_where_the_kernel_does_not_say_what_is_free(sparse, monkeypatch):
    sparse.context[Context.room_bytes] = 0
    assert sparse.reserve(0, MIB) == Status.NO_ROOM
    monkeypatch.setattr(segment_room, "free_memory_bytes", lambda: None)
    segment_room.make_room(sparse.context)
    assert sparse.reserve(0, MIB) == Status.OK


def test_no_room_on_the_host(sparse, monkeypatch):
    sparse.context[Context.room_bytes] = 0
    assert sparse.reserve(0, 3 * MIB) == Status.NO_ROOM
    monkeypatch.setattr(segment_room, "free_memory_bytes", lambda: 3 * MIB)
    with pytest.raises(SharedMemoryError) as raised:
        segment_room.make_room(sparse.context)
    for text in ("rank 1 of 4", "takes 3.0 MiB, but 3.0 MiB are free", "Free memory"):
        assert text in str(raised.value)
    assert isinstance(raised.value, MemoryError)
    assert sparse.context[Context.room_bytes] == 0


def test_the_kernel_refuses(sparse):
    assert sparse.reserve(SIZE_BYTES, MIB) == Status.NO_ROOM  # beyond the end, which is sealed
    with pytest.raises(SharedMemoryError) as raised:
        segment_room.make_room(sparse.context)
    assert f"1.0 MiB were refused ({os.strerror(1)})" in str(raised.value)
    assert sparse.taken_bytes == 0


def reserve_in_a_communicator(comm):
    context, members = comm._group.context, comm._group.members
    assert os.fstat(context[Context.segment_fd]).st_size == members.layout.size_bytes
    assert context[Context.room_bytes] > 0
    fd = int(context[Context.segment_fd])
    comm.duplicate().close()
    comm.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_communicator_keeps_its_descriptor(ranks):
    ranks.call(2, reserve_in_a_communicator)
