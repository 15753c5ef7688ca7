"""Tables of several hosts: the same results as on one host, in every mode, through losses."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.certificates import Authority
from tests.growing import begin, where
from tests.shrinking import LOSSES, die, results, until_lost
from tests.shrinking import fresh_on_hosts as fresh
from tests.waiting import SOON_S, is_stopped, thread_names, until

import gpucoll
from gpucoll.arrays.numpy_arrays import address_of
from gpucoll.errors import AbortedError, ArgumentError, DeadlineError, PeerLostError, StateError
from gpucoll.tables import Adagrad, RowsLostError, Staleness, Table, serving
from gpucoll.transport.shared import ordering

__all__ = ["fresh"]

ROWS, WIDTH = 500, 3
INITIAL = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)
MODES = ["async", "sync", Staleness(2)]


def drawn(rank, step, size=400):
    """Return ids and integers that a rank pushes in a step; some ids occur twice."""
    draw = np.random.default_rng((rank, step))
    return draw.integers(0, ROWS, size), draw.integers(-9, 10, (size, WIDTH))


def sum_of(ranks, steps):
    total = np.zeros((ROWS, WIDTH), int)
    for rank in range(ranks):
        for step in range(steps):
            np.add.at(total, *drawn(rank, step))
    return total


# --- what comes out -------------------------------------------------------------------------------


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("placed", ["aab", "abc", "ab", "abba"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_integers_add_up_exactly(hosts, placed, mode):
    def on_each(comm):
        with Table(comm, ROWS, WIDTH, "int64", mode=mode) as table:
            for step in range(12):
                ids, values = drawn(comm.rank, step)
                table.push(ids, values)
                assert table.pull(ids[:20]).shape == (20, WIDTH)
                if step % 3 == 2:
                    table.clock()
            table.flush()
            comm.barrier()
            return table.snapshot()

    for whole in hosts.call(placed, on_each):
        assert (whole == sum_of(len(placed), 12)).all()


def test_over_tls(hosts, tmp_path):
    def on_each(comm):
        assert comm._group.is_encrypted
        with Table(comm, ROWS, WIDTH, "int64") as table:
            for step in range(3):
                table.push(*drawn(comm.rank, step, 20_000))
            table.flush()
            comm.barrier()
            return table.snapshot()

    variables = Authority(tmp_path / "ours").environment()
    expected = np.zeros((ROWS, WIDTH), int)
    for rank in range(2):
        for step in range(3):
            np.add.at(expected, *drawn(rank, step, 20_000))
    for whole in hosts.call("ab", on_each, environment=variables):
        assert (whole == expected).all()


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_ten_million_rows_add_up_exactly(hosts, mode):
    def on_each(comm):
        counts = np.zeros(ROWS, int)
        with Table(comm, ROWS, 1, "int64", mode=mode) as table:
            draw = np.random.default_rng(comm.rank)
            for _ in range(34):
                ids = draw.integers(0, ROWS, 100_000)
                table.push(ids, np.ones((len(ids), 1), int))
                counts += np.bincount(ids, minlength=ROWS)
                table.clock()
            table.flush()
            comm.barrier()
            return counts, table.snapshot()[:, 0]

    found = hosts.call("aab", on_each)
    total = sum(counts for counts, _ in found)
    assert total.sum() > 10_000_000
    assert all((whole == total).all() for _, whole in found)


@pytest.mark.parametrize("mode", ["sync", Staleness(0)], ids=str)
def test_in_step_the_bits_are_those_of_one_process(hosts, mode):
    placed, steps = "aab", 5

    def pushed(rank, step):
        ids, values = drawn(rank, step)
        return ids, (values / 7).astype(np.float32)

    def on_each(comm):
        how: Any = {"init": 0.25, "update": Adagrad(0.1), "mode": mode}
        with Table(comm, ROWS, WIDTH, "float32", **how) as table:
            for step in range(steps):
                ids, values = pushed(comm.rank, step)
                table.push(ids[:100], values[:100])
                table.push(ids[100:], values[100:])
                table.clock()
            return table.snapshot()

    def alone(comm):
        how: Any = {"init": 0.25, "update": Adagrad(0.1), "mode": "async"}
        with Table(comm, ROWS, WIDTH, "float32", **how) as table:
            for step in range(steps):
                for rank in range(len(placed)):
                    table.push(*pushed(rank, step))
            return table.snapshot()

    expected = hosts.call("a", alone)[0]
    assert (expected != 0.25).any()
    for whole in hosts.call(placed, on_each):
        assert whole.tobytes() == expected.tobytes()


@pytest.mark.parametrize("placed", ["aab", "abc"])
def test_staleness_between_hosts(hosts, placed):
    staleness, clocks = 2, 10

    def on_each(comm):
        seen = []
        with Table(comm, 40, 1, "int64", mode=Staleness(staleness)) as table:
            ids = np.arange(40)
            for clock in range(clocks):
                found = table.pull(ids)[:, 0]
                others = comm.world_size - 1
                assert found.min() >= clock + others * max(0, clock - staleness)
                seen.append(int(found.max()) - clock)
                table.push(ids, np.ones((40, 1), int))
                assert table.clock() == clock + 1
        return seen

    for seen in hosts.call(placed, on_each):
        others = len(placed) - 1
        assert all(ahead <= others * (clock + 1 + staleness) for clock, ahead in enumerate(seen))


def test_kinds_of_init_and_arrays(hosts):
    whole = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)

    def on_each(comm):
        found = []
        for init in (None, 1.5, whole[7], whole, lambda ids: whole[ids]):
            with Table(comm, ROWS, WIDTH, init=init) as table:
                found.append(table.snapshot())
                assert table.lost_rows.tolist() == []
        with Table(comm, ROWS, WIDTH, "float32", init=whole) as table:
            ids = np.array([[3, 499], [3, 0]])
            assert (table.pull(ids) == whole[ids]).all()
            assert (table.pull(499) == whole[499]).all()
            assert table.pull([]).shape == (0, WIDTH)
            out = np.zeros((2, 2, WIDTH), np.float32)
            assert table.pull(ids, out=out) is out
            assert (out == whole[ids]).all()
            with pytest.raises(ArgumentError, match="is 500, but the table has 500 rows"):
                table.pull([1, 500])
        return found

    for found in hosts.call("aab", on_each):
        for got, expected in zip(found, (0, 1.5, whole[7], whole, whole), strict=True):
            assert (got == expected).all()


def test_several_threads(hosts):
    def on_each(comm):
        with Table(comm, ROWS, WIDTH, "int64") as table:

            def work(number):
                for step in range(5):
                    table.push(*drawn(comm.rank, 5 * number + step))
                    table.pull(np.arange(0, ROWS, 7))

            threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            table.flush()
            comm.barrier()
            return table.snapshot()

    for whole in hosts.call("ab", on_each):
        assert (whole == sum_of(2, 20)).all()


# --- losses ---------------------------------------------------------------------------------------


def lose_and_keep(comm, victims, mode):
    """Push, lose ranks, and keep the table: return what a rank has seen before and afterwards."""
    table = Table(comm, ROWS, WIDTH, "int64", init=INITIAL, mode=mode)
    table.push(*drawn(comm.rank, 0))
    table.clock()
    table.flush()
    of_host = [table._owners.owned_by(host) for host in range(len(table._owners.hosts))]
    comm.barrier()
    before = table.snapshot()
    comm.barrier()
    if comm.rank in victims:
        die()
    error = None
    while error is None:
        try:
            table.pull(np.arange(ROWS))
        except PeerLostError as raised:
            error = raised
    until_lost(comm)
    with comm.shrink() as left:
        with table.kept_for(left) as kept:
            kept.push([1], np.zeros((1, WIDTH), int))
            kept.clock()
            assert (kept.pull(np.arange(ROWS)) == kept.snapshot()).all()
            left.barrier()
            after = kept.snapshot()
        assert "gpucoll-table" not in thread_names()
        return before, after, kept.lost_rows, error, of_host


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    ("placed", "victims", "gone"),
    [
        ("abc", [2], [2]),
        ("aab", [2], [1]),
        ("abc", [0], [0]),
        ("aabb", [2], []),  # the rank that served: the other one of its host does
        ("aabbb", [3, 4], []),
        ("aabb", [2, 3], [1]),
    ],
)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_lost_host_loses_its_rows_alone(fresh, placed, victims, gone, mode):
    for found in results(fresh(placed, lose_and_keep, victims, mode), victims):
        before, after, lost, error, of_host = found
        assert (before == INITIAL + sum_of(len(placed), 1)).all()
        assert lost.tolist() == [row for host in gone for row in of_host[host].tolist()]
        before[lost] = INITIAL[lost]
        assert (after == before).all()
        if gone and len(victims) == 1:
            assert type(error) is RowsLostError
            assert error.lost_rows.tolist() == lost.tolist()
            assert f"{len(lost)} of the table's {ROWS} rows were on its host" in str(error)
        else:
            assert "loses no row as long as one of rank" in str(error)


def test_pushes_that_were_not_applied_are_repeated_once(fresh):
    """A rank is stopped while others push to it, and another host is lost meanwhile."""

    def on_each(comm):
        table = Table(comm, ROWS, WIDTH, "int64")
        comm.barrier()
        there = table._owners.owned_by(1)
        pids = comm.all_gather(os.getpid()).tolist()
        if comm.rank == 0:
            table.push(there, np.ones((len(there), WIDTH), int))
            table.flush()
            os.kill(pids[1], signal.SIGSTOP)
            until(lambda: is_stopped(pids[1]))
            for _ in range(10):
                table.push(there, np.ones((len(there), WIDTH), int))
            os.kill(pids[2], signal.SIGKILL)
            os.kill(pids[1], signal.SIGCONT)
        if comm.rank == 2:
            signal.pause()
        until_lost(comm)
        with table.kept_for(comm.shrink()) as kept:
            kept.flush()
            kept._comm.barrier()
            return kept.pull(there)

    for found in results(fresh("abc", on_each), [2]):
        assert (found == 11).all()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("placed", ["abcd", "aabbc"])
def test_losses_at_random_moments(fresh, placed, seed):
    """Ranks that only serve are killed; each push of the others is there once, unless it raised."""
    victims = np.random.default_rng(seed).permutation(len(placed) - 1)[:1].tolist()
    if placed == "abcd":
        victims.append(len(placed) - 1)

    def on_each(comm):
        draw = np.random.default_rng((seed, comm.rank))
        sure, unsure, lost = np.zeros(ROWS, int), np.zeros(ROWS, int), []
        first, table = comm.rank, Table(comm, ROWS, 1, "int64")
        one = np.ones((1, 1), int)
        for victim in victims:
            moment_s = float(np.random.default_rng((seed, victim)).uniform(0, 0.1))
            if first == victim:
                threading.Timer(moment_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
                signal.pause()
            row = np.array([0])
            with contextlib.suppress(*LOSSES):
                while True:
                    table.flush()
                    while first not in victims and draw.random() < 0.9:
                        row = draw.integers(0, ROWS, 1)
                        table.push(row, one)
                        sure[row] += 1
            unsure[row] += 1  # counted twice if it was the flush that has raised
            while True:
                with contextlib.suppress(*LOSSES):  # perhaps the next one is lost meanwhile
                    comm = comm.shrink()
                    table = table.kept_for(comm)
                    break
            lost.append(table.lost_rows)
            sure[lost[-1]] = unsure[lost[-1]] = 0
        table.flush()
        comm.barrier()
        whole = table.snapshot()[:, 0]
        table.close()
        sure, unsure = comm.all_reduce(sure), comm.all_reduce(unsure)
        comm.close()
        return whole, sure, unsure, [len(each) for each in lost]

    for whole, sure, unsure, lost in results(fresh(placed, on_each), victims):
        assert ((sure <= whole) & (whole <= sure + unsure)).all()
        assert sure.sum() > 0
        assert len(lost) == len(victims)


def test_a_stopped_host_stops_no_other(fresh):
    def on_each(comm):
        table: Any = Table(comm, ROWS, WIDTH, "int64")
        pids = comm.all_gather(os.getpid()).tolist()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            until(lambda: is_stopped(pids[2]))
            start_s = time.monotonic()
            theirs = table._owners.owned_by(1 - comm.rank)
            for _ in range(10):
                table.push(theirs, np.ones((len(theirs), WIDTH), int))
                table.flush()
                table.pull(theirs)
            assert time.monotonic() - start_s < SOON_S
            table._between.requests.timeout_s = 0.1
            with pytest.raises(DeadlineError, match="which serves the rows of host host c: is it"):
                table.pull(np.arange(ROWS))
            comm.send(1, 1 - comm.rank)
            comm.recv(source=1 - comm.rank)
            if comm.rank == 0:
                os.kill(pids[2], signal.SIGCONT)
            table._between.requests.timeout_s = 20.0
            assert (table.pull(theirs) == 10).all()
        table.close()

    results(fresh("abc", on_each))


@pytest.mark.soak
def test_a_stopped_host_is_left_behind(fresh):
    def on_each(comm):
        table = Table(comm, ROWS, WIDTH, "int64", init=3)
        pids = comm.all_gather(os.getpid()).tolist()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
            with contextlib.suppress(*LOSSES):
                table.pull(np.arange(ROWS))
            with pytest.raises(LOSSES):
                table.pull(np.arange(ROWS))
            table.close()
            return None
        until(lambda: is_stopped(pids[2]))
        with pytest.raises(DeadlineError):
            comm.all_reduce(1, timeout_s=0.3)
        with comm.shrink(timeout_s=0.5) as left, table.kept_for(left) as kept:
            kept.push(np.arange(ROWS), np.ones((ROWS, WIDTH), int))
            kept.flush()
            left.barrier()
            if left.rank == 0:
                os.kill(pids[2], signal.SIGCONT)
            return len(kept.lost_rows), kept.snapshot()

    for lost, whole in results(fresh("abc", on_each))[:2]:
        assert 100 < lost < 250
        assert (whole == 5).all()


def test_a_clock_that_waits_for_a_lost_host_is_an_error(fresh):
    def on_each(comm):
        table = Table(comm, ROWS, WIDTH, mode=Staleness(1))
        table.clock()
        comm.barrier()
        if comm.rank == 1:
            die()
        with contextlib.suppress(PeerLostError):
            table.clock()
        with pytest.raises(PeerLostError, match="lost rank 1"):
            table.clock()
        start_s = time.monotonic()
        table.close()
        return time.monotonic() - start_s

    assert results(fresh("ab", on_each), [1])[0] < SOON_S


# --- more hosts -----------------------------------------------------------------------------------


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("placed", ["ab", "aab", "aba", "abc", "aaa"])
def test_rows_move_to_hosts_that_join(hosts, placed):
    n_old = 2

    def on_each(seat):
        given: Any = {"init": 5, "update": "adagrad"}
        place = where(seat)
        if seat.rank >= n_old:
            comm = gpucoll.join(**place, timeout_s=20.0)
            table = Table(comm, ROWS, WIDTH, "float64", **given)
            before = None
        else:
            comm = begin(seat, n_old)
            old = Table(comm, ROWS, WIDTH, "float64", **given)
            ids, values = drawn(comm.rank, 0)
            old.push(ids, values.astype(float))
            old.flush()
            comm.barrier()
            before = old.snapshot()
            comm.barrier()
            comm = comm.grow(**place, wait_s=15.0, at_most=seat.world_size - n_old)
            table = old.kept_for(comm)
        after = table.snapshot()
        comm.barrier()
        mine = np.arange(comm.rank, ROWS, comm.world_size)
        table.push(mine, np.ones((len(mine), WIDTH)))
        table.flush()
        comm.barrier()
        pushed = table.snapshot()
        table.close()
        comm.close()
        return before, after, pushed, table.lost_rows

    found = hosts.call(placed + ("" if len(placed) > 2 else "c"), on_each, gives="seat")

    before = found[0][0]
    for _, after, pushed, lost in found:
        assert (after == before).all()
        assert (pushed < after).all()  # Adagrad's sums have moved, too: it makes smaller steps
        assert (pushed[before == 5] > pushed[before == 5].max() - 1e-12).all()
        assert len(lost) == 0


def test_nothing_is_left_over(hosts):
    def on_each(comm):
        def left():
            fds = len(os.listdir("/proc/self/fd"))
            with open("/proc/self/maps") as file:
                return fds, sum("gpucoll" in line for line in file), thread_names()

        def use():
            with Table(comm, ROWS, WIDTH) as table:
                table.push([1], np.ones((1, WIDTH), np.float32))
                table.pull([1])
            comm.barrier()

        use()  # loads the compiled loops, which stay
        before = left()
        for _ in range(3):
            use()
        until(lambda: left()[0] <= before[0])  # a connection ends when the other rank ends it, too
        assert left()[1:] == before[1:]

    hosts.call("aab", on_each)


def test_ctrl_c_in_a_pull(hosts):
    def on_each(comm):
        table: Any = Table(comm, ROWS, WIDTH, "int64")
        comm.barrier()
        if comm.rank == 0:
            table._between.stop()
            comm.barrier()
        else:
            comm.barrier()
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            start_s = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                table.pull(np.arange(ROWS))
            assert time.monotonic() - start_s < SOON_S
            signal.signal(signal.SIGALRM, before)
        comm.barrier()
        table._close(False)
        assert "gpucoll-table" not in thread_names()

    hosts.call("ab", on_each)


def held_up_by_a_lock(comm, timeout_s):
    """The thread that serves, of rank 0, waits for a row's lock, which rank 1 does not release."""
    table: Any = Table(comm, ROWS, 1, "int64")
    rows, looks = table._rows, []
    rows.members.timeout_s = timeout_s
    if comm.rank == 1:
        ordering.store(address_of(rows._locks), rows._mine)
    comm.barrier()
    if comm.rank == 2:
        table.push(table._owners.owned_by(0)[0], np.ones(1, np.int64))
    if comm.rank == 0:
        look_at = rows._look_at

        def noted(*given):
            looks.append(1)
            look_at(*given)

        rows._look_at = noted
        until(lambda: looks)
    return table


def test_close_while_a_push_of_another_host_waits_for_a_lock(hosts):
    def on_each(comm):
        table = held_up_by_a_lock(comm, 1000.0)
        if comm.rank == 0:
            start_s = time.monotonic()
            table._close(False)
            assert time.monotonic() - start_s < 4
            assert "gpucoll-table" not in thread_names()
        comm.barrier()
        table._close(False)

    hosts.call("aab", on_each)


def test_close_while_the_thread_is_in_a_long_push(hosts, monkeypatch):
    def on_each(comm):
        table: Any = Table(comm, ROWS, 1, "int64")
        began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
        if comm.rank == 0:
            rows = table._rows
            apply = rows.apply

            def long(*given):
                began.set()
                goes_on.wait(SOON_S)
                apply(*given)
                ended.set()

            rows.apply = long
        comm.barrier()
        if comm.rank == 1:
            table.push(table._owners.owned_by(0), np.ones((table._owners.counts[0], 1), np.int64))
        else:
            assert began.wait(SOON_S)
            monkeypatch.setattr(serving, "ENDS_S", 0.05)
            table._close(False)
            goes_on.set()
            assert ended.wait(SOON_S)
            until(lambda: "gpucoll-table" not in thread_names())
        comm.barrier()
        table._close(False)

    hosts.call("ab", on_each)


def test_a_lock_that_stays_is_an_error_on_all_hosts(hosts):
    def on_each(comm):
        table = held_up_by_a_lock(comm, 0.1)
        if comm.rank == 0:
            until(lambda: table._between._server.error)
        comm.barrier()
        text = "rank 1 has held the lock of row 0" if comm.rank == 0 else "rank 0 aborted it"
        with pytest.raises((StateError, AbortedError), match=text):
            table.pull(np.arange(ROWS))
        comm.barrier()
        table._close(False)

    hosts.call("aab", on_each)


def test_loss_errors_are_losses():
    assert issubclass(RowsLostError, LOSSES)
