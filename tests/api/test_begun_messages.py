"""Messages that compiled code begins and waits for: what they keep alive, and how they fail."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref

import numpy as np
import pytest
from tests.waiting import until

from gpucoll import ANY_SOURCE, ANY_TAG
from gpucoll.calls.begun_message import BegunMessage
from gpucoll.errors import AbortedError, ArgumentError, DeadlineError, MismatchError, StateError


def learn(comm, dtype="f8"):
    """Let the compiled entries see the dtype once."""
    comm.send(np.zeros(1, dtype), comm.rank, 999, async_op=True)
    comm.recv(np.zeros(1, dtype), comm.rank, 999)


@pytest.fixture
def alone(make_comm):
    comm = make_comm()
    learn(comm)
    return comm


@pytest.fixture
def make_comm():
    import gpucoll

    made = []

    def make(**given):
        made.append(gpucoll.init(**given))
        return made[-1]

    yield make
    for comm in made:
        comm.close()


def test_it_goes_the_quick_way(alone):
    out = np.zeros(3)
    work = alone.recv(out, 0, 1, async_op=True)
    assert isinstance(work, BegunMessage)
    assert not work.done()
    sent = alone.send(np.arange(3.0), 0, 1, async_op=True)
    assert isinstance(sent, BegunMessage)
    assert sent.done()
    assert sent.message is None
    assert work.wait() is out
    assert out.tolist() == [0, 1, 2]
    message = work.message
    assert message is not None
    assert (message.source, message.tag, message.count, message.dtype) == (0, 1, 3, "float64")
    assert alone._point_to_point.queue.n_pending == 0


def test_nothing_is_kept_of_what_has_ended(alone):
    def exchange():
        works = [alone.recv(out, 0, 1, async_op=True), alone.send(x, 0, 1, async_op=True)]
        for work in works:
            work.wait()

    def exchange_slowly():
        work = alone.recv(out, 0, 1, async_op=True)
        alone.send(x, 0, 1)
        until(work.done)
        later = alone.recv(out, 0, 1, async_op=True)
        alone.send(x, 0, 1)
        later.wait(5)

    def misfit():
        work = alone.recv(out[:1], 0, 1, async_op=True)
        alone.send(x, 0, 1)
        with pytest.raises(MismatchError):
            work.wait()
        alone.recv(out, 0, 1)

    def take():
        alone.send(x, 0, 1)
        alone.recv(source=ANY_SOURCE, tag=ANY_TAG)

    x, out = np.ones(4), np.zeros(4)
    for ends in (exchange, exchange_slowly, misfit, take):
        ends()
        before = sys.getrefcount(x), sys.getrefcount(out)
        blocks = sys.getallocatedblocks()
        for _ in range(200):
            ends()
        gc.collect()
        assert (sys.getrefcount(x), sys.getrefcount(out)) == before, ends
        assert sys.getallocatedblocks() - blocks < 100, ends


def test_a_message_nobody_holds_any_more_stays_good(alone):
    """As where an interrupt comes before anybody has its Work: see `entries.messages`."""
    out = np.zeros(2)
    seen = weakref.ref(out)
    assert isinstance(alone._begin_recv(out, 0, 5), bytearray)
    del out
    gc.collect()
    noise = [bytearray(288) for _ in range(1000)]
    alone.send(np.array([3.0, 4.0]), 0, 5)
    assert alone.probe(0, 6, wait=False) is None  # a step
    kept = seen()
    assert kept is not None
    assert kept.tolist() == [3, 4]
    assert not any(any(each) for each in noise)


@pytest.mark.ranks(2)
def test_works_that_are_dropped(comm):
    learn(comm)
    outs = [np.zeros(2) for _ in range(50)]
    for tag, out in enumerate(outs):
        comm.recv(out, 1 - comm.rank, tag, async_op=True)
    comm.barrier()
    for tag in reversed(range(50)):
        comm.send(np.full(2, tag, "f8"), 1 - comm.rank, tag, async_op=True)
    comm.barrier()
    queue = comm._point_to_point.queue

    def all_ended():
        assert comm.probe(tag=99, wait=False) is None  # a step
        queue.sweep()
        return not queue.n_pending

    until(all_ended)
    assert [out[1] for out in outs] == list(range(50))


def test_a_misfit_says_so_and_the_message_stays(alone):
    learn(alone, "i4")
    for wrong in (np.zeros(1), np.zeros(2, "i4")):
        work = alone.recv(wrong, 0, 3, async_op=True)
        alone.send(np.array([7.0, 8.0]), 0, 3)
        with pytest.raises(MismatchError, match="rank 0"):
            work.wait()
        with pytest.raises(MismatchError):
            work.wait()
        assert work.message is None
        assert alone.recv(source=0, tag=3).tolist() == [7, 8]


def test_callbacks(alone):
    called: list[object] = []
    work = alone.recv(np.zeros(1), 0, 1, async_op=True)
    work.add_done_callback(called.append)
    work.add_done_callback(called.append)
    alone.send(np.ones(1), 0, 1)
    work.wait()
    until(lambda: len(called) == 2)
    assert called == [work, work]
    work.add_done_callback(called.append)
    assert len(called) == 3


@pytest.mark.ranks(2)
def test_threads_that_wait_at_once(comm):
    """One of them waits in compiled code, the others in the common way."""
    learn(comm)
    peer, n_threads = 1 - comm.rank, 4
    outs = [np.zeros(1) for _ in range(n_threads)]
    works = [comm.recv(out, peer, tag, async_op=True) for tag, out in enumerate(outs)]
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    for tag in range(n_threads):
        comm.send(np.full(1, tag, "f8"), peer, tag)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [float(out[0]) for out in outs] == list(range(n_threads))


def test_an_interrupt_ends_the_wait_alone(alone):
    out = np.zeros(1)
    for round_number in range(3):
        work = alone.recv(out, 0, 1, async_op=True)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert not work.done()
        alone.send(np.full(1, round_number, "f8"), 0, 1)
        assert work.wait() is out
        assert out[0] == round_number
    assert isinstance(alone.recv(out, 0, 1, async_op=True), BegunMessage)  # the quick way is open
    alone.send(out, 0, 1)


def test_an_interrupt_of_a_receive_of_unknown_size_gives_the_communicator_up(make_comm):
    comm = make_comm()
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        comm.recv(source=0)
    with pytest.raises(AbortedError):
        comm.recv(source=0)


def test_deadlines(make_comm):
    comm = make_comm(timeout_s=0.1)
    learn(comm)
    work = comm.recv(np.zeros(1), 0, 1, async_op=True)
    with pytest.raises(DeadlineError, match=r"recv was not done after 0.01 s"):
        work.wait(0.01)
    with pytest.raises(DeadlineError, match=r"0\.1 s"):
        work.wait()
    comm = make_comm(timeout_s=0.1)
    with pytest.raises(DeadlineError, match=r"0\.1 s"):
        comm.recv(source=0)
    comm = make_comm()
    with pytest.raises(DeadlineError, match=r"0\.1 s"):
        comm.recv(source=0, timeout_s=0.1)


def test_after_the_end_of_the_communicator(make_comm):
    comm = make_comm(timeout_s=0.2)
    learn(comm)
    done = comm.recv(np.zeros(1), 0, 1, async_op=True)
    comm.send(np.ones(1), 0, 1)
    done.wait()
    out = np.zeros(1)
    before = sys.getrefcount(out)
    left = comm.recv(out, 0, 1, async_op=True)
    comm.abort()
    with pytest.raises(AbortedError):
        comm.close()
    assert done.wait().tolist() == [1]
    assert done.message.count == 1
    with pytest.raises((AbortedError, StateError)):
        left.wait()
    del left
    comm = make_comm()
    learn(comm)
    dropped = comm.recv(out, 0, 1, async_op=True)
    comm._give_up()
    del dropped
    gc.collect()
    del comm
    gc.collect()
    assert sys.getrefcount(out) == before


def test_a_forked_child_cannot_wait(alone):
    work = alone.recv(np.zeros(1), 0, 1, async_op=True)
    if (pid := os.fork()) == 0:
        try:
            work.wait()
        except StateError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    alone.send(np.ones(1), 0, 1)
    work.wait()


SENT = [
    np.arange(6, dtype="i4").reshape(2, 3),
    np.array(2.5),
    np.zeros((0, 3)),
    np.ones((1,) * 8, "u1"),
    np.ones((1,) * 9, "u1"),
    np.array([True, False]),
    np.arange(200_000.0),
    np.arange(3_000_000, dtype="i2"),
    np.zeros(2, [("a", "i4"), ("b", "f8")]),
    np.array([1.5], np.longdouble),
    7,
    True,
    2.5,
    1j,
    np.float32(3),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("x", SENT, ids=str)
def test_of_unknown_size(comm, x):
    for source, tag in ((1 - comm.rank, 2), (ANY_SOURCE, ANY_TAG)):
        sent = comm.send(x, 1 - comm.rank, 2, async_op=True)
        if np.ndim(x) > 8:  # its shape does not travel
            with pytest.raises(ArgumentError, match="cannot tell what"):
                comm.recv(source=source, tag=tag)
            comm.recv(np.empty_like(x), source, tag)
            sent.wait()
            comm.barrier()
            continue
        got = comm.recv(source=source, tag=tag)
        assert type(got) is type(x)
        assert np.array_equal(got, x)
        assert np.shape(got) == np.shape(x)
        assert np.asarray(got).dtype == np.asarray(x).dtype
        sent.wait()
        comm.barrier()


def test_bad_input(alone):
    from gpucoll.errors import ArgumentError, ArgumentTypeError

    for source, tag in ((1, 0), (-2, 0), (0, -2), (0, 2**31), (1 << 70, 0), (0, 1 << 70)):
        with pytest.raises(ArgumentError):
            alone.recv(source=source, tag=tag)
        with pytest.raises(ArgumentError):
            alone.recv(np.zeros(1), source, tag, async_op=True)
    for wrong in ("0", None, 0.5):
        with pytest.raises(ArgumentTypeError):
            alone.recv(source=wrong)
    alone.send(np.ones(1), 0)
    assert alone.recv(source=np.int64(0), tag=True - 1).tolist() == [1]
