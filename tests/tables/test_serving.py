"""Serving between hosts: pulls, pushes, clocks by messages; stopped, lost and closing ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.shrinking import die, results
from tests.waiting import SOON_S, is_stopped, thread_names, until

from gpucoll.api.host_memory import HostMemory
from gpucoll.errors import AbortedError, DeadlineError, PeerLostError
from gpucoll.tables.owners import Owners
from gpucoll.tables.serving import Requests, Server, close_communicator

ROWS, WIDTH = 2000, 5


class PlainRows:
    """Rows of a host that are added to, without locks: one rank at a time pushes."""

    def __init__(self, comm, owners, width, dtype):
        count = owners.counts[owners.here]
        self.dtype = np.dtype(dtype)
        self.memory = HostMemory(comm, max(1, count * width * self.dtype.itemsize), "test")
        self.values = self.memory.array(0, (count, width), dtype)
        self.clocks: dict[int, int] = {}

    def take(self, places, out):
        out.view(self.dtype)[...] = self.values[places]

    def apply(self, places, values):
        np.add.at(self.values, places, values.view(self.dtype))

    def note_clock(self, rank, clock):
        self.clocks[rank] = clock


class Made:
    """A table's parts between hosts."""

    def __init__(self, comm, rows=ROWS, width=WIDTH, dtype="int64"):
        self.owners = Owners(comm, rows)
        self.rows: Any = PlainRows(comm, self.owners, width, dtype)
        self.shape, self.dtype = width, np.dtype(dtype)
        self.comm = comm.duplicate()
        row_bytes = width * self.dtype.itemsize
        self.requests = Requests(self.comm, self.owners, self.rows, row_bytes, 20.0)
        self.server: Any = None
        if comm.rank == self.owners.server(self.owners.here):
            applied = self.owners.applied
            self.server = Server(self.comm, self.rows, row_bytes, applied, self.rows)

    def pull(self, ids, timeout_s=20.0):
        out = np.full((len(ids), self.shape), 7, self.dtype)
        self.requests.timeout_s = timeout_s
        self.requests.pull(ids, out.view(np.uint8))
        return out

    def push(self, ids, values):
        self.requests.push(ids, np.ascontiguousarray(values, self.dtype).view(np.uint8))

    def flush(self, timeout_s=20.0):
        self.requests.timeout_s = timeout_s
        self.requests.flush()

    def finish(self):
        self.flush()
        self.comm.barrier()
        self.close()

    def close(self):
        if self.server is not None:
            self.server.stop()
        close_communicator(self.comm)
        self.owners.close()
        self.rows.memory.close()


def values_of(ids, width=WIDTH):
    return ids[:, None] * 10 + np.arange(width)


# --- what comes out -------------------------------------------------------------------------------


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("placed", ["ab", "aab", "abc", "aabb"])
@pytest.mark.parametrize("size", [1, 300, 60_000])
def test_what_was_pushed_is_pulled(hosts, placed, size):
    def on_each(comm):
        made = Made(comm)
        ids = np.random.default_rng(comm.rank).integers(0, ROWS, size)
        for rank in range(comm.world_size):
            if rank == comm.rank:
                made.push(ids, values_of(ids))
                own = made.pull(ids)
            comm.barrier()
        made.flush()
        comm.barrier()
        everything = made.pull(np.arange(ROWS))
        made.finish()
        return ids, own, everything

    found = hosts.call(placed, on_each)

    expected = np.zeros((ROWS, WIDTH), int)
    for ids, own, _ in found:
        np.add.at(expected, ids, values_of(ids))
        assert (own == expected[ids]).all()  # a rank sees what it has pushed itself
    for *_, everything in found:
        assert (everything == expected).all()


def test_pushes_from_all_ranks_at_once_add_up(hosts):
    rounds, size = 40, 200

    def on_each(comm):
        made = Made(comm, rows=50)
        draw = np.random.default_rng(comm.rank)
        there = np.concatenate([made.owners.owned_by(1 - made.owners.here)])
        pushed = np.zeros((50, WIDTH), int)
        for _ in range(rounds):  # of one rank a host, through one thread: no locks are needed
            ids = there[draw.integers(0, len(there), size)]
            made.push(ids, values_of(ids))
            np.add.at(pushed, ids, values_of(ids))
        made.flush()
        comm.barrier()
        everything = made.pull(np.arange(50))
        made.finish()
        return pushed, everything

    found = hosts.call("ab", on_each)

    total = sum(pushed for pushed, _ in found)
    assert all((everything == total).all() for _, everything in found)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "complex64"])
def test_dtypes(hosts, dtype):
    def on_each(comm):
        made = Made(comm, rows=40, width=3, dtype=dtype)
        ids = np.arange(40)[::-1][comm.rank :: 2]
        made.push(ids, np.repeat(ids, 3).reshape(-1, 3).astype(dtype))
        made.flush()
        comm.barrier()
        out = made.pull(np.arange(40))
        empty = made.pull(np.empty(0, int))
        made.push(np.empty(0, int), np.empty((0, 3), dtype))
        made.finish()
        return out, empty.shape

    for out, empty in hosts.call("ab", on_each):
        assert (out == np.arange(40)[:, None].astype(dtype)).all()
        assert empty == (0, 3)


def test_clocks_are_told_after_pushes(hosts):
    def on_each(comm):
        made = Made(comm)
        ids = np.arange(ROWS)
        if comm.rank == 0:
            for clock in range(1, 20):
                made.push(ids, np.ones((ROWS, WIDTH), int))
                made.flush()
                made.requests.tell_clock(clock)
        else:
            seen = 0
            while seen < 19:
                until(lambda before=seen: made.rows.clocks.get(0, 0) > before)
                seen = made.rows.clocks[0]
                assert made.pull(ids).min() >= seen
        made.finish()
        return made.rows.clocks

    assert hosts.call("ab", on_each) == [{}, {0: 19}]


# --- ranks that stop, die or leave ----------------------------------------------------------------


def test_a_stopped_rank_stops_nobody(hosts, rank_server):
    with rank_server.fork(3) as pool:
        pids = [rank.pid for rank in pool.ranks]

        def on_each(comm):
            made = Made(comm, rows=6_000)
            ones = np.ones((6_000, WIDTH), int)
            comm.barrier()
            if comm.rank == 2:
                mine = made.owners.owned_by(0)
                threading.Thread(target=made.pull, args=[mine]).start()
                os.kill(os.getpid(), signal.SIGSTOP)
                made.finish()
                return None
            until(lambda: is_stopped(pids[2]))
            theirs = made.owners.owned_by(1 - comm.rank)
            start_s = time.monotonic()
            for count in range(5):
                made.push(theirs, ones[: len(theirs)])
                made.flush()
                assert (made.pull(theirs) == count + 1).all()
            took_s = time.monotonic() - start_s
            lost = made.owners.owned_by(2)
            with pytest.raises(DeadlineError, match="s for rows of a table from rank 2"):
                made.pull(lost, timeout_s=0.1)
            made.push(lost, ones[: len(lost)])
            with pytest.raises(DeadlineError, match="for word of pushes of a table from"):
                made.flush(timeout_s=0.1)
            if comm.rank == 1:
                comm.send(1, 0)
            else:
                comm.recv(source=1)
                os.kill(pids[2], signal.SIGCONT)
            made.flush()
            found = made.pull(lost)
            made.finish()
            return took_s, found

        hosts.start(pool, "abc", on_each)
        first, second, _ = results(pool.collect())

    assert max(first[0], second[0]) < SOON_S
    assert ((first[1] >= 1) & (first[1] <= 2)).all()


def test_a_killed_rank_is_an_error_and_closing_ends_the_thread(hosts, rank_server):
    def on_each(comm):
        made = Made(comm)
        comm.barrier()
        if comm.rank == 1:
            die()
        with contextlib.suppress(PeerLostError):
            while True:
                made.pull(np.arange(ROWS))
        with pytest.raises(PeerLostError, match="lost rank 1"):
            made.pull(np.arange(ROWS))
        start_s = time.monotonic()
        made.close()
        assert "gpucoll-table" not in thread_names()
        return time.monotonic() - start_s

    with rank_server.fork(3) as pool:
        hosts.start(pool, "abb", on_each)
        found = results(pool.collect(), [1])

    assert max(found) < SOON_S


def test_ctrl_c_while_a_rank_is_silent(hosts):
    def on_each(comm):
        made = Made(comm)
        comm.barrier()
        if comm.rank == 0:
            made.server.stop()
            comm.barrier()
        else:
            comm.barrier()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            with pytest.raises(KeyboardInterrupt):
                made.pull(np.arange(ROWS))
            signal.signal(signal.SIGALRM, before)
        comm.barrier()
        start_s = time.monotonic()
        made.close()
        assert "gpucoll-table" not in thread_names()
        return time.monotonic() - start_s

    assert max(hosts.call("ab", on_each)) < SOON_S


@pytest.mark.parametrize("kind", [TypeError, DeadlineError])
def test_an_error_in_the_thread_is_raised_on_all(hosts, kind):
    def on_each(comm):
        made = Made(comm)

        def fail(*_):
            raise kind("a function of the user's, or a lock that another rank has held too long")

        if comm.rank == 0:
            made.rows.take = fail
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(AbortedError, match="rank 0 aborted it"):
                made.pull(np.arange(ROWS))
        else:
            until(lambda: made.server.error)
            assert type(made.server.error) is kind
        made.close()

    hosts.call("ab", on_each)
