"""Tables on one host: what pushes add up to in each mode, whatever the ranks' order."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.waiting import SOON_S, collect, until

import gpucoll
from gpucoll import (
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    ReduceOp,
    SharedMemoryError,
    StateError,
)
from gpucoll.arrays.numpy_arrays import address_of
from gpucoll.tables import SGD, Adagrad, Staleness, Table, arguments
from gpucoll.transport.shared import ordering
from gpucoll.types import DTYPES

MODES = ("async", "sync", Staleness(0), Staleness(2))
SMALL = dict.fromkeys(("bfloat16", "float8_e4m3fn", "float8_e5m2"), ml_dtypes)


def native(name):
    return np.dtype(getattr(ml_dtypes, name) if name in SMALL else name)


def mode_name(mode):
    return str(mode)


# --- what pushes add up to ------------------------------------------------------------------------


def pushed_sum(comm, mode, n_pushes, size, rows=50, width=3):
    """Push random rows of ones and count them; return whether the table has all of them."""
    generator = np.random.default_rng(comm.rank)
    expected = np.zeros((rows, width), np.int64)
    with Table(comm, rows, width, "int64", mode=mode) as table:
        for number in range(n_pushes):
            ids = generator.integers(0, rows, size)
            values = generator.integers(-9, 9, (size, width))
            np.add.at(expected, ids, values)
            table.push(ids, values)
            if number % 7 == 6:
                table.clock()
        while table.clock() < n_pushes:
            pass
        comm.barrier()
        total = comm.all_reduce(expected)
        found = table.snapshot()
        comm.barrier()
    return bool((found == total).all())


@pytest.mark.parametrize("mode", MODES, ids=mode_name)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_integers_add_up(ranks, count, mode):
    assert all(ranks.call(count, pushed_sum, mode, 20, 200))


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES, ids=mode_name)
def test_ten_million_rows_add_up(ranks, mode):
    assert all(ranks.call(8, pushed_sum, mode, 125, 10_000, timeout_s=60))


@pytest.mark.soak
def test_all_push_to_one_row(ranks):
    assert all(ranks.call(8, pushed_sum, "async", 50, 2_000, 1, 64, timeout_s=60))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(comm, name):
    dtype = native(name)
    with Table(comm, 4, 5, name) as table:
        assert table.dtype == dtype
        values = np.ones((2, 5), dtype)
        table.push([1, 3], values)
        comm.barrier()
        expected = np.zeros((4, 5), dtype)
        expected[[1, 3]] = np.array(1 if name == "bool" else 2).astype(dtype)
        assert (table.snapshot() == expected).all()
        assert table.pull([3]).dtype == dtype
        comm.barrier()


UPDATES: dict[str, Any] = {
    "max": ReduceOp.MAX,
    "prod": ReduceOp.PROD,
    "bor": ReduceOp.BOR,
    "function": lambda row, value: 2 * row + value,
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("update", UPDATES)
def test_updates(comm, update):
    values = np.arange(12).reshape(4, 3)
    with Table(comm, 2, 3, "int64", init=5, update=UPDATES[update]) as table:
        table.push([0, 1, 0, 0], values)
        expected = np.full((2, 3), 5)
        for place, value in zip([0, 1, 0, 0], values, strict=True):
            expected[place] = {
                "max": np.maximum,
                "prod": np.multiply,
                "bor": np.bitwise_or,
                "function": UPDATES["function"],
            }[update](expected[place], value)
        assert (table.snapshot() == expected).all()


@pytest.mark.ranks(1)
def test_gradient_descent(comm):
    start = np.random.default_rng(1).normal(size=(3, 7)).astype(np.float32)
    values = np.random.default_rng(2).normal(size=(5, 7)).astype(np.float32)
    ids = [2, 0, 2, 2, 1]
    with Table(comm, 3, 7, init=start, update=SGD(0.1)) as table:
        table.push(ids, values)
        expected = start.copy()
        for place, value in zip(ids, values, strict=True):
            expected[place] -= np.float32(0.1) * value
        assert table.snapshot().tobytes() == expected.tobytes()
    with Table(comm, 3, 7, init=start, update=Adagrad(0.1, 1e-6)) as table:
        expected, sums = start.copy(), np.zeros((3, 7), np.float32)
        for place, value in zip(ids, values, strict=True):
            table.push(place, value)
            before = sums.copy()
            sums[place] += value * value
            root = np.sqrt(sums[place]) + np.float32(1e-6)
            expected[place] -= np.float32(0.1) * value / root
            kept: Any = table._rows.sums
            assert (kept == sums).all()
            assert (sums >= before).all()
        assert table.snapshot().tobytes() == expected.tobytes()


@pytest.mark.ranks(4)
def test_adagrad_of_ranks_that_push_at_once(comm):
    """All push the same, so that the bits do not depend on who came first."""
    n_pushes, ids = 50, [0, 2, 0, 1]
    alone = comm.split(comm.rank)
    with Table(comm, 3, 5, update="adagrad") as table, Table(alone, 3, 5, update="adagrad") as one:
        sums = np.zeros((3, 5), np.float32)
        for _ in range(n_pushes):
            table.push(ids, np.ones((4, 5), "f4"))
            before, sums = sums, np.array(table._rows.sums)
            assert (sums >= before).all()
        comm.barrier()
        for _ in range(n_pushes * comm.world_size):
            one.push(ids, np.ones((4, 5), "f4"))
        assert table.snapshot().tobytes() == one.snapshot().tobytes()
        assert np.array(table._rows.sums)[:, 0].tolist() == [400, 200, 200]
        comm.barrier()
    alone.close()


# --- modes ----------------------------------------------------------------------------------------


def random_pushes(rank, clock, rows, width):
    generator = np.random.default_rng((rank, clock))
    size = int(generator.integers(0, 40))
    return generator.integers(0, rows, size), generator.normal(size=(size, width)).astype("f4")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("update", ["add", "adagrad", SGD(0.3)], ids=str)
@pytest.mark.parametrize("mode", ["sync", Staleness(0)], ids=mode_name)
def test_sync_has_the_bits_of_one_process(comm, mode, update):
    rows, width, clocks = 17, 6, 5
    alone = comm.split(comm.rank)
    with (
        Table(comm, rows, width, update=update, mode=mode, init=1.5) as table,
        Table(alone, rows, width, update=update, init=1.5) as reference,
    ):
        for clock in range(clocks):
            ids, values = random_pushes(comm.rank, clock, rows, width)
            half = len(ids) // 2
            before = reference.snapshot()
            table.push(ids[:half], values[:half])
            table.push(ids[half:], values[half:])
            assert (table.snapshot() == before).all()  # nothing is seen before the clock
            assert table.clock() == clock + 1
            for rank in range(comm.world_size):
                reference.push(*random_pushes(rank, clock, rows, width))
            assert table.snapshot().tobytes() == reference.snapshot().tobytes()
    alone.close()


def observe(comm, staleness, clocks):
    """Push 1 to a row of one's own in each clock; return what each pull has seen of all ranks."""
    seen = []
    generator = np.random.default_rng(comm.rank)
    with Table(comm, comm.world_size, 1, "int64", mode=Staleness(staleness)) as table:
        for clock in range(clocks):
            for _ in range(int(generator.integers(0, 30))):
                table.pull(0)
            seen.append(table.pull(range(comm.world_size))[:, 0].tolist())
            table.push(comm.rank, np.ones(1, np.int64))
            own = int(table.pull(comm.rank)[0])
            assert own == clock + 1  # a rank reads its own pushes
            assert table.clock() == clock + 1
    return seen


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("count", [2, 4])
def test_the_bound_of_staleness(ranks, count, staleness):
    for seen in ranks.call(count, observe, staleness, 60):
        for clock, counts in enumerate(seen):
            assert min(counts) >= clock - staleness
            assert max(counts) <= clock + staleness + 1


@pytest.mark.ranks(2)
def test_nobody_waits_for_a_rank_that_has_closed(comm):
    with Table(comm, 2, 1, mode=Staleness(1)) as table:
        if comm.rank == 0:
            for _ in range(10):
                table.clock()
    comm.barrier()


@pytest.mark.ranks(2)
def test_who_waits_is_woken_at_once(comm):
    with Table(comm, 2, 1, mode=Staleness(1)) as table:
        table._rows.members._slice[:] = 1000, 0  # a sleep that only a call ends
        for number in range(50):
            assert table.clock() == number + 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("width", [1, 3, 600])
def test_elements_are_never_torn(comm, width):
    """Each element is all zeros or all ones in every pull; a row may be between the two."""
    last = ReduceOp.custom(lambda row, value: value)
    with Table(comm, 3, width, "int64", update=last) as table:
        comm.barrier()
        for number in range(300):
            if comm.rank == 0:
                table.push([0, 1, 2], np.full((3, width), -(number & 1)))
            else:
                seen = table.pull([2, 1, 0])
                assert ((seen == 0) | (seen == -1)).all()
        comm.barrier()


class InterruptingLock:
    """A lock at whose release Ctrl-C comes."""

    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
        raise KeyboardInterrupt


@pytest.mark.ranks(1)
def test_an_interrupt_at_the_beginning_of_a_call(comm):
    table = Table(comm, 2, 1)
    lock, table._lock = table._lock, InterruptingLock()  # type: ignore[assignment]
    calls = (table.clock, table.snapshot, table.torn_rows, lambda: table.pull(0), table.flush)
    for call in calls:
        with pytest.raises(KeyboardInterrupt):
            call()
    table._lock = lock
    table.close()


@pytest.mark.ranks(1)
def test_a_signal_handler_that_closes(comm, monkeypatch):
    table = Table(comm, 2, 1)
    take = table._rows.take

    def interrupted(*arguments):
        with table._lock, pytest.raises(StateError, match="handler that has interrupted a call"):
            table.close()
        take(*arguments)

    monkeypatch.setattr(table._rows, "take", interrupted)
    assert table.pull([1]).tolist() == [[0]]
    table.close()


@pytest.mark.ranks(1)
def test_pushes_of_a_thread_while_another_one_ends_steps(comm):
    with Table(comm, 1, 1, "int64", mode="sync") as table:
        thread = threading.Thread(target=table.clock)

        class Pending(list):
            @property
            def append(self):
                thread.start()
                thread.join(0.1)  # it ends, unless it must wait for the push
                return super().append

        table._pending = Pending()
        table.push(0, np.ones(1, np.int64))
        thread.join(SOON_S)
        table.clock()
        assert table.pull(0).tolist() == [1]


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.ranks(1)
def test_shapes_and_kinds_of_ids(comm):
    start = np.arange(40, dtype=np.float32).reshape(10, 4)
    with Table(comm, 10, 4, init=start) as table:
        assert table.pull(3).tolist() == start[3].tolist()
        assert table.pull(np.int8(3)).shape == (4,)
        assert table.pull([]).shape == (0, 4)
        assert table.pull(range(2)).shape == (2, 4)
        for dtype in ("int8", "uint16", "int32", "uint64"):
            assert (table.pull(np.array([[1, 2], [9, 1]], dtype)) == start[[[1, 2], [9, 1]]]).all()
        strided = np.arange(10)[::-3]
        assert (table.pull(strided) == start[strided]).all()
        out = np.zeros((2, 4, 3), np.float32)[:, :, 1]
        assert table.pull([4, 7], out=out) is out
        assert (out == start[[4, 7]]).all()
        values = np.ones((2, 2, 8), np.float32)[:, :, ::2]
        table.push([[0, 1], [0, 0]], values)
        assert table.pull(0).tolist() == (start[0] + 3).tolist()


@pytest.mark.ranks(1)
def test_rows_that_take_the_place_of_their_ids(comm):
    with Table(comm, 50, 2, "int64", init=1 << 40) as table:
        room = np.arange(100)
        room[50:] = 0
        out = room.reshape(50, 2)
        assert table.pull(room[:50], out=out) is out
        assert (room == 1 << 40).all()


@pytest.mark.ranks(1)
def test_ids_that_change_after_the_check(comm, monkeypatch):
    ids = np.array([1, 3])
    module: Any = arguments
    check = module.place_outside.ctypes

    def changing(*given):
        outside = check(*given)
        ids[:] = 1 << 50
        return outside

    monkeypatch.setattr(arguments, "place_outside", SimpleNamespace(ctypes=changing))
    with Table(comm, 5, 2, init=7) as table:
        assert table.pull(ids).tolist() == [[7, 7]] * 2
        with pytest.raises(ArgumentError, match="1125899906842624"):
            table.pull(ids)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ["int8", "int16", "float32", "complex128"])
def test_widths(comm, name, width):
    start = np.arange(6 * width).reshape(6, width).astype(name)
    with Table(comm, 6, width, name, init=start) as table:
        ids = [5, 0, 3, 3]
        assert (table.pull(ids) == start[ids]).all()
        room = np.full(4 * width + 2, 99, name)
        table.pull(ids, out=room[1:-1].reshape(4, width))
        assert (room[1:-1].reshape(4, width) == start[ids]).all()
        assert room[0] == room[-1] == np.array(99).astype(name)
        table.push(ids, start[ids])
        expected = start.copy()
        np.add.at(expected, ids, start[ids])
        assert (table.snapshot() == expected).all()


@pytest.mark.ranks(2)
def test_init(comm):
    def of_ids(ids):
        return np.stack([ids, ids**2], 1)

    expected = of_ids(np.arange(9_000)).astype("f4")
    for init in (of_ids, expected):
        with Table(comm, 9_000, 2, init=init) as table:
            assert (table.snapshot() == expected).all()
            comm.barrier()
    with Table(comm, 3, 2, init=np.array([1.5, 2])) as table:
        assert table.snapshot().tolist() == [[1.5, 2]] * 3


@pytest.mark.ranks(1)
def test_no_rows(comm):
    with Table(comm, 0, 2) as table:
        assert table.pull([]).shape == (0, 2)
        table.push([], np.ones((0, 2), "f4"))
        assert table.snapshot().shape == (0, 2)
        with pytest.raises(ArgumentError):
            table.pull(0)


# --- mistakes -------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rows": ({"rows": -1}, ArgumentError, "rows must be at least 0; got -1"),
    "float": ({"rows": 2.5}, ArgumentTypeError, "rows must be an int; got 2.5"),
    "width": ({"width": 0}, ArgumentError, "width must be at least 1"),
    "size": ({"rows": 1 << 60}, ArgumentError, "is beyond any memory"),
    "no dtype": ({"dtype": None}, ArgumentTypeError, "dtype must be given, or left out"),
    "dtype": ({"dtype": "datetime64[s]"}, ArgumentTypeError, "dtype must be one of bool"),
    "mode": ({"mode": "lazy"}, ArgumentError, '"async", "sync" or Staleness'),
    "update": ({"update": "adam"}, ArgumentTypeError, "update must be 'add'"),
    "avg": ({"update": ReduceOp.AVG}, ArgumentError, "also changes what is in the row"),
    "sgd": ({"dtype": "int32", "update": "sgd"}, ArgumentTypeError, "not defined for int32"),
    "init": ({"init": np.ones(3)}, ArgumentError, r"init has shape \(3,\)"),
    "kind": ({"dtype": "int32", "init": 0.5}, ArgumentTypeError, "init has dtype float64"),
    "wrapped": ({"dtype": "int8", "init": 300}, ArgumentError, "that int8 does not hold"),
    "negative": ({"dtype": "uint8", "init": [1, -1]}, ArgumentError, "that uint8 does not hold"),
    "complex": ({"init": 1 + 2j}, ArgumentTypeError, "init has dtype complex128"),
    "ragged": ({"init": [[1], [1, 2]]}, ValueError, "inhomogeneous"),
    "array": ({"update": np.ones(3)}, ValueError, "ambiguous"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", BAD)
def test_a_rank_that_makes_it_wrong(comm, case):
    changed, kind, text = BAD[case]
    right: dict[str, Any] = {"rows": 5, "width": 2, "dtype": "float32"}
    if comm.rank == 1:
        with pytest.raises(kind, match=text):
            Table(comm, **{**right, **changed})
    else:
        with pytest.raises(ArgumentError, match=f"rank 1 of 2 raised: .*{text}"):
            Table(comm, **right)
    comm.barrier()


@pytest.mark.ranks(2)
def test_ranks_that_differ(comm):
    with pytest.raises(MismatchError, match="width is 2 on rank 0 of 2, but 3 on rank 1"):
        Table(comm, 5, 2 + comm.rank)
    with pytest.raises(MismatchError, match="update is custom"):
        Table(comm, 5, 2, update=(lambda a, b: a) if comm.rank else (lambda a, b: b))

    def init(ids):
        if comm.rank:
            raise RuntimeError("no luck")
        return [[1, 2], [3]]

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ArgumentError, match=r"init of rows [02] to [14]: "):
        Table(comm, 5, 2, init=init)
    with pytest.raises(ArgumentError, match="init has dtype float64, but the table has int32"):
        Table(comm, 5, 2, "int32", init=lambda ids: np.full((len(ids), 2), 0.5))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.ranks(2)
def test_no_memory(comm):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SharedMemoryError, match="rank 0 of 2 has no memory for table"):
        Table(comm, 1 << 45, 64)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [-1, True, 1.5])
def test_staleness(number):
    with pytest.raises(gpucoll.UsageError, match="Staleness: steps must be"):
        Staleness(number)
    assert Staleness(3) == Staleness(3)


@pytest.mark.parametrize("number", [-1, float("nan"), True, "x"])
def test_rates(number):
    with pytest.raises(gpucoll.UsageError, match="SGD: lr must be"):
        SGD(number)
    with pytest.raises(gpucoll.UsageError, match="Adagrad: epsilon must be"):
        Adagrad(0.1, number)


@pytest.mark.ranks(1)
def test_nothing_changes_if_arguments_are_wrong(comm):
    ones = np.ones((2, 2), "f4")
    with Table(comm, 5, 2) as table:
        cases = (
            ([1, 5], ones, ArgumentError, r"ids\[1\] is 5, but the table has 5 rows, 0 to 4"),
            ([-1, 1], ones, ArgumentError, r"rank 0 of 1: push: ids\[0\] is -1"),
            (np.array([2**64 - 1, 1], "u8"), ones, ArgumentError, "18446744073709551615"),
            ([1.0, 2.0], ones, ArgumentTypeError, "ids must be integers; got float64"),
            ([1, [2, 3]], ones, ArgumentTypeError, "ids must be integers in lists of equal"),
            ([True, False], ones, ArgumentTypeError, "ids must be integers; got bool"),
            (np.ma.array([1, 2], mask=[False, True]), ones, ArgumentTypeError, "ids is a masked"),
            ({1, 2}, ones, ArgumentTypeError, "ids must be an array"),
            ([1, 2], ones.astype("f8"), ArgumentTypeError, "dtype float64, but the table"),
            ([1, 2], ones[0], ArgumentError, r"shape \(2,\), but the ids need \(2, 2\)"),
            ([1, 2], [1, 2], ArgumentTypeError, "values must be an array"),
        )
        for ids, values, kind, text in cases:
            with pytest.raises(kind, match=text):
                table.push(ids, values)
        with pytest.raises(ArgumentError, match=r"pull: ids\[1, 0\] is 7"):
            table.pull([[1], [7]])
        with pytest.raises(ArgumentTypeError, match="out has dtype float64"):
            table.pull([1], out=np.ones((1, 2)))
        with pytest.raises(ArgumentError, match=r"out has shape \(3, 2\)"):
            table.pull([1], out=np.ones((3, 2), "f4"))
        assert not table.snapshot().any()


# --- the end --------------------------------------------------------------------------------------


def mapped():
    with open("/proc/self/maps") as file:
        return "gpucoll-table" in file.read()


@pytest.mark.ranks(2)
def test_close(comm):
    before = len(os.listdir("/proc/self/fd"))
    table = Table(comm, 5, 2)
    assert mapped()
    table.close()
    table.close()
    assert not mapped()
    assert len(os.listdir("/proc/self/fd")) == before
    calls = (table.clock, table.snapshot, table.torn_rows, lambda: table.kept_for(comm))
    for call in (lambda: table.pull(0), lambda: table.push(0, np.ones(2, "f4")), *calls):
        with pytest.raises(StateError, match=r"of 2: .*the table is closed"):
            call()
    comm.barrier()


@pytest.mark.ranks(2)
def test_one_that_is_closed_on_a_rank_is_kept_by_none(comm):
    table = Table(comm, 5, 2)
    if comm.rank == 1:
        table.close()
    with pytest.raises((StateError, ArgumentError), match=r"rank 1 of 2: kept_for: .* is closed"):
        table.kept_for(comm)
    table.close()
    comm.barrier()


@pytest.mark.ranks(1)
def test_a_forked_child_that_drops_the_table(comm):
    table = Table(comm, 5, 2)
    members = table._rows.members
    pid = os.fork()
    if pid == 0:
        del table
        collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (members._own.closed, members._own.pid) == (0, os.getpid())
    table.close()


@pytest.mark.ranks(1)
def test_a_call_of_another_thread_delays_close(comm):
    table = Table(comm, 5, 2)
    lock = address_of(table._rows._locks) + 8 * 3
    ordering.store(lock, table._rows._mine)  # as if another thread of this rank were pushing there
    thread = threading.Thread(target=table.push, args=(3, np.ones(2, "f4")))
    thread.start()
    until(lambda: table._calls)
    with pytest.raises(StateError, match="another thread is in a call on this table"):
        table.close()
    ordering.store(lock, 0)
    thread.join(SOON_S)
    assert table.pull(3).tolist() == [1, 1]
    table.close()


@pytest.mark.ranks(1)
def test_a_table_that_is_dropped(comm):
    table = Table(comm, 5, 2)
    del table
    collect()
    assert not mapped()


@pytest.mark.ranks(1)
def test_a_forked_child(comm):
    with Table(comm, 5, 2) as table:
        pid = os.fork()
        if pid == 0:
            try:
                table.push(0, np.ones(2, "f4"))
            except StateError as error:
                table.close()
                os._exit(0 if "was forked from rank 0 of 1" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        table.push(0, np.ones(2, "f4"))
        assert table.pull(0).tolist() == [1, 1]


@pytest.mark.ranks(2)
def test_threads(comm):
    with Table(comm, 3, 4, "int64") as table:

        def push():
            for _ in range(200):
                table.push([0, 1, 0], np.ones((3, 4), np.int64))

        threads = [threading.Thread(target=push) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
        comm.barrier()
        assert table.snapshot()[:, 0].tolist() == [2400, 1200, 0]
        comm.barrier()
