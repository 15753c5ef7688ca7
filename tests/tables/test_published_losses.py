"""Published goes on beside ranks that are stopped, late, dead or new; waits end with errors."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from unittest import mock

import numpy as np
import pytest
from tests.growing import begin, where
from tests.shrinking import arrive, die, results, until_lost
from tests.waiting import SOON_S, collect, is_stopped, thread_names, until

import gpucoll
from gpucoll import ArgumentError, DeadlineError, PeerLostError, StateError
from gpucoll.tables import Published, board, layout

SIZE = 5


def filled(version, size=SIZE):
    return np.full(size, version, np.int64)


def stopped_in_a_copy(comm, count):
    """Rank 1 is stopped while it copies; rank 0 publishes meanwhile, and rank 2 reads."""
    pids = comm.all_gather_object(os.getpid())
    with Published(comm, filled(0)) as shared:
        if comm.rank == 0:
            shared.publish(filled(1))
        comm.barrier()
        if comm.rank == 1:
            made = layout.Layout.made

            def stops(*given):
                os.kill(os.getpid(), signal.SIGSTOP)
                return made(*given)

            with mock.patch.object(layout.Layout, "made", stops):
                version, arrays = shared.latest()
            assert (version, arrays.tolist()) == (1, filled(1).tolist())
        else:
            until(lambda: is_stopped(pids[1]))
            if comm.rank == 0:
                for version in range(2, count + 1):
                    shared.publish(filled(version))
                comm.recv(source=2)
                os.kill(pids[1], signal.SIGCONT)
            else:
                version = 1
                while version < count:
                    version, arrays = shared.latest(version, wait=True)
                    assert (arrays == version).all()
                comm.send(1, dest=0)
        comm.barrier()
        return shared.latest()[0]


def test_a_stopped_reader_holds_up_nobody(rank_server):
    with rank_server.fork(3) as pool:
        pool.start(stopped_in_a_copy, 300)
        assert results(pool.collect()) == [300] * 3


MOMENTS = {
    "before a slot is taken": (board.Board, "free_slot", 7),
    "before anything is copied": (layout.Layout, "store", 7),
    "when a part is copied": (layout, "read_array", 7),
    "before it is announced": (board.Board, "announce", 7),
    "before waiting readers are woken": (board.Board, "_wake", 8),
}


def killed_while_publishing(comm, moment):
    """Rank 0 is killed within its eighth publish; the others find the last whole version."""
    where, name, last = MOMENTS[moment]
    with Published(comm, [filled(0), filled(0)]) as shared:
        if comm.rank == 0:
            for version in range(1, 8):
                shared.publish([filled(version)] * 2)
            comm.barrier()
            before, calls = getattr(where, name), []

            def deadly(*given):
                calls.append(given)
                if name != "read_array" or len(calls) == 2:
                    die()
                return before(*given)

            with mock.patch.object(where, name, deadly):
                shared.publish([filled(8)] * 2)
        comm.barrier()
        start_s, (version, _) = time.monotonic(), shared.latest()
        until(lambda: shared.version == last)
        with pytest.raises(PeerLostError) as caught:
            shared.latest(last, wait=True)
        assert time.monotonic() - start_s < SOON_S
        assert version in (7, last)
        assert [part.tolist() for part in shared.latest()[1]] == [filled(last).tolist()] * 2
        assert shared.latest(last) == (last, None)
        return str(caught.value)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_source_that_is_killed_within_publish(rank_server, moment):
    with rank_server.fork(3) as pool:
        pool.start(killed_while_publishing, moment)
        texts = results(pool.collect(), but=[0])
    for rank, text in enumerate(texts, 1):
        assert text.startswith(f"latest on rank {rank} of 3: no version newer than ")
        assert "the source, rank 0 of 3, is gone. The last version can still be read" in text


def killed_at_a_random_moment(comm, moment_s):
    with Published(comm, filled(0, 50_000)) as shared:
        if comm.rank == 0:
            threading.Timer(moment_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
            for version in range(1, 1 << 30):
                shared.publish(filled(version, 50_000))
        version = 0
        try:
            while True:
                newer, arrays = shared.latest(version, wait=True)
                assert newer > version
                assert (arrays == newer).all()
                version = newer
        except PeerLostError:
            assert (shared.latest()[1] == version).all()
        return True


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", range(20))
def test_a_source_that_is_killed_at_a_random_moment(rank_server, seed):
    moment_s = float(np.random.default_rng(seed).uniform(0.01, 0.1))
    with rank_server.fork(3) as pool:
        pool.start(killed_at_a_random_moment, moment_s)
        assert results(pool.collect(), but=[0]) == [True] * 2


def reader_killed(comm):
    """Rank 1 dies within a copy; the others go on as if nothing were."""
    with Published(comm, filled(0)) as shared:
        if comm.rank == 0:
            shared.publish(filled(1))
        comm.barrier()
        if comm.rank == 1:
            with mock.patch.object(layout.Layout, "made", side_effect=lambda *_: die()):
                shared.latest()
        until_lost(comm)
        if comm.rank == 0:
            for version in range(2, 50):
                shared.publish(filled(version))
        version = 1
        while version < 49:
            version, arrays = shared.latest(version, wait=True)
            assert (arrays == version).all()
        return shared.version


def test_a_reader_that_is_killed_holds_up_nobody(rank_server):
    with rank_server.fork(3) as pool:
        pool.start(reader_killed)
        assert results(pool.collect(), but=[1]) == [49, 49]


@pytest.mark.ranks(2)
def test_waits_have_a_deadline_after_which_all_goes_on(comm):
    with Published(comm, filled(0)) as shared:
        for newer_than in (None, 0, 7):
            text = f"rank {comm.rank} of 2: no version newer than {newer_than or 0} came within 0.0"
            with pytest.raises(DeadlineError, match=re.escape(text)):
                shared.latest(newer_than, wait=True, timeout_s=0.02)
        comm.barrier()
        if comm.rank == 0:
            shared.publish(filled(1))
        assert shared.latest(wait=True)[0] == 1
        comm.barrier()


@pytest.mark.ranks(3)
def test_a_source_that_has_closed(comm):
    shared = Published(comm, filled(0))
    if comm.rank == 0:
        shared.publish(filled(1))
        comm.barrier()
        shared.close()
    else:
        comm.barrier()
        with pytest.raises(PeerLostError, match="the source, rank 0 of 3, has closed it"):
            shared.latest(1, wait=True)
        assert shared.latest(wait=True)[1].tolist() == filled(1).tolist()
        shared.close()


@pytest.mark.ranks(2)
def test_close_ends_a_wait_in_another_thread(comm):
    shared, caught = Published(comm, filled(0)), []

    def wait():
        try:
            shared.latest(wait=True)
        except StateError as error:
            caught.append(str(error))

    with mock.patch.object(shared, "_look") as look:
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: look.called)
        comm.barrier()
        shared.close()
        thread.join(SOON_S)
    assert caught == [f"Published on rank {comm.rank} of 2 is closed"]


# --- other communicators --------------------------------------------------------------------------


def grown(seat, source):
    if seat.rank < 2:
        comm = begin(seat, 2)
        shared = Published(comm, filled(0), source)
        if comm.rank == source:
            shared.publish(filled(1))
            shared.publish(filled(2))
        comm = comm.grow(**where(seat), wait_s=15.0, at_most=2)
        before, shared = shared, shared.kept_for(comm)
        with pytest.raises(StateError, match="closed"):
            before.latest()
    else:
        comm = gpucoll.join(**where(seat), timeout_s=20.0)
        shared = Published(comm, filled(0), source)
    with comm, shared:
        found = [shared.latest()]
        comm.barrier()
        if comm.rank == source:
            assert shared.publish(filled(3)) == 3
        found.append(shared.latest(2, wait=True))
        comm.barrier()
        return [(version, arrays.tolist()) for version, arrays in found]


@pytest.mark.parametrize("source", [0, 1])
def test_readers_that_join_late_find_the_last_version(rank_server, source):
    with rank_server.fork(4) as pool:
        pool.start(grown, source, gives="seat")
        for found in results(pool.collect()):
            assert found == [(2, filled(2).tolist()), (3, filled(3).tolist())]


def shrunk(comm, victim, source, named):
    shared = Published(comm, filled(0), source)
    if comm.rank == source:
        shared.publish(filled(1))
        shared.publish(filled(2))
    comm.barrier()
    if comm.rank == victim:
        die()
    until_lost(comm)
    comm = comm.shrink()
    with comm, shared.kept_for(comm, source=named) as kept:
        assert kept.latest()[1].tolist() == filled(2).tolist()
        comm.barrier()
        if kept.is_source:
            assert kept.publish(filled(3)) == 3
        version, arrays = kept.latest(2, wait=True)
        assert (version, arrays.tolist()) == (3, filled(3).tolist())
        comm.barrier()
        return kept.source


@pytest.mark.parametrize(
    ("victim", "source", "named", "then"),
    [(0, 1, None, 0), (2, 0, None, 0), (0, 0, 1, 1), (1, 0, 2, 2)],
)
def test_what_is_left_goes_on(rank_server, victim, source, named, then):
    with rank_server.fork(4) as pool:
        pool.start(shrunk, victim, source, named)
        assert results(pool.collect(), but=[victim]) == [then] * 3


def shrunk_without_a_source(comm):
    with Published(comm, filled(0)) as shared:
        if comm.rank == 0:
            shared.publish(filled(1))
        arrive(comm)
        if comm.rank == 0:
            die()
        until_lost(comm)
        comm = comm.shrink()
        with comm:
            with pytest.raises(ArgumentError, match="the source is not among the 2 ranks: name an"):
                shared.kept_for(comm)
            assert shared.latest()[0] == 1
            with shared.kept_for(comm, source=0) as kept:
                return kept.latest()[0]


def test_a_lost_source_needs_another(rank_server):
    with rank_server.fork(3) as pool:
        pool.start(shrunk_without_a_source)
        assert results(pool.collect(), but=[0]) == [1, 1]


@pytest.mark.ranks(2)
def test_one_that_is_closed_on_a_rank_is_kept_by_none(comm):
    shared = Published(comm, filled(0))
    if comm.rank == 1:
        shared.close()
    with pytest.raises((StateError, ArgumentError), match="Published on rank 1 of 2 is closed"):
        shared.kept_for(comm)
    shared.close()
    comm.barrier()


# --- nothing is left ------------------------------------------------------------------------------


def facts():
    with open("/proc/self/maps") as file:
        maps = sum("published" in line for line in file)
    return len(os.listdir("/proc/self/fd")), thread_names(), maps


@pytest.mark.ranks(2)
def test_nothing_is_left(comm):
    comm.barrier()
    before = facts()
    for _ in range(3):
        with Published(comm, filled(0)) as shared:
            if comm.rank == 0:
                shared.publish(filled(1))
            kept = shared.kept_for(comm)
            assert kept.latest(wait=True)[0] == 1
        kept.close()
    with pytest.raises(ArgumentError):
        Published(comm, filled(0), source=2)
    assert facts() == before
    Published(comm, filled(0))
    collect()
    assert facts() == before
    shared = Published(comm, filled(0), source=comm.world_size - 1)
    if shared.is_source:
        with (
            mock.patch.object(board.Board, "end", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            shared.close()
    shared.close()
    assert facts() == before


class CountingLock:
    """A lock that counts who wants it."""

    def __init__(self):
        self._lock, self.wanted = threading.Lock(), 0

    def acquire(self, timeout=-1):
        self.wanted += 1
        return self._lock.acquire(timeout=timeout)

    def release(self):
        self._lock.release()


@pytest.mark.ranks(1)
def test_threads_that_close_it_at_the_same_time(comm):
    shared = Published(comm, filled(0))
    shared._lock = lock = CountingLock()  # type: ignore[assignment]
    lock.acquire()  # another thread copies
    threads = [threading.Thread(target=shared.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: lock.wanted == 3)
    lock.release()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
