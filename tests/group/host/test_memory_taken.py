"""What a communicator takes of the host's memory grows with what it is used for."""

from __future__ import annotations

import os
import re
import resource

import numpy as np
import pytest

from gpucoll.errors import RendezvousError, SharedMemoryError
from gpucoll.group.host import segment_room
from gpucoll.transport.shared.layout import RING, STAGES
from gpucoll.transport.shared.words import Context

KIB = 1024
NEW_BYTES = 32 * KIB
"""What a rank takes of a segment that is not used yet, at most."""


def taken_bytes(comm):
    """What the segment takes; alike on all ranks."""
    comm.barrier()
    taken = comm._group.members.segment_bytes
    comm.barrier()
    return taken


def take_in_steps(comm):
    """What each step takes more, for each rank."""
    unused = comm.duplicate()
    found, before = [], 0
    for elements in (0, 1, 112, 1024, comm._group.members.tuning.one_shot_bytes // 4, 1 << 18):
        if elements:
            data = np.ones(elements, np.float32)
            for _ in range(3):
                unused.all_reduce(data, out=data)
        taken = taken_bytes(unused)
        found.append((taken - before) / unused.world_size)
        before = taken
    words = str(unused.describe())
    tuning = unused._group.members.tuning
    unused.close()
    return found, words, tuning.n_stages * tuning.chunk_bytes


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [2, 16, 64])
def test_memory_grows_with_use(ranks, world_size):
    replies = ranks.call(world_size, take_in_steps)

    for (new, number, small, page, slot, large), words, stages_bytes in replies:
        assert new <= NEW_BYTES
        assert number == small == 0  # up to 448 bytes
        assert RING * 4 * KIB <= page <= RING * 8 * KIB + 4 * KIB
        assert slot <= RING * 68 * KIB
        assert large == stages_bytes
        assert "so far, of at most" in words


def broadcast_something_large(comm):
    before = taken_bytes(comm)
    comm.broadcast(np.zeros(1 << 20, np.float32), root=1)
    return taken_bytes(comm) - before, comm._group.members.tuning.chunk_bytes


def test_who_sends_nothing_takes_no_stages(ranks):
    for taken, chunk_bytes in ranks.call(4, broadcast_something_large):
        assert taken == STAGES * chunk_bytes


def count_duplicates(comm):
    before = len(os.listdir("/proc/self/fd"))
    made = [comm.duplicate() for _ in range(100)]
    taken = sum(taken_bytes(one) for one in made)
    descriptors = len(os.listdir("/proc/self/fd")) - before
    total = made[-1].all_reduce(1)
    for one in made:
        one.close()
    return taken, descriptors, total, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.soak
def test_a_hundred_duplicates_of_sixteen_ranks(ranks):
    for taken, descriptors, total, left in ranks.call(16, count_duplicates):
        assert taken <= 100 * 16 * NEW_BYTES
        assert descriptors == 100
        assert total == 16
        assert left == 0


def start(comm):
    return taken_bytes(comm), comm.all_reduce(1)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [64, 128])
def test_many_ranks_start(rank_server, world_size):
    with rank_server.fork(world_size) as pool:
        for taken, total in pool.call(start, timeout_s=60.0):
            assert taken <= world_size * NEW_BYTES
            assert total == world_size


def meet_with_few_descriptors(seat):
    in_use = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 10, limits[1]))
    try:
        seat.init()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_few_descriptors(rank_server):
    with rank_server.fork(4) as pool:
        pool.start(meet_with_few_descriptors, gives="seat")
        for rank, reply in enumerate(pool.collect()):
            assert isinstance(reply.error, RendezvousError)
            found = re.fullmatch(
                f"rank {rank} of 4: 4 ranks take ([0-9]+) file descriptors while they meet "
                r"\(([0-9]+) are open already\), and the limit of this process is ([0-9]+): "
                "raise it with ulimit -n",
                str(reply.error),
            )
            assert found is not None
            needed, in_use, limit = map(int, found.groups())
            assert needed == in_use + 3 * 4 + 3 > limit


# --- where there is none --------------------------------------------------------------------------


def call_without_room(comm, elements, way):
    """Make a call for which there is no memory; then one that needs none; then again with room."""
    data = np.ones(elements, np.float32)
    context, free = comm._group.context, vars(segment_room)["free_memory_bytes"]
    granted = int(context[Context.room_bytes])
    plan = comm.plan_all_reduce(data, out=np.empty_like(data))
    calls = {
        "entry": lambda: comm.all_reduce(data),
        "plan": plan,
        "asynchronous": lambda: comm.all_reduce(data, async_op=True).wait(),
        "counts": lambda: comm.all_to_all(
            data[: comm.world_size],
            send_counts=[1] * comm.world_size,
            recv_counts=[1] * comm.world_size,
        ),
    }
    if way == "entry":
        comm.all_reduce(data[:2])  # the compiled entry knows the dtype
    vars(segment_room)["free_memory_bytes"] = lambda: 4 * KIB
    context[Context.room_bytes] = 0
    texts = []
    try:
        for _ in range(2):
            with pytest.raises(SharedMemoryError) as raised:
                calls[way]()
            texts.append(str(raised.value))
        small = comm.all_reduce(1)
    finally:
        vars(segment_room)["free_memory_bytes"] = free
    result = calls[way]()  # asks anew
    assert granted > 0
    return texts, small, float(np.sum(result))


@pytest.mark.parametrize("way", ["entry", "plan", "asynchronous", "counts"])
@pytest.mark.parametrize("elements", [1024, 1 << 18])
def test_a_call_without_room_is_an_error_of_its_own(ranks, elements, way):
    total = 3 if way == "counts" else 3 * elements
    for rank, (texts, small, result) in enumerate(ranks.call(3, call_without_room, elements, way)):
        for text in texts:
            assert f"rank {rank} of 3: no shared memory for the next part" in text
            assert "but 0.0 MiB are free" in text
        assert small == 3
        assert result == total


def find_out_late(comm):
    """An all_reduce of arrays of which rank 0's alone is no shared one, so that all need stages."""
    data = np.ones(4096, np.float32) if comm.rank == 0 else comm.empty(4096)
    data[:] = 1
    comm.all_reduce(np.ones(4096, np.float32))  # payloads of this size have memory now
    if comm.rank == 1:
        comm._group.context[Context.segment_fd] = -1
    with pytest.raises(SharedMemoryError) as raised:
        comm.all_reduce(data, out=data)
    comm._group.context[Context.segment_fd] = comm._group.members.segment_fd
    return str(raised.value)


def test_room_that_is_missing_in_the_call_breaks_the_communicator(ranks):
    for text in ranks.call(3, find_out_late):
        assert "no shared memory for the stages of rank 1" in text
        assert "is broken" in text


def mix_shared_and_private(comm):
    data = np.ones(4096, np.float32) if comm.rank == 0 else comm.empty(4096)
    data[:] = 1
    comm.all_reduce(data, out=data)
    gathered = comm.all_gather(data)
    return set(data.tolist()), set(gathered.tolist())


def test_stages_that_are_needed_late(ranks):
    assert ranks.call(3, mix_shared_and_private) == [({3.0}, {3.0})] * 3
