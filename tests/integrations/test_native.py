"""Calls from compiled code in threads without the interpreter, as XLA and TensorFlow make them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import numpy as np
import pytest

import gpucoll
from gpucoll import ArgumentTypeError, StateError
from gpucoll.entries.native import NativeArray
from gpucoll.integrations.native import chosen, door_of

_WORD = ctypes.c_int64
_RUN = ctypes.CFUNCTYPE(_WORD, *[_WORD] * 5)
_RUN_LIST = ctypes.CFUNCTYPE(_WORD, *[_WORD] * 3)
ALIKE = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scan", "exclusive_scan"]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]


def text_at(address):
    return ctypes.string_at(address).decode() if address else None


def run(site, x, out):
    """Make a call as compiled code does; return the error's text."""
    dimensions = (_WORD * max(x.ndim, 1))(*x.shape)
    where = x.ctypes.data, out.ctypes.data, x.ndim, ctypes.addressof(dimensions)
    return text_at(_RUN(site.words.run)(site.address, *where))


def run_list(site, xs, outs):
    rows, kept = (_WORD * (NativeArray.n_words * len(xs)))(), []
    for number, (x, out) in enumerate(zip(xs, outs, strict=True)):
        kept.append((_WORD * max(x.ndim, 1))(*x.shape))
        start = number * NativeArray.n_words
        row = [x.ctypes.data, out.ctypes.data, x.ndim, ctypes.addressof(kept[-1])]
        rows[start : start + NativeArray.n_words] = row
    return text_at(_RUN_LIST(site.words.run_list)(site.address, ctypes.addressof(rows), len(xs)))


def only_compiled(door):
    """Forbid calls to go through Python."""

    def refuse(*_):
        raise AssertionError("compiled code did not make this call")

    for site in door._sites.values():
        site.call = refuse


@pytest.mark.parametrize("name", ALIKE + ROOTED)
@pytest.mark.ranks(3)
def test_every_collective(comm, name):
    door = door_of(comm)
    x = np.arange(18, dtype=np.float32).reshape(6, 3) + comm.rank
    for root in range(3) if name in ROOTED else [None]:
        site = door.site(name, "float32", root=root)
        rooted = {} if root is None else {"root": root}
        given = x if name != "scatter" or comm.rank == root else None
        like = np.empty((2, 3), np.float32)
        expected = getattr(comm, name)(given, **rooted, **({"out": like} if given is None else {}))
        rows = {"all_gather": 18, "gather": 18, "reduce_scatter": 2, "scatter": 2}.get(name, 6)
        only_compiled(door)
        for _ in range(2):
            out = np.full((rows, 3), -1, np.float32)
            assert run(site, x, out) is None
            assert np.array_equal(out, np.full_like(out, -1) if expected is None else expected)


@pytest.mark.ranks(2)
def test_what_arrays_may_be(comm):
    door = door_of(comm)
    for dtype in ("float16", "int8", "complex64", "float64", "bool"):
        site = door.site("all_reduce", dtype, "max" if dtype == "bool" else "sum")
        for shape in ((), (0, 3), (1,), (5,) * 6):
            x = np.ones(shape, dtype)
            out = np.empty_like(x)
            assert run(site, x, out) is None
            assert np.array_equal(out, comm.all_reduce(x, site.op))
            assert run(site, x, x) is None  # in place
            assert np.array_equal(out, x)


@pytest.mark.ranks(1)
def test_an_error_may_have_any_text(comm):
    def fail(*_):
        raise OSError("no file \udcff")

    site = door_of(comm).python_site(fail)
    assert run(site, np.zeros(1), np.zeros(1)) == "OSError: no file ?"


@pytest.mark.ranks(2)
def test_lists_are_one_call(comm):
    site = door_of(comm).site("all_reduce_list", "float32", "avg")
    xs = [np.full((count, 2), comm.rank, np.float32) for count in (1, 0, 7, 1000)]
    for _ in range(2):
        outs = [np.empty_like(x) for x in xs]
        assert run_list(site, xs, outs) is None
        assert all((out == 0.5).all() for out in outs)


@pytest.mark.ranks(2)
def test_errors_are_texts_and_calls_go_on(comm):
    door = door_of(comm)
    site, out = door.site("all_reduce", "float32"), np.zeros(8, np.float32)
    text = run(site, np.ones(4 + comm.rank, np.float32), out)
    assert text.startswith("MismatchError: the ranks did not make the same call")
    assert "shape (4,)" in text
    assert "shape (5,)" in text
    assert not out.any()
    text = run(door.site("reduce_scatter", "float32"), np.ones(3, np.float32), out)
    assert "must be divisible by 2" in text
    first, second = (door.site("all_reduce", "float32", label=label) for label in (1, 2))
    for _ in range(2):
        text = run(first if comm.rank else second, out, out)
        assert "which operator of a compiled program this is" in text
    assert run(site, np.ones(8, np.float32), out) is None
    assert (out == 2).all()


@pytest.mark.ranks(2)
def test_threads_wait_for_each_other(comm):
    door = door_of(comm)
    site, outs = door.site("all_reduce", "int64"), np.zeros((4, 100, 1000), np.int64)
    texts: list[str | None] = []

    def call(mine):
        texts.extend(run(site, np.ones(1000, np.int64), out) for out in mine)

    threads = [threading.Thread(target=call, args=[mine]) for mine in outs]
    for thread in threads:
        thread.start()
    for _ in range(100):
        comm.barrier()  # the program's own calls do not meet those of its threads
    for thread in threads:
        thread.join()
    assert not any(texts)
    assert (outs == 2).all()


@pytest.mark.ranks(2)
def test_a_python_call_and_the_end(comm):
    mine = comm.duplicate()
    door, seen = door_of(mine), []
    assert door_of(mine) is door
    site = door.python_site(lambda source, destination, shape: seen.append(shape))
    x = np.ones((2, 3))
    assert run(site, x, x) is None
    assert seen == [(2, 3)]
    reduces = door.site("all_reduce", "float64")
    assert run(reduces, x, x) is None
    door.before_close.append(lambda timeout_s: seen.append(()))
    mine.close()
    assert len(seen) == 2
    assert run(reduces, x, x).startswith("StateError: all_reduce: the communicator of rank")


@pytest.mark.ranks(2)
def test_an_interrupt_ends_a_wait(comm):
    mine = comm.duplicate()
    site, x = door_of(mine).site("all_reduce", "float64"), np.ones(3)
    assert run(site, x, x) is None
    comm.barrier()
    texts = []
    if comm.rank == 1:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            texts.append(run(site, x, x))
        timer.join()
    comm.barrier()
    if comm.rank == 0:
        assert "rank 1 was interrupted in all_reduce" in str(run(site, x, x))
    mine.close()


@pytest.mark.ranks(2)
def test_bad_input(comm):
    door = door_of(comm)
    with pytest.raises(ArgumentTypeError, match="Python objects"):
        door.site("all_reduce", object)
    with pytest.raises(ArgumentTypeError, match="band is not defined for float32"):
        door.site("all_reduce", "float32", "band")
    with pytest.raises(gpucoll.ArgumentError, match="root must be a rank, 0 to 1; got 2"):
        door.site("broadcast", "float32", root=2)
    with pytest.raises(ArgumentTypeError, match=r"must be a gpucoll\.Communicator"):
        chosen(3, "all_reduce")  # type: ignore[arg-type]
    assert chosen(comm, "all_reduce") is comm
    closed = comm.duplicate()
    closed.close()
    with pytest.raises(StateError, match="is closed"):
        chosen(closed, "all_reduce")


@pytest.mark.parametrize("label", [0, 5])
def test_a_first_call_between_hosts(hosts, label):
    """The leaders' Python makes it, the compiled code of the other ranks theirs."""

    def call(comm):
        door = door_of(comm)
        x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
        site = door.site("all_reduce", "float32", label=label)
        texts = [run(site, x, out) for _ in range(3)]
        large = np.ones(3 << 20, np.float32)  # goes by a schedule, in Python
        texts += [run(site, large, large) for _ in range(2)]
        listed = door.site("all_reduce_list", "float32", label=label)
        texts += [run_list(listed, [x, x[:2]], [x.copy(), out[2:].copy()])]
        differs = door.site("all_reduce", "float32", label=label + comm.rank // 2)
        return texts, out.tolist(), large[::99999].tolist(), run(differs, x, out)

    for texts, out, large, text in hosts.call("aabb", call):
        assert texts == [None] * 6
        assert out == [0.0, 4.0, 8.0, 12.0]
        assert set(large) == {16.0}
        assert text.startswith("MismatchError: the ranks did not make the same call")
