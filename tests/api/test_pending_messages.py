"""Messages that are pending: beside collectives, in the order posted, and how they fail."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from tests.messages import choose_way, held, place
from tests.waiting import until

from gpucoll import ANY_SOURCE, ANY_TAG
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    MismatchError,
    StateError,
)

SIZES = (3, 2000, 300_000)
WAYS = ("private", "streamed", "shared")


# --- beside collectives -------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2, 3)
def test_a_pending_receive_holds_no_collective_up(comm, way):
    """The send comes before the collective on one side, and behind it on the other."""
    choose_way(comm, way)
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for count in SIZES:
        x, out = place(comm, way, count, "i4"), place(comm, way, count, "i4")
        x[:] = comm.rank
        work = comm.recv(out, left, 5, async_op=True)
        if comm.rank % 2:
            comm.send(x, right, 5)
        assert comm.all_reduce(1) == comm.world_size
        if comm.rank % 2 == 0:
            comm.send(x, right, 5)
        assert work.wait() is out
        assert (out == left).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2)
def test_a_pending_send_holds_no_collective_up(comm, way):
    choose_way(comm, way)
    for count in SIZES:
        x = place(comm, way, count, "f8")
        if comm.rank == 0:
            x[:] = count
            work = comm.send(x, 1, async_op=True)
            comm.barrier()
            work.wait()
        else:
            comm.barrier()
            assert (comm.recv(x, 0) == count).all()


@pytest.mark.ranks(3)
def test_a_sparse_exchange(comm):
    """Nobody knows who sends to whom: sends, then a barrier while receiving goes on."""
    x = np.full(50_000, comm.rank)
    sends = [
        comm.send(x, dest, 1, synchronous=True, async_op=True)
        for dest in range(comm.rank + 1, comm.world_size)
    ]
    got, everyone = [], None
    while everyone is None or not everyone.done():
        if (message := comm.probe(ANY_SOURCE, 1, wait=False)) is not None:
            assert (message.recv() == message.source).all()
            got.append(message.source)
        if everyone is None and all(work.done() for work in sends):
            everyone = comm.all_reduce(np.zeros(1), async_op=True)
    assert sorted(got) == list(range(comm.rank))
    comm.barrier()


# --- order --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_posted_receives_are_served_in_the_order_posted(comm):
    asked = [(ANY_SOURCE, 1), (0, ANY_TAG), (0, 1), (ANY_SOURCE, ANY_TAG), (0, 2)]
    if comm.rank == 1:
        outs = [np.zeros(1, int) for _ in asked]
        works = [
            comm.recv(out, source, tag, async_op=True)
            for out, (source, tag) in zip(outs, asked, strict=True)
        ]
        comm.barrier()
        for work in reversed(works):
            work.wait()
        assert [int(out[0]) for out in outs] == [1, 0, 3, 2, 4]
        assert [work.message.tag for work in works] == [1, 2, 1, 2, 2]
    else:
        comm.barrier()
        for number, tag in enumerate((2, 1, 2, 1, 2)):
            comm.send(np.array([number]), 1, tag)
    comm.barrier()


@pytest.mark.ranks(2)
def test_probe_never_tells_of_what_a_posted_receive_gets(comm):
    x = np.ones(4)
    for _ in range(200):
        if comm.rank == 0:
            comm.barrier()
            comm.send(x, 1, 5)
            continue
        work = comm.recv(np.empty(4), 0, 5, async_op=True)
        comm.barrier()
        while not work.done():
            assert comm.probe(ANY_SOURCE, ANY_TAG, wait=False) is None
        assert (work.wait() == 1).all()


@pytest.mark.ranks(2)
def test_any_thread_may_begin_messages(comm):
    """They count in the order begun; works are waited for in other threads, too."""
    peer, n_threads, n_messages = 1 - comm.rank, 4, 100
    errors = []

    def exchange(tag):
        try:
            works = []
            for number in range(n_messages):
                works.append(comm.recv(np.empty(2, int), peer, tag, async_op=True))
                comm.send(np.array([tag, number]), peer, tag, async_op=True)
            for number, work in enumerate(works):
                assert work.wait(20).tolist() == [tag, number]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(n_threads)]
    for thread in threads:
        thread.start()
    assert comm.all_reduce(1) == 2
    for thread in threads:
        thread.join(60)
    assert not errors
    comm.barrier()


# --- works --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_work(comm):
    called: list[Any] = []
    if comm.rank == 0:
        comm.barrier()
        comm.send(np.arange(3), 1, 4)
        return
    work: Any = comm.recv(np.zeros(3, int), 0, 4, async_op=True)
    work.add_done_callback(called.append)
    assert not work.done()
    assert work.exception() is None
    assert work.message is None
    assert repr(work) == "<Work recv: not done>"
    with pytest.raises(DeadlineError, match=r"not done after 0\.01 s"):
        work.wait(0.01)
    with pytest.raises(DeadlineError):
        work.wait(0)
    with pytest.raises(ArgumentTypeError, match="cannot be pickled"):
        pickle.dumps(work)
    assert called == []
    comm.barrier()
    assert work.wait() is work.wait()
    assert called == [work]
    work.add_done_callback(called.append)
    assert called == [work, work]
    message: Any = work.message
    assert (message.source, message.tag, message.count) == (0, 4, 3)
    assert repr(work) == "<Work recv: done>"
    work.synchronize()


@pytest.mark.ranks(2)
def test_a_callback_may_begin_messages(comm):
    peer, done = 1 - comm.rank, []

    def go_on(work):
        done.append(work)
        if len(done) < 10:
            comm.recv(np.empty(1, int), peer, async_op=True).add_done_callback(go_on)

    comm.recv(np.empty(1, int), peer, async_op=True).add_done_callback(go_on)
    for number in range(10):
        comm.send(np.array([number]), peer, async_op=True)
    until(lambda: comm.probe(wait=False) is None and len(done) == 10)
    assert [int(work.wait()[0]) for work in done] == list(range(10))
    comm.barrier()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.ranks(2)
def test_a_callback_that_raises_ends_nothing(comm):
    peer = 1 - comm.rank
    work = comm.recv(np.empty(1), peer, async_op=True)
    work.add_done_callback(lambda _: 1 // 0)
    comm.send(np.ones(1), peer)
    assert work.wait()[0] == 1
    assert comm.all_reduce(1) == 2


def wait_after_close(comm):
    done = comm.send(np.zeros(2), 1 - comm.rank, async_op=True)
    pending = comm.recv(np.zeros(2), 1 - comm.rank, 9, async_op=True)
    comm.recv(np.zeros(2), 1 - comm.rank)
    comm.barrier()
    comm._give_up()
    done.wait()
    with pytest.raises(StateError, match="is closed"):
        pending.wait(1)
    assert pending.done()
    return os.getpid()


def test_waiting_after_close(rank_server):
    with rank_server.fork(2) as pool:
        pool.call(wait_after_close)


@pytest.mark.ranks(2)
def test_close_waits_as_long_as_it_is_told(comm):
    other = comm.duplicate()
    if comm.rank == 0:
        pending = other.recv(np.zeros(2), 1, async_op=True)
        with pytest.raises(DeadlineError, match="1 asynchronous messages had not ended at close"):
            other.close(timeout_s=0.01)
        assert other.is_closed
        with pytest.raises(StateError, match="is closed"):
            pending.wait()
    comm.barrier()
    other.close(timeout_s=0.01)
    with pytest.raises(ArgumentError, match="timeout_s"):
        comm.close(timeout_s=-1)
    assert not comm.is_closed


# --- taken aside --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2)
def test_messages_in_the_opposite_order(comm, way):
    """Many are taken aside, more than the acknowledgements there are; each stays what it was."""
    choose_way(comm, way)
    counts = [(number * 7919) % 5000 for number in range(700)]
    if comm.rank == 0:
        xs = [place(comm, way, count, "i4") for count in counts]
        for number, x in enumerate(xs):
            x[:] = number
        works = [comm.send(x, 1, number, async_op=True) for number, x in enumerate(xs)]
        for work in works:
            work.wait()
    else:
        for number in reversed(range(len(counts))):
            out = comm.recv(np.full(counts[number] + 1, -1, "i4"), 0, number)
            assert (out[:-1] == number).all()
            assert out[-1] == -1
        assert held(comm) == 0
    comm.barrier()


@pytest.mark.ranks(2)
def test_a_failure_of_another_dtype_stays_with_its_work(comm):
    peer = 1 - comm.rank
    comm.send(np.zeros(2), peer)
    work = comm.recv(np.zeros(2, "i8"), peer, async_op=True)
    until(work.done)
    comm.send(np.zeros(7), peer, 1)
    assert comm.recv(np.zeros(7), peer, 1).size == 7
    with pytest.raises(MismatchError, match="is float64"):
        work.wait()
    assert comm.recv(np.zeros(2), peer).size == 2
    comm.check()
