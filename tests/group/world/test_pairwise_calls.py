"""Calls of middle size between hosts, in which leaders send each other what each needs."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
from tests.faults.test_ends import errors
from tests.ranks import Ended
from tests.waiting import SOON_S, is_broken, until

from gpucoll import ReduceOp
from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError
from gpucoll.group.world.exchanges import LEAST_PAIRWISE_BYTES, MOST_PAIRWISE_BYTES
from gpucoll.transport.tcp.exchange_words import Peer, Route

COUNT = 150_000
"""Elements of 4 bytes: far more than an exchange brings to every host, far less than is large."""


def add(comm, count=COUNT):
    return float(comm.all_reduce(np.ones(count, np.float32))[-1])


def route(comm):
    return Route(comm._group.exchanges.words.route)


# --- the route ------------------------------------------------------------------------------------


def routes(comm, sizes):
    found = []
    for size in sizes:
        comm.all_reduce(np.ones(size, np.uint8))
        found.append(route(comm))
    return found


def test_sizes_that_are_pairwise(hosts):
    least = LEAST_PAIRWISE_BYTES // 3
    sizes = (least, least + 1, MOST_PAIRWISE_BYTES, MOST_PAIRWISE_BYTES + 1)

    found = hosts.call("abc", routes, sizes)

    assert found == [[Route.SMALL, Route.PAIRWISE, Route.PAIRWISE, Route.LARGE]] * 3


# --- bits -----------------------------------------------------------------------------------------


def inputs(world_size, dtype):
    random = np.random.default_rng(7)
    return [(100 * random.standard_normal(COUNT)).astype(dtype) for _ in range(world_size)]


def combined(comm, dtype):
    """Every kind of reduction of the same inputs, in bits that do not depend on their number."""
    world_size, rank = comm.world_size, comm.rank
    x = inputs(world_size, dtype)[rank]
    block = slice(rank * COUNT // world_size, (rank + 1) * COUNT // world_size)
    found = []
    for op in ("sum", "avg", "max", ReduceOp.scaled_sum(0.3)):
        whole = comm.all_reduce(x, op=op)
        assert route(comm) == Route.PAIRWISE
        in_place = x.copy()
        comm.all_reduce(in_place, op=op, out=in_place)
        assert in_place.tobytes() == whole.tobytes()
        if comm._group.hosts.is_in_order:  # otherwise it goes by schedules, host by host
            assert comm.reduce_scatter(x, op=op).tobytes() == whole[block].tobytes()
            assert route(comm) == Route.PAIRWISE
        reduced = comm.reduce(x, op=op, root=world_size - 1)
        if reduced is not None:
            assert reduced.tobytes() == whole.tobytes()
        found.append(whole.tobytes())
    return found


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("placed", ["ab", "abc", "aabb", "abab", "aaabcc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_the_bits_of_one_host(hosts, ranks, placed, dtype):
    found = hosts.call(placed, combined, dtype)

    assert found == [found[0]] * len(placed)
    alone = ranks.call(len(placed), combined_on_one_host, dtype)
    assert found[0] == alone[0]


def combined_on_one_host(comm, dtype):
    x = inputs(comm.world_size, dtype)[comm.rank]
    ops = ("sum", "avg", "max", ReduceOp.scaled_sum(0.3))
    return [comm.all_reduce(x, op=op).tobytes() for op in ops]


# --- what differs ---------------------------------------------------------------------------------


def differ(comm, odd):
    found = [add(comm)]
    out = np.full(COUNT, 7, np.float32)
    with pytest.raises(MismatchError) as caught:
        comm.all_reduce(np.ones(COUNT + (comm.rank == odd), np.float32), out=None)
    with pytest.raises(MismatchError):
        comm.broadcast(out if comm.rank != odd else out[:-1], root=0)
    return [*found, add(comm)], str(caught.value), set(out)


@pytest.mark.parametrize(("placed", "odd"), [("ab", 1), ("aabb", 0), ("aabb", 3), ("abc", 2)])
def test_a_mismatch_writes_nothing(hosts, placed, odd):
    for found, text, out in hosts.call(placed, differ, odd):
        assert found == [len(placed)] * 2
        assert f"rank {odd} called" in text
        assert out == {7.0}


# --- what ends a call in its middle ---------------------------------------------------------------


def stay_out(comm, what):
    """Agree on a call, take no part in what follows, and do something when it has begun."""
    add(comm)
    exchanges = comm._group.exchanges
    mine, other = socket.socketpair()
    exchanges._peers[:, Peer.fd] = mine.fileno()
    exchanges.words.is_shared = 0

    def act():
        until(lambda: exchanges.words.is_shared != 0)
        what(comm)

    thread = threading.Thread(target=act)
    thread.start()
    try:
        return add(comm)
    finally:
        thread.join()
        mine.close()
        other.close()


def wait_for(comm, who, what):
    if comm.rank == who:
        return stay_out(comm, what)
    add(comm)
    return add(comm)


def kill(comm):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(comm):
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_up(comm):
    comm._group.exchanges.close_connections()


def send_rubbish(comm):
    for end in comm._group.exchanges.connections._ends.sockets.values():
        end.send(b"\xa5" * 4000, socket.MSG_NOSIGNAL)


@pytest.mark.parametrize(("placed", "who"), [("ab", 1), ("abc", 0), ("aabb", 2)])
def test_a_killed_leader(hosts, rank_server, placed, who):
    with rank_server.fork(len(placed)) as pool:
        start = time.monotonic()
        hosts.start(pool, placed, wait_for, who, kill)
        replies = pool.collect()

    assert time.monotonic() - start < SOON_S
    assert isinstance(replies[who], Ended)
    for rank, reply in enumerate(replies):
        if rank != who:
            assert isinstance(reply.error, PeerLostError), reply
            assert f"rank {who} " in str(reply.error)


@pytest.mark.soak
def test_a_stopped_leader_is_late(hosts, rank_server):
    with rank_server.fork(3) as pool:
        hosts.start(pool, "abc", wait_for, 2, stop, timeout_s=2)
        found = errors(pool.collect(only=[0, 1]))
        pool.ranks[2].send(signal.SIGCONT)
        errors(pool.collect(only=[2]))

    for error in found:
        assert isinstance(error, DeadlineError), error


@pytest.mark.parametrize("placed", ["ab", "abb"])
def test_connections_that_end_without_a_word(hosts, placed):
    replies = hosts.replies(placed, wait_for, 1, hang_up)

    assert isinstance(replies[0].error, PeerLostError), replies[0]
    assert "lost rank 1" in str(replies[0].error)


@pytest.mark.parametrize("placed", ["ab", "abc"])
def test_bytes_that_are_no_message(hosts, placed):
    replies = hosts.replies(placed, wait_for, 1, send_rubbish)

    assert isinstance(replies[0].error, AbortedError), replies[0]
    assert "sent bytes of another call than all_reduce(op=sum, float32" in str(replies[0].error)


def be_interrupted(comm, who):
    """A leader that waits for data gets a Ctrl-C."""
    if comm.rank == comm.world_size - 1:
        return stay_out(comm, lambda comm: until(lambda: is_broken(comm)))
    add(comm)
    if comm.rank != who:
        return add(comm)
    me, sent, words = threading.get_ident(), [], comm._group.exchanges.words
    words.is_shared = 0

    def send():
        until(lambda: words.is_shared != 0)
        sent.append(time.monotonic())
        signal.pthread_kill(me, signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        add(comm)
    took_s = time.monotonic() - sent[0]
    thread.join()
    assert took_s < 0.5, took_s
    return add(comm)


@pytest.mark.parametrize(("placed", "who"), [("ab", 0), ("abc", 1), ("aab", 0)])
def test_ctrl_c(hosts, placed, who):
    for error in errors(hosts.replies(placed, be_interrupted, who)):
        assert isinstance(error, AbortedError), error
        assert f"rank {who}" in str(error) or "interrupted" in str(error)


# --- what stays -----------------------------------------------------------------------------------


def calls_in_turns(comm, seed):
    """Calls of all sizes one behind the other, of which some hosts are done before others."""
    random = np.random.default_rng(seed)
    n = comm.world_size
    for size in random.choice([1, 3000, 30_000, 200_000], 60):
        root = int(random.integers(n))
        assert add(comm, size) == n
        x = np.full(size, comm.rank + 1, np.int32)
        assert comm.broadcast(x, root=root)[-1] == root + 1
        assert comm.all_gather(x).reshape(n, size)[:, -1].tolist() == list(range(1, n + 1))


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("placed", ["ab", "abc", "aabb", "abcdefgh"])
def test_calls_of_all_sizes(hosts, placed):
    hosts.call(placed, calls_in_turns, len(placed))
