"""Connections for large arrays: opening them, and what ends a transfer in its middle."""

from __future__ import annotations

import contextlib
import os
import signal
import socket

import numpy as np
import pytest
from tests.ranks import Ended, Reply
from tests.rendezvous.conftest import held_open

from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError

LARGE = 1 << 22
"""Elements: more than sockets and their buffers hold."""


@pytest.fixture
def hosts(hosts_with_schedules):
    """Hosts between which all but small calls go by schedules."""
    return hosts_with_schedules


def add(comm, count=LARGE):
    total = comm.all_reduce(np.ones(count, np.float32))
    return float(total[0]), float(total[-1])


# --- calls that do not fit ------------------------------------------------------------------------


def differ_then_add(comm, odd):
    found = [add(comm)]
    with pytest.raises(MismatchError) as caught:
        comm.all_reduce(np.ones(LARGE + (comm.rank == odd), np.float32))
    return [*found, add(comm)], str(caught.value)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(("placed", "odd"), [("ab", 1), ("aabb", 0), ("aabb", 3), ("abc", 2)])
def test_a_mismatch_leaves_them_usable(hosts, placed, odd):
    replies = hosts.call(placed, differ_then_add, odd)

    for found, text in replies:
        assert found == [(len(placed), len(placed))] * 2
        assert f"rank {odd} called" in text


def written_by_a_mismatch(comm, odd):
    out = np.full(LARGE, 7, np.float32)
    with pytest.raises(MismatchError):
        comm.broadcast(out if comm.rank != odd else out[:-1], root=0)
    return set(out)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("odd", [1, 2])
def test_a_mismatch_writes_nothing(hosts, odd):
    assert hosts.call("aab", written_by_a_mismatch, odd) == [{7.0}] * 3


# --- the end of a rank ----------------------------------------------------------------------------


def in_the_middle(comm, what):
    """Have this leader do something once a transfer is under way: `what` is called, and raises."""
    add(comm, 100_000)
    streams = comm._group.bulk._streams

    def let(ready):
        type(streams).let(streams, ready)
        what()
        raise AssertionError("what was to be done has not ended this")

    streams.let = let


def be_killed(comm, victim):
    if comm.rank == victim:
        in_the_middle(comm, lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        add(comm, 100_000)
    with pytest.raises(PeerLostError) as caught:
        add(comm)
    return str(caught.value)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(("placed", "victim"), [("ab", 0), ("ab", 1), ("aabbc", 2), ("abcd", 3)])
def test_a_leader_killed_while_data_moves(hosts, placed, victim):
    replies = hosts.replies(placed, be_killed, victim)

    assert isinstance(replies[victim], Ended)
    for rank, reply in enumerate(replies):
        if rank != victim:
            assert isinstance(reply, Reply)
            assert reply.error is None, reply.trace
            assert f"lost rank {victim}" in reply.result
            assert f"rank {rank} of {len(placed)}" in reply.result


def be_interrupted(comm, victim):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    if comm.rank == victim:
        in_the_middle(comm, interrupt)
    else:
        add(comm, 100_000)
    with pytest.raises((KeyboardInterrupt, AbortedError)) as caught:
        add(comm)
    return caught.type, str(caught.value), bool(comm._group.bulk and comm._group.bulk._ends.sockets)


@pytest.mark.parametrize("placed", ["ab", "aab", "abc"])
def test_an_interrupt_while_data_moves(hosts, placed):
    victim = placed.index("b")

    replies = hosts.call(placed, be_interrupted, victim)

    for rank, (kind, text, ends) in enumerate(replies):
        assert kind is (KeyboardInterrupt if rank == victim else AbortedError)
        assert rank == victim or f"rank {victim}" in text
        assert not ends


def interrupted_by_a_timer(comm):
    """Rank 0 sends nothing; rank 1's signal comes while its compiled loop waits."""
    group = comm._group
    add(comm, 100_000)
    if comm.rank == 0:
        group.bulk._streams.begin = lambda *_, **__: wait_for_the_end(group)
    else:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        begin = group.bulk._streams.begin

        def begin_and_be_interrupted(*arguments, **options):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return begin(*arguments, **options)

        group.bulk._streams.begin = begin_and_be_interrupted
    with pytest.raises((KeyboardInterrupt, AbortedError)) as caught:
        add(comm)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return caught.type


def test_an_interrupt_of_who_waits_for_data(hosts):
    assert hosts.call("ab", interrupted_by_a_timer) == [AbortedError, KeyboardInterrupt]


def wait_too_long(comm):
    """Rank 1 sends nothing."""
    group = comm._group
    add(comm, 100_000)
    if comm.rank == 1:
        group.bulk._streams.begin = lambda *_, **__: wait_for_the_end(group)
    group.timeout_s = 0.3 if comm.rank == 0 else 20.0
    with pytest.raises(DeadlineError) as caught:
        add(comm)
    return str(caught.value)


def test_a_transfer_that_takes_too_long(hosts):
    first, second = hosts.call("ab", wait_too_long)

    assert "waited 0.3 s in all_reduce" in first
    assert "rank 1 of 2" in second


def wait_for_the_end(group):
    group.links.wait(lambda: group.is_aborted, 20)
    group.raise_if_aborted()


def end_without_a_word(comm):
    """Rank 1 closes its connections, and its links say nothing."""
    group = comm._group
    if comm.rank == 1:

        def close():
            group.bulk.close_connections()
            wait_for_the_end(group)

        in_the_middle(comm, close)
    else:
        add(comm, 100_000)
    with pytest.raises(PeerLostError) as caught:
        add(comm)
    return str(caught.value)


@pytest.mark.soak
def test_connections_that_end_without_a_word(hosts):
    first, second, third = hosts.call("abb", end_without_a_word)

    assert first.startswith("rank 0 of 3 lost rank 1 (on ")
    assert "and the other rank there in all_reduce(op=sum, float32, shape (4194304,))" in first
    assert second.startswith("rank 1 of 3: rank 0 lost rank 1")
    assert third.startswith("rank 2 of 3: rank 0 lost rank 1")


def send_another_header(comm):
    add(comm, 100_000)
    if comm.rank == 1:
        streams = comm._group.bulk._streams
        begin = streams.begin

        def begin_another(rows, address, size, header, **options):
            begin(rows, address, size, (header[0], header[1] + 1, header[2]), **options)

        streams.begin = begin_another
    with pytest.raises(AbortedError) as caught:
        add(comm)
    return str(caught.value)


def test_bytes_of_another_call(hosts):
    found = hosts.call("ab", send_another_header)

    assert any("sent bytes of another call than all_reduce(op=sum" in text for text in found)


# --- opening --------------------------------------------------------------------------------------


def add_beside_strangers(comm, silent):
    """Let silent strangers come to every leader's port before the first large array."""
    strangers = []
    if comm.rank == 0:
        for address in comm._group.bulk._lanes[0].addresses:
            for number in range(silent):
                end = socket.socket()
                strangers.append(end)
                end.setblocking(False)  # the queue of who asks to connect may be full
                end.connect_ex(tuple(address))
                if number % 2:
                    with contextlib.suppress(OSError):
                        end.send(b"GET / HTTP/1.0\r\n\r\n")
    comm.barrier()
    try:
        return add(comm)
    finally:
        for end in strangers:
            end.close()


@pytest.mark.parametrize("count", [20, 500])
def test_strangers_hold_nothing_up(hosts, count):
    assert hosts.call("abc", add_beside_strangers, count) == [(3, 3)] * 3


def never_connect(comm):
    """Rank 1 does not open what the first large array needs."""
    group = comm._group
    if comm.rank == 1:
        group.bulk.connect = lambda *_: wait_for_the_end(group)
    group.timeout_s = 0.3 if comm.rank == 0 else 20.0
    with pytest.raises(DeadlineError) as caught:
        add(comm)
    return str(caught.value)


def test_a_host_that_does_not_connect(hosts):
    first, second = hosts.call("ab", never_connect)

    assert first.startswith("rank 0 of 2 waited in all_reduce(op=sum, float32, shape (4194304,))")
    assert "has no connection with" in first
    assert "does a firewall between the hosts allow TCP between ranks" in first
    assert second.startswith("rank 1 of 2: ")


def open_and_close(seat):
    found = []
    for _ in range(2):
        comm = seat.init()
        add(comm, 100_000)
        comm.close()
        found.append(held_open())
    return found


def test_nothing_stays_open(hosts):
    for first, second in hosts.call("aab", open_and_close, gives="seat"):
        assert first == second
        assert not any("socket" in name for name in set(second) - set(first))


def fork_a_child(comm):
    add(comm, 100_000)
    bulk = comm._group.bulk
    numbers = [end.fileno() for end in bulk._ends.sockets.values()]
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        still = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]
        os.write(writing, b"%d" % len(still))
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(reading, 10)
    os.close(reading)
    os.close(writing)
    return said, add(comm, 100_000)


def test_a_forked_child_keeps_none(hosts):
    assert hosts.call("ab", fork_a_child) == [(b"0", (2, 2))] * 2
