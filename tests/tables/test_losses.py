"""Tables whose ranks die, stop or come: no row is lost, and nothing hangs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from tests.growing import begin, where
from tests.shrinking import arrive, die, fresh, results
from tests.waiting import SOON_S, is_stopped, until

import gpucoll
from gpucoll import DeadlineError, PeerLostError, StateError
from gpucoll.tables import Staleness, Table
from gpucoll.transport.shared import ordering

__all__ = ["fresh"]

ONES = np.ones((1, 4), np.int64)


def lock_row(table, place):
    """Take the lock of a row, as a push does that is in its middle."""
    rows = table._rows
    assert ordering.compare_exchange(rows._locks.ctypes.data + 8 * place, 0, rows._mine) == 0


def end_steps(table, count):
    for _ in range(count):
        table.clock()


def until_gone(table, rank):
    until(lambda: table._rows.members.is_gone(rank))


# --- ranks that die -------------------------------------------------------------------------------


def test_the_lock_of_a_dead_rank_is_taken_over(fresh):
    def lose(comm):
        table = Table(comm, 5, 4, "int64")
        if comm.rank == 1:
            table.push(1, ONES[0])
            lock_row(table, 3)
            lock_row(table, 4)
        arrive(comm)
        if comm.rank == 1:
            die()
        until_gone(table, 1)
        if comm.rank == 0:
            assert table.torn_rows().tolist() == [3, 4]  # nobody has wanted them yet
        for _ in range(3):
            table.push([0, 3, 1], np.ones((3, 4), np.int64))
        with table.kept_for(comm.shrink()) as kept:
            kept._comm.barrier()
            assert kept.torn_rows().tolist() == [3, 4]
            kept.push([4], ONES)
            kept._comm.barrier()
            assert kept.torn_rows().tolist() == [3, 4]
            found = kept.snapshot()[:, 0].tolist()
            kept._comm.barrier()
        return found

    assert results(fresh(3, lose), [1]) == [[6, 7, 0, 6, 2]] * 2


def test_clocks_name_the_rank_that_is_gone(fresh):
    def lose(comm, mode):
        table = Table(comm, 5, 4, "int64", mode=mode)
        table.push(0, ONES[0])
        table.clock()
        arrive(comm)
        if comm.rank == 1:
            die()
        table.push(1, ONES[0])
        start_s = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1"):
            end_steps(table, 3)
        assert time.monotonic() - start_s < SOON_S
        assert table.pull(0).tolist() == [3] * 4  # of all three
        with pytest.raises(PeerLostError):
            table.kept_for(comm)  # and then for one that is whole
        kept = table.kept_for(comm.shrink())
        with pytest.raises(StateError, match="the table is closed"):
            table.pull(0)
        clocks = kept._comm.all_gather_object(kept._clock)
        with kept:
            assert mode != "sync" or clocks == clocks[:1] * 2
            for _ in range(max(clocks) - kept._clock + 1):
                kept.push(2, ONES[0])
                if mode != "sync":
                    kept.clock()
            kept.clock()
            kept._comm.barrier()
            return kept.pull(0).tolist(), kept.pull(2)[0] > 1

    for mode in ("sync", Staleness(1)):
        assert results(fresh(3, lose, mode), [1]) == [([3] * 4, True)] * 2


def test_who_waits_for_a_rank_that_left_hears_of_the_loss(fresh):
    """Rank 1 dies ahead of the others; rank 0 knows, and comes to no clock any more."""

    def lose(comm):
        table = Table(comm, 5, 4, mode=Staleness(1))
        if comm.rank == 1:
            table.clock()
        arrive(comm)
        if comm.rank == 1:
            die()
        if comm.rank == 2:
            with pytest.raises(
                PeerLostError, match=r"rank 0 is at clock 0.* process of rank 1 has"
            ):
                end_steps(table, 2)
        with table.kept_for(comm.shrink()) as kept:
            return kept._comm.world_size

    assert results(fresh(3, lose), [1]) == [2, 2]


def test_pushes_before_the_clock_are_kept(fresh):
    def lose(comm):
        table = Table(comm, 2, 4, "int64", mode="sync")
        arrive(comm)
        if comm.rank == 0:
            die()
        table.push(1, ONES[0])
        until_gone(table, 0)
        with table.kept_for(comm.shrink()) as kept:
            kept.push(1, ONES[0])
            kept.clock()
            return kept.pull(1).tolist()

    assert results(fresh(3, lose), [0]) == [[4] * 4] * 2


def test_a_rank_that_stays_behind_pushes_no_more(fresh):
    """It was stopped, not dead, when the others went on without it."""

    def leave_behind(comm):
        table = Table(comm, 5, 4, "int64")
        pids = comm.all_gather_object(os.getpid())
        if comm.rank == 2:
            lock_row(table, 1)
            comm.barrier()
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(StateError, match="have continued without this one; 0 of 1 rows"):
                table.push(0, ONES[0])
            rows = table._rows
            later = rows._mine + (1 << 20)  # a lock that one of the others holds now
            assert not rows._has_left(later)
            with pytest.raises(StateError, match="have continued without this one"):
                table.clock()
            rows.members.close()  # says nothing to the others either
            return None
        comm.barrier()
        until(lambda: is_stopped(pids[2]))
        with table.kept_for(comm.shrink(timeout_s=0.5)) as kept:
            if comm.rank == 0:
                os.kill(pids[2], signal.SIGCONT)
            kept.push(1, ONES[0])
            kept._comm.barrier()
            return kept.pull(1).tolist(), kept.torn_rows().tolist()

    assert results(fresh(3, leave_behind), [])[:2] == [([2] * 4, [1])] * 2


def push_until_lost(comm, rows, width, seed):
    """Push, each rank into its own 15 bits of each element, until a rank is lost; then go on."""
    chosen = random.Random(seed)
    victim, moment_s = chosen.randrange(comm.world_size), chosen.uniform(0, 0.2)
    table = Table(comm, rows, width, "int64", mode=Staleness(3) if seed % 2 else "async")
    generator = np.random.default_rng(comm.rank)
    pushed, unit = 0, 1 << 15 * comm.rank
    comm.barrier()
    if comm.rank == victim:
        threading.Timer(moment_s, die).start()  # any moment will do
    while not table._rows.members.is_gone(victim):
        table.push(generator.integers(0, rows, 8), np.full((8, width), unit))
        pushed += 8
        if seed % 2:
            try:
                table.clock()
            except PeerLostError:
                break
    with table.kept_for(comm.shrink()) as kept:
        found, torn = kept.snapshot(), kept.torn_rows().tolist()
        kept._comm.barrier()
    differing = np.flatnonzero((found != found[:, :1]).any(1)).tolist()
    assert set(differing) <= set(torn)
    assert len(torn) <= 1
    of_rank = found >> 15 * comm.rank & 0x7FFF
    assert (of_rank.sum(0) == pushed).all()
    return victim, len(torn)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("rows", "width"), [(2_000, 4), (3, 20_000)], ids=["many", "wide"])
def test_killed_at_random(fresh, rows, width, seed):
    """With wide rows most moments are in the middle of an update."""
    victim = random.Random(seed).randrange(4)
    found = results(fresh(4, push_until_lost, rows, width, seed), [victim])
    assert found == [(victim, found[0][1])] * 3
    print("torn rows:", found[0][1])


# --- ranks that stop ------------------------------------------------------------------------------


def test_a_rank_that_is_stopped(fresh):
    def stop(comm):
        table = Table(comm, 5, 4, "int64")
        staged = Table(comm, 5, 4, "int64", mode=Staleness(1))
        pids = comm.all_gather_object(os.getpid())
        if comm.rank == 1:
            lock_row(table, 3)
            comm.barrier()
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        comm.barrier()
        until(lambda: is_stopped(pids[1]))
        for each in (table, staged):
            each._rows.members.timeout_s = 0.3
        text = r"rank 0 of 2: push: rank 1 has held the lock of row 3 .* 0.3 s .* 2 of 4 rows were"
        with pytest.raises(DeadlineError, match=text):
            table.push([1, 2, 3, 4], np.ones((4, 4), np.int64))
        assert table.snapshot()[:, 0].tolist() == [0, 1, 1, 0, 0]
        staged.clock()
        with pytest.raises(DeadlineError, match=r"rank 1 is at clock 0, and this .* its clock 1"):
            staged.clock()
        os.kill(pids[1], signal.SIGCONT)
        table.close()
        staged.close()
        return "said so"

    assert results(fresh(2, stop), [])[0] == "said so"


# An interrupt just after a file was opened leaves it to its destructor, which closes it and warns.
@pytest.mark.filterwarnings("ignore:unclosed file .*/stat:ResourceWarning")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", ["push", "clock"])
def test_ctrl_c(comm, call):
    with Table(comm, 5, 4, "int64", mode=Staleness(1)) as table:
        if comm.rank == 1:
            lock_row(table, 3)
        comm.barrier()
        if comm.rank == 0:
            table._rows.members._slice[:] = 1000, 0
            main = threading.get_ident()
            timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            timer.start()
            start_s = time.monotonic()
            try:
                with pytest.raises(KeyboardInterrupt):
                    table.push(3, ONES[0]) if call == "push" else end_steps(table, 2)
            finally:
                signal.signal(signal.SIGINT, before)
                timer.join()
            assert time.monotonic() - start_s < SOON_S
        comm.barrier()


# --- ranks that come ------------------------------------------------------------------------------


def test_newcomers_get_the_rows(fresh):
    """A newcomer makes the table as the first ranks did."""

    def live(seat):
        setup = 5, 4, "int64"
        if seat.rank < 2:
            comm = begin(seat, 2)
            table = Table(comm, *setup, mode="sync", init=7)
            table.push(1, ONES[0])
            table.clock()
            table.push(2, ONES[0])
            grown = comm.grow(**where(seat), wait_s=15.0, at_most=1)
            table = table.kept_for(grown)
        else:
            grown = gpucoll.join(**where(seat), timeout_s=20.0)
            table = Table(grown, *setup, mode="sync", init=7)
        with grown, table:
            table.push(3, ONES[0])
            clock = table.clock()
            return clock, table.snapshot()[:, 0].tolist()

    assert results(fresh(3, live, gives="seat"), []) == [(2, [7, 9, 9, 10, 7])] * 3


@pytest.mark.ranks(3)
def test_other_ranks_make_the_table_while_some_keep_it(comm):
    part = comm.split(0 if comm.rank < 2 else None)
    for mode in ("sync", "async"):
        if part is not None:
            table = Table(part, 5, 4, "int64", init=7, mode=mode)
            table.push(1, ONES[0])
            table.clock()
            part.barrier()
            kept = table.kept_for(comm)
        else:
            kept = Table(comm, 5, 4, "int64", init=9, mode=mode)
        with kept:
            assert kept.pull(1).tolist() == [9] * 4
            assert kept.pull(0).tolist() == [7] * 4
            comm.barrier()
            kept.push(0, ONES[0])
            assert kept.clock() == 2
            comm.barrier()
            assert kept.pull(0).tolist() == [10] * 4
            comm.barrier()
    if part is not None:
        part.close()
