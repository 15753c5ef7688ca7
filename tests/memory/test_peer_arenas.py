"""Peers' arenas take address space as they are used, and a process is met once for all."""

from __future__ import annotations

import os
import resource
import threading

import numpy as np
import pytest

from gpucoll.errors import SharedMemoryError
from gpucoll.transport.shared.peer_memory import FIRST_BYTES

MIB = 1 << 20


def mapped_bytes(comm):
    """Address space of the peers' arenas."""
    own = comm._group.members.arena.mapping
    total = 0
    with open("/proc/self/maps") as file:
        for line in file:
            start, stop = (int(text, 16) for text in line.split()[0].split("-"))
            is_arena = "memfd:gpucoll-arena " in line
            if is_arena and stop - start < own.size_bytes:  # not that, nor a parent process's own
                total += stop - start
    return total


def use_more_and_more(comm):
    found = [mapped_bytes(comm)]
    sums = []
    kept = [comm.empty(MIB // 4) for _ in range(1 + comm.rank)]  # offsets differ
    for mib in (1, 3, 20):
        data = comm.empty((mib, MIB // 4))
        data[:] = comm.rank + 1
        comm.all_reduce(data, out=data)
        assert "symmetric" in str(comm.describe())
        sums.append(set(data.ravel().tolist()))
        gathered = comm.all_gather(data)
        sums.append(set(gathered.ravel().tolist()))
        found.append(mapped_bytes(comm))
        kept.append(data)
    again = comm.duplicate()
    again.all_reduce(data, out=data)
    assert mapped_bytes(again) == found[-1]
    again.close()
    assert mapped_bytes(comm) == found[-1]
    return found, sums


@pytest.mark.soak
def test_address_space_grows_with_use(ranks):
    for found, sums in ranks.call(3, use_more_and_more):
        first, *_, last = found
        assert first == 2 * FIRST_BYTES
        assert found == sorted(found)
        assert last <= 2 * (1 + 4 + 16 + 64) * FIRST_BYTES
        assert sums == [{6.0}] * 6


def send_from_an_arena(comm):
    data = comm.empty(10 * MIB)
    other = 1 - comm.rank
    data[:] = comm.rank
    out = np.empty_like(data)
    comm.send_recv(data, other, other, out=out)
    return float(out[0]), float(out[-1])


def test_messages_from_arenas(ranks):
    assert ranks.call(2, send_from_an_arena) == [(1.0, 1.0), (0.0, 0.0)]


def grow_in_several_threads(comm):
    """Communicators of several threads reach further at once."""
    comms = [comm.duplicate() for _ in range(4)]
    data = [comm.empty((4, MIB // 4 * (place + 1))) for place in range(4)]
    for array in data:
        array[:] = 1
    started, wrong = threading.Barrier(4), []

    def work(place):
        started.wait(20)
        for part in data[place]:
            comms[place].all_reduce(part, out=part)
        if set(data[place].ravel().tolist()) != {2.0}:
            wrong.append(place)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for made in comms:
        made.close()
    return wrong


@pytest.mark.soak
def test_threads_that_reach_further_at_once(ranks):
    assert ranks.call(2, grow_in_several_threads) == [[], []]


def run_out_of_addresses(comm):
    data = comm.empty(64 * MIB)
    data[:4] = 1
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if comm.rank == 1:
        with open("/proc/self/statm") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 16 * MIB, limits[1]))
    try:
        with pytest.raises(SharedMemoryError) as raised:
            comm.all_reduce(data, out=data)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return str(raised.value)


def test_no_address_space(ranks):
    for text in ranks.call(2, run_out_of_addresses):
        assert "rank 1 has no address space" in text
        assert "is broken" in text


def descriptors_of(comm):
    """Open descriptors before, with, and after twenty more communicators of the same ranks."""
    comm.barrier()
    counts = [len(os.listdir("/proc/self/fd"))]
    made = [comm.duplicate() for _ in range(10)]
    made += [comm.split(0, -comm.rank) for _ in range(10)]
    counts.append(len(os.listdir("/proc/self/fd")))
    for one in made:
        one.close()
    counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_each_communicator_takes_one_descriptor(ranks):
    for before, most, after in ranks.call(5, descriptors_of):
        assert most == before + 20
        assert after == before
