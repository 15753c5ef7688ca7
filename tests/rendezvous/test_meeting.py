"""Ranks that cannot meet, or may not: everyone is told why, and nobody waits for ever."""

from __future__ import annotations

import os
import resource
import socket
import struct
from pathlib import Path

import pytest

from gpucoll.errors import (
    ArgumentError,
    AuthenticationError,
    DeadlineError,
    RendezvousDeadlineError,
    RendezvousError,
)
from gpucoll.group.host import joining
from gpucoll.rendezvous import frames
from gpucoll.transport.shared import MAX_RANKS


def join(seat, timeout_s=20.0, changes=None):
    """Make a communicator; `changes` are this rank's differing arguments, by rank."""
    with seat.init(timeout_s, **(changes or {}).get(seat.rank, {})) as comm:
        return comm.all_reduce(1)


def test_ranks_meet(fresh):
    assert fresh(4, join) == [4] * 4


def meet_often(seat):
    totals = []
    for _ in range(5):
        with seat.init() as comm:
            totals.append(comm.all_reduce(comm.rank))
    return totals


def test_init_may_be_called_again(fresh):
    assert fresh(3, meet_often) == [[3] * 5] * 3


@pytest.mark.parametrize(("present", "missing"), [([0, 1], "rank 2 "), ([0], "ranks 1, 2 ")])
def test_a_missing_rank_is_named(fresh, present, missing):
    for error in fresh(3, join, 0.4, only=present):
        assert isinstance(error, RendezvousDeadlineError)
        assert isinstance(error, DeadlineError)
        assert f"{missing}did not come" in str(error)


def test_a_missing_rank_0_is_named(fresh):
    for rank, error in zip((1, 2), fresh(3, join, 0.3, only=[1, 2]), strict=True):
        assert isinstance(error, RendezvousError)
        assert f"rank {rank} of 3 waited 0.3 s for rank 0" in str(error)


def test_two_processes_with_one_rank(fresh):
    errors = fresh(3, join, 2.0, {2: {"rank": 1}})

    assert all(isinstance(error, RendezvousError) for error in errors)
    assert all("two processes claim to be rank 1" in str(error) for error in errors)
    assert all("init(name=...)" in str(error) for error in errors)


def test_two_processes_as_rank_0(fresh):
    errors = fresh(2, join, 0.5, {1: {"rank": 0}})

    assert all(isinstance(error, RendezvousError) for error in errors)
    assert any("cannot take the job's socket" in str(error) for error in errors)
    assert any("a name of its own: init(name=...)" in str(error) for error in errors)


def test_different_world_sizes(fresh):
    errors = fresh(3, join, 1.5, {1: {"world_size": 4}})

    assert all(isinstance(error, RendezvousError) for error in errors)
    assert all("world_size is 4 on rank 1 and 3 on rank 0" in str(error) for error in errors)


def join_as_other(seat, name, value):
    if seat.rank == 1:
        setattr(joining, name, value)
    return join(seat, 1.5)


def test_different_versions(fresh):
    errors = fresh(3, join_as_other, "__version__", "0.0.0-other")

    assert all(isinstance(error, RendezvousError) for error in errors)
    assert "the version of gpucoll is 0.0.0-other on rank 1" in str(errors[0])
    assert all("0.0.0-other" in str(error) for error in errors)  # late ranks hear it too


def test_more_ranks_than_a_segment_allows(fresh):
    errors = fresh(2, join, 5.0, {rank: {"world_size": MAX_RANKS + 1} for rank in range(2)})

    for error in errors:
        assert isinstance(error, ArgumentError)
        assert f"allows {MAX_RANKS}" in str(error)


def join_with_little_memory(seat):
    """Rank 0 may not make files, and so no shared memory, of the segment's size."""
    with seat.init():
        pass  # the arena is there now
    if seat.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    return join(seat, 5.0)


def test_no_memory_for_the_segment(fresh):
    errors = fresh(3, join_with_little_memory)

    assert isinstance(errors[0], MemoryError)
    for error in errors:
        assert "no shared memory for gpucoll-segment" in str(error)
    assert all(isinstance(error, RendezvousError) for error in errors[1:])


def join_without_address_space(seat):
    with seat.init():
        pass
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 65536, resource.RLIM_INFINITY))
    return join(seat, 5.0)


def test_no_address_space(fresh):
    (error,) = fresh(1, join_without_address_space)

    assert isinstance(error, MemoryError)


# --- environment --------------------------------------------------------------------------------

WRONG = {
    "unknown name": ("GPUCOLL_CPU_TUNING", "chunk=4096", "GPUCOLL_CPU_TUNING names 'chunk'"),
    "no number": ("GPUCOLL_CPU_TUNING", "chunk_bytes=big", "GPUCOLL_CPU_TUNING"),
    "odd chunk": ("GPUCOLL_CPU_TUNING", "chunk_bytes=5000", "multiple of 4096"),
    "no chunk": ("GPUCOLL_CPU_TUNING", "chunk_bytes=0", "multiple of 4096"),
    "huge slot": ("GPUCOLL_CPU_TUNING", "one_shot_bytes=2097152", "one_shot_bytes"),
    "huge chunk": ("GPUCOLL_CPU_TUNING", f"chunk_bytes={1 << 40}", f"in 0..{64 << 20}"),
    "chunk of no word": (
        "GPUCOLL_CPU_TUNING",
        f"chunk_bytes={1 << 64}",
        "got 18446744073709551616",
    ),
    "size of no word": ("GPUCOLL_CPU_TUNING", f"symmetric_min_bytes={1 << 63}", "in 0..46116860"),
    "negative": ("GPUCOLL_CPU_TUNING", f"single_copy_min_bytes={-1 << 70}", "single_copy_min"),
    "prefetch": ("GPUCOLL_CPU_TUNING", f"prefetch_bytes={1 << 32}", "prefetch_bytes must be in"),
    "a billion records": ("GPUCOLL_CPU_TUNING", f"enqueued_records={1 << 30}", "in 0..65536"),
    "no power of two": ("GPUCOLL_CPU_TUNING", "enqueued_records=3", "power of two"),
    "sequence": ("GPUCOLL_CPU_TUNING", f"initial_sequence={1 << 31}", "initial_sequence must be"),
}


@pytest.mark.soak(quick=9)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_tuning(fresh, name):
    variable, value, text = WRONG[name]
    errors = fresh(2, join, 5.0, environment={variable: value})

    assert isinstance(errors[0], ArgumentError), errors[0]
    assert isinstance(errors[1], RendezvousError)
    assert all(text in str(error) for error in errors)


def join_by_environment(seat):
    import gpucoll

    with gpucoll.init():
        return


@pytest.mark.parametrize("name", ["GPUCOLL_TIMEOUT_S", "GPUCOLL_ARENA_BYTES"])
@pytest.mark.parametrize("value", ["soon", "-5", "", "nan", "inf", "1e300"])
def test_wrong_numbers(fresh, name, value):
    (error,) = fresh(1, join_by_environment, environment={name: value})

    assert isinstance(error, ArgumentError), repr(error)
    assert name in str(error)


# --- strangers ----------------------------------------------------------------------------------


class OtherUsersSocket(socket.socket):
    def getsockopt(self, *arguments):
        return struct.pack("iII", 4711, 12345, 12345)


def test_another_users_process_is_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs, OtherUsersSocket(fileno=theirs.detach()) as stranger:
        with pytest.raises(AuthenticationError, match="process 4711 of user 12345"):
            frames.peer_process(stranger)
        assert frames.peer_process(ours) == os.getpid()
