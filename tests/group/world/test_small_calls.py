"""Small calls between hosts, in compiled code: what ends one in its middle, and what differs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests.certificates import Authority
from tests.faults.test_ends import errors
from tests.ranks import Ended
from tests.rendezvous.conftest import held_open
from tests.waiting import SOON_S, is_broken, until

from gpucoll.calls.work import Work
from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError
from gpucoll.group.world.hosts import partners

SHAPES = ["ab", "aab", "abc", "abcde", "abcdefgh"]


def add(comm, out=None):
    x = np.ones(3)
    return float(comm.all_reduce(x, op="sum", out=out)[0])


def warm(comm):
    """Have the compiled entry serve `add` from here on."""
    for _ in range(3):
        assert add(comm) == comm.world_size


# --- what differs ---------------------------------------------------------------------------------


def calls(world_size):
    """Every collective, as a function of the communicator and of what makes it differ."""
    n = world_size

    def rows(more):
        return np.ones((n * (2 + more), 2))

    return {
        "all_reduce": lambda comm, more: comm.all_reduce(np.ones(3 + more)),
        "reduce": lambda comm, more: comm.reduce(np.ones(3 + more), root=n - 1),
        "scan": lambda comm, more: comm.scan(np.ones(3 + more)),
        "exclusive_scan": lambda comm, more: comm.exclusive_scan(np.ones(3 + more)),
        "broadcast": lambda comm, more: comm.broadcast(np.ones(3 + more), root=n - 1),
        "all_gather": lambda comm, more: comm.all_gather(np.ones(3 + more)),
        "gather": lambda comm, more: comm.gather(np.ones(3 + more), root=n - 1),
        "all_to_all": lambda comm, more: comm.all_to_all(rows(more)),
        "reduce_scatter": lambda comm, more: comm.reduce_scatter(rows(more)),
    }


def differ(comm, name, odd):
    call = calls(comm.world_size)[name]
    for _ in range(3):
        call(comm, 0)
    texts = []
    for _ in range(2):
        with pytest.raises(MismatchError) as caught:
            call(comm, int(comm.rank == odd))
        texts.append(str(caught.value))
        call(comm, 0)
    return texts, add(comm)


@pytest.mark.parametrize("placed", ["ab", "aab", "abc"])
@pytest.mark.parametrize("name", calls(2))
def test_sizes_that_differ(hosts, name, placed):
    odd = len(placed) - 1

    for rank, (texts, total) in enumerate(hosts.call(placed, differ, name, odd)):
        assert total == len(placed)
        for text in texts:
            assert f"rank {odd} called {name}(" in text
            assert f"This is rank {rank} of {len(placed)}. Nothing was written" in text


def take_from_oneself(comm):
    """Each host says that it is the root, of as much as goes this way: together more."""
    with pytest.raises(MismatchError) as caught:
        comm.broadcast(np.ones(4000), root=comm.rank)
    return str(caught.value), add(comm)


@pytest.mark.parametrize("placed", ["ab", "abc"])
def test_much_from_each(hosts, placed):
    for text, total in hosts.call(placed, take_from_oneself):
        assert text.count("root=") == total == len(placed)


def call_another(comm, others):
    """Each host makes another collective, in turn with one that all make."""
    warm(comm)
    made = list(calls(comm.world_size).values())
    texts = []
    for number in range(len(made)):
        with pytest.raises(MismatchError) as caught:
            made[(number + comm.rank * others) % len(made)](comm, 0)
        texts.append(str(caught.value))
        warm(comm)
    return texts


@pytest.mark.parametrize("placed", ["ab", "abc", "aabb"])
def test_different_collectives(hosts, placed):
    for texts in hosts.call(placed, call_another, 1):
        for text in texts:
            # Of hosts whose own ranks differ, each tells its own.
            assert text.count(" called ") == (2 if placed == "aabb" else len(placed))


OTHERS = {
    "an object": lambda comm: comm.broadcast_object("it", root=0),
    "a large array": lambda comm: comm.all_reduce(np.ones(50_000)),
    "a barrier": lambda comm: comm.barrier(),
    "a list": lambda comm: comm.all_reduce([np.ones(3), np.ones(4)]),
    "a split": lambda comm: comm.split(0),
}


def call_further(comm, name, odd):
    warm(comm)
    for _ in range(2):
        with pytest.raises(MismatchError):
            OTHERS[name](comm) if comm.rank == odd else add(comm)
        warm(comm)
    return add(comm)


@pytest.mark.parametrize("placed", ["ab", "aab", "abb"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_small_call_and_another_kind(hosts, name, placed):
    for odd in (0, len(placed) - 1):
        assert hosts.call(placed, call_further, name, odd) == [len(placed)] * len(placed)


# --- all kinds, one behind the other --------------------------------------------------------------


def mix(comm, seed):
    """Small, large, object and asynchronous calls, plans and parts, in an order all draw alike."""
    random = np.random.default_rng(seed)
    n, rank = comm.world_size, comm.rank
    half = comm.split(rank % 2)
    pending: list[Work[np.ndarray]] = []

    def start():
        pending.append(comm.all_reduce(np.ones(5), async_op=True))
        return True

    def finish():
        for work in pending:
            assert work.wait()[0] == n
        pending.clear()

    kinds = {
        "small": lambda: add(comm) == n,
        "barrier": lambda: comm.barrier() is None,
        "gathered": lambda: comm.all_gather(np.array([rank])).tolist() == list(range(n)),
        "large": lambda: comm.all_reduce(np.ones(20_000))[-1] == n,
        "object": lambda: comm.all_gather_object(rank) == list(range(n)),
        "part": lambda: half.all_reduce(np.ones(1))[0] == half.world_size,
        "started": start,
        "int": lambda: comm.all_reduce(7) == 7 * n,
        "list": lambda: [a[0] for a in comm.all_reduce([np.ones(1), np.ones(2)])] == [n, n],
    }
    for name in random.choice(list(kinds), 120):
        assert kinds[name](), name
        if random.random() < 0.2:
            finish()
    finish()
    half.close()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", SHAPES)
def test_calls_of_all_kinds(hosts, placed):
    hosts.call(placed, mix, len(placed))


def mix_encrypted(comm):
    mix(comm, 5)
    return differ(comm, "all_gather", 1)[1]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aab", "abc"])
def test_calls_of_all_kinds_inside_of_tls(hosts, tmp_path, placed):
    found = hosts.call(placed, mix_encrypted, environment=Authority(tmp_path / "ca").environment())

    assert found == [len(placed)] * len(placed)


# --- what ends a wait -----------------------------------------------------------------------------


def wait_for(comm, who, what):
    """All wait in compiled code for one rank, which then does something."""
    warm(comm)
    if comm.rank == who:
        comm._group.links.wait(lambda: False, 0.1)  # nothing tells when others are in their loop
        return what(comm)
    return add(comm)


def kill(comm):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize(("placed", "who"), [("ab", 1), ("abc", 0), ("aab", 2), ("abcde", 3)])
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
            assert str(reply.error).startswith(f"rank {rank} of {len(placed)}")


def stop(comm):
    os.kill(os.getpid(), signal.SIGSTOP)
    return add(comm)


@pytest.mark.soak
def test_a_stopped_leader_is_late(hosts, rank_server):
    with rank_server.fork(3) as pool:
        hosts.start(pool, "abc", wait_for, 2, stop, timeout_s=2)
        found = errors(pool.collect(only=[0, 1]))
        pool.ranks[2].send(signal.SIGCONT)
        found += errors(pool.collect(only=[2]))

    for error in found:
        assert isinstance(error, DeadlineError), error
    assert all("rank 2 on " in str(error) for error in found[:2]), found


def abort(comm):
    comm.abort()


@pytest.mark.parametrize(("placed", "who"), [("ab", 1), ("abc", 0), ("aab", 2)])
def test_an_abort_on_another_host(hosts, placed, who):
    start = time.monotonic()
    replies = hosts.replies(placed, wait_for, who, abort)

    assert time.monotonic() - start < SOON_S
    for rank, reply in enumerate(replies):
        if rank != who:
            assert isinstance(reply.error, AbortedError), reply
            assert f"rank {who}" in str(reply.error)


def hang_up(comm):
    """Close the connections without a word, and wait until somebody has noticed."""
    comm._group.exchanges.close_connections()
    until(lambda: is_broken(comm))


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "abc", "abb"])
def test_connections_that_end_without_a_word(hosts, placed):
    replies = hosts.replies(placed, wait_for, 1, hang_up)

    assert isinstance(replies[0].error, PeerLostError), replies[0]
    assert "lost rank 1" in str(replies[0].error)


def send_rubbish(comm):
    for end in comm._group.exchanges.connections._ends.sockets.values():
        end.send(b"\xa5" * 4000, socket.MSG_NOSIGNAL)
    until(lambda: is_broken(comm))


@pytest.mark.parametrize("placed", ["ab", "abc"])
def test_bytes_that_are_no_message(hosts, placed):
    replies = hosts.replies(placed, wait_for, 1, send_rubbish)

    assert isinstance(replies[0].error, AbortedError), replies[0]
    assert "sent bytes of another call than all_reduce(op=sum, float64, shape (3,))" in str(
        replies[0].error
    )


def be_interrupted(comm, who):
    """One rank gets a Ctrl-C in the compiled wait for the last one."""
    warm(comm)
    if comm.rank == comm.world_size - 1:
        until(lambda: is_broken(comm))
        return add(comm)
    if comm.rank != who:
        return add(comm)
    me, sent = threading.get_ident(), []

    def send():
        until(lambda: comm._group.is_running)
        sent.append(time.monotonic())
        signal.pthread_kill(me, signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        add(comm)
    except KeyboardInterrupt:
        took_s = time.monotonic() - sent[0]
    finally:
        thread.join()
    assert took_s < 0.5, took_s
    return add(comm)


@pytest.mark.parametrize(("placed", "who"), [("ab", 0), ("abc", 1), ("aab", 0), ("aab", 1)])
def test_ctrl_c(hosts, placed, who):
    found = errors(hosts.replies(placed, be_interrupted, who))

    for error in found:
        assert isinstance(error, AbortedError), error
        assert f"rank {who}" in str(error) or "interrupted" in str(error)


def late(comm):
    until(lambda: is_broken(comm))
    return add(comm)


@pytest.mark.parametrize(("placed", "who"), [("ab", 1), ("abc", 0), ("aab", 1), ("aab", 2)])
def test_a_deadline(hosts, placed, who):
    def wait(comm):
        warm(comm)
        if comm.rank == who:
            return late(comm)
        return float(comm.all_reduce(np.ones(3), timeout_s=0.3)[0])

    found = errors(hosts.replies(placed, wait))

    for error in found:
        assert isinstance(error, DeadlineError), error
        assert f"rank {who} had not arrived" in str(error), error


# --- what stays -----------------------------------------------------------------------------------


def open_and_close(seat):
    found = []
    for _ in range(3):
        with seat.init() as comm:
            warm(comm)
        found.append(held_open())
    return found[1:]


def test_nothing_stays_open(hosts):
    for first, second in hosts.call("aab", open_and_close, gives="seat"):
        assert not any("socket" in name for name in set(second) - set(first))


def fork_a_child(comm):
    warm(comm)
    ends = comm._group.exchanges.connections._ends.sockets.values()
    numbers = [end.fileno() for end in ends]
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        still = [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]
        os.write(writing, b"%d" % len(still))
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(reading, 10)
    os.close(reading)
    os.close(writing)
    return len(numbers), said, add(comm)


def test_a_forked_child_keeps_none(hosts):
    assert hosts.call("ab", fork_a_child) == [(1, b"0", 2)] * 2


def count_connections(comm):
    warm(comm)
    return len(comm._group.exchanges.connections._ends.sockets)


def test_a_few_hosts_are_all_connected(hosts):
    assert hosts.call("abcdefgh", count_connections) == [7] * 8


@pytest.mark.parametrize(("count", "expected"), [(2, 1), (16, 15), (17, 8), (64, 11)])
def test_connections_of_many_hosts_grow_as_the_logarithm(count, expected):
    for here in range(count):
        assert len(partners(here, count)) == expected
        assert all(here in partners(other, count) for other in partners(here, count))


def test_one_host_loads_nothing_of_it():
    program = (
        "import sys, numpy as np, gpucoll\n"
        "with gpucoll.init() as comm:\n"
        "    comm.all_reduce(np.ones(3))\n"
        "print([name for name in sys.modules if 'transport.tcp' in name or 'world' in name])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout.strip() == "[]"
