"""Messages of several threads on one communicator: who is refused, and what they cannot spoil."""

from __future__ import annotations

import gc
import pickle
import threading

import numpy as np
import pytest
from tests.waiting import until

import gpucoll
from gpucoll.backends.cpu.host import message_table
from gpucoll.calls.begun_message import BegunMessage
from gpucoll.entries.collectives import MAX_ENTRIES
from gpucoll.errors import AbortedError, SharedMemoryError, StateError
from gpucoll.group.host.segment_room import make_room
from gpucoll.transport.shared.words import Context, TransferTable


@pytest.fixture
def alone():
    """A communicator of one rank, whose entries know float64."""
    with gpucoll.init(timeout_s=20.0) as made:
        made.send(np.zeros(1), 0, 999, async_op=True)
        made.recv(np.zeros(1), 0, 999)
        yield made


class Thread(threading.Thread):
    """Calls a function; `result` raises what that has raised."""

    def __init__(self, function, *arguments, **options):
        super().__init__()
        self._call, self._returned, self._error = (function, arguments, options), None, None
        self.start()

    def run(self):
        function, arguments, options = self._call
        try:
            self._returned = function(*arguments, **options)
        except BaseException as error:
            self._error = error

    def result(self):
        self.join(20)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._returned


def has_no_room(comm):
    """Let the next send that takes memory ask whether there is some."""
    comm._backend.messages._steps[Context.room_bytes] = 0


USES = {
    "send": lambda c: c.send(np.zeros(1), 0, 5),
    "send another dtype": lambda c: c.send(np.zeros(1, "f4"), 0, 5),
    "send an object": lambda c: c.send_object(1, 0, 5),
    "receive": lambda c: c.recv(np.zeros(1), 0, 5),
    "receive within": lambda c: c.recv(np.zeros(1), 0, 5, timeout_s=10.0),
    "informed": lambda c: c.recv(np.zeros(1), 0, 5, info=True),
    "of unknown size": lambda c: c.recv(source=0, tag=5),
    "receive an object": lambda c: c.recv_object(0, 5),
    "probe": lambda c: c.probe(0, 5),
    "both": lambda c: c.send_recv(np.zeros(1), 0, 0, np.zeros(1), tag=5),
    "plan to send": lambda c: c.plan_send(np.zeros(1), 0, 5)(),
    "plan to receive": lambda c: c.plan_recv(np.zeros(1), 0, 5)(),
}


@pytest.mark.parametrize("by", ["an entry", "Python"])
def test_a_second_blocking_call_is_refused(alone, by):
    """Nothing of it is begun; what is asynchronous goes on."""
    out = np.zeros(1) if by == "an entry" else np.zeros(1, "i2")
    receiving = Thread(alone.recv, out, 0, 1)
    until(lambda: alone._group.is_running)
    for name, use in USES.items():
        with pytest.raises(StateError, match="another thread of rank 0 of 1"):
            use(alone)
        assert alone.probe(0, 5, wait=False) is None, name
    alone.send(np.full(1, 7, out.dtype), 0, 1, async_op=True)
    assert receiving.result() is out
    assert out[0] == 7
    for name in ("send", "receive"):
        USES[name](alone)


@pytest.mark.parametrize("by", ["an entry", "Python"])
def test_a_call_keeps_its_turn_while_memory_is_granted(alone, monkeypatch, by):
    """Another thread's call came in between, and the first one waited for that one's message."""
    is_asked, may_go_on = threading.Event(), threading.Event()

    def slow(context):
        is_asked.set()
        assert may_go_on.wait(20)
        make_room(context)

    monkeypatch.setattr(message_table, "make_room", slow)
    x = np.full(30, 1.5) if by == "an entry" else np.full(30, 1, "i2")
    with alone.duplicate() as comm:
        if by == "an entry":
            comm._backend.messages.learn(*learned(x.dtype))
        has_no_room(comm)
        sending = Thread(comm.send, x, 0, 1)
        assert is_asked.wait(20)
        for use in USES.values():
            with pytest.raises(StateError, match="another thread"):
                use(comm)
        may_go_on.set()
        sending.result()
        assert comm.recv(source=0, tag=1).tolist() == x.tolist()
        assert not comm._backend.messages._words[TransferTable.pending]


def learned(dtype):
    from gpucoll.transport.shared.words import Kind

    return Kind.SEND, dtype, dtype.name, None


@pytest.mark.parametrize("by", ["an entry", "Python"])
def test_an_interrupt_while_memory_is_granted(alone, monkeypatch, by):
    """Nobody would end that send any more: the communicator is given up."""

    def interrupt(context):
        raise KeyboardInterrupt

    monkeypatch.setattr(message_table, "make_room", interrupt)
    comm, x = alone.duplicate(), np.full(30, 1.5)
    if by == "an entry":
        comm._backend.messages.learn(*learned(x.dtype))
    has_no_room(comm)
    with pytest.raises(KeyboardInterrupt):
        comm.send(x, 0, 1)
    with pytest.raises(AbortedError, match="interrupted"):
        comm.send(x, 0, 1)
    comm.close()


def test_memory_that_is_refused_to_several_threads_at_once(alone, monkeypatch):
    """The send that needed it fails once; whoever finds nothing more to drop goes on waiting."""

    def refuse(context):
        until(lambda: not words[TransferTable.waiters])  # the other one has to ask, too
        raise SharedMemoryError("none is left")

    with alone.duplicate() as comm:
        words, outs = comm._backend.messages._words, [np.zeros(1), np.zeros(1)]
        receives = [comm.recv(out, 0, tag, async_op=True) for tag, out in enumerate(outs)]
        waiting = [Thread(work.wait, 10.0) for work in receives]
        until(lambda: words[TransferTable.waiters] == len(waiting))
        has_no_room(comm)
        monkeypatch.setattr(message_table, "make_room", refuse)
        sent = comm.send(np.ones(1), 0, 7, async_op=True)
        until(sent._transfers.is_over)
        with pytest.raises(SharedMemoryError, match="none is left"):
            sent.wait()
        monkeypatch.undo()
        for tag in range(2):
            comm.send(np.full(1, tag + 1.0), 0, tag, async_op=True)
        assert [work.result()[0] for work in waiting] == [1, 2]


@pytest.mark.parametrize("size", [3, 300_000])
def test_a_message_that_was_taken_is_received_beside_another_threads_call(alone, size):
    """A receive of unknown size has two parts; between them another thread's call may begin."""
    x, messages, others = np.arange(size, dtype=float), alone._backend.messages, []
    fetch = messages._fetch

    def begin_another_call(*arguments):
        others.append(Thread(alone.recv, np.zeros(1), 0, 2))
        until(lambda: alone._group.is_running)
        return fetch(*arguments)

    messages._fetch = begin_another_call
    sent = alone.send(x, 0, 1, async_op=True)
    assert np.array_equal(alone.recv(source=0, tag=1), x)
    sent.wait()
    alone.send(np.full(1, 9.0), 0, 2, async_op=True)
    assert others[0].result()[0] == 9


def test_a_plan_of_two_threads(alone):
    """The second is refused, and the first one's receive keeps its place before others."""
    out, later = np.zeros(1), np.zeros(1)
    plan = alone.plan_recv(out, 0, 1)
    running = Thread(plan)
    until(lambda: alone._group.is_running)
    work = alone.recv(later, 0, 1, async_op=True)
    with pytest.raises(StateError, match="another thread"):
        plan()
    for number in range(2):
        alone.send(np.full(1, 3.0 + number), 0, 1, async_op=True)
    assert running.result() is out
    assert work.wait() is later
    assert (out[0], later[0]) == (3, 4)


TIMEOUT_S = 1.0


def wait_twice(comm):
    """Have a plan wait, and once more after the first time's deadline."""
    plan = comm.plan_recv(np.zeros(1), 1, 2) if comm.rank == 0 else None
    for _ in range(2):
        if plan is not None:
            comm.send(np.zeros(1), 1, 1)
            plan()
        else:
            comm.recv(np.zeros(1), 0, 1)
            threading.Event().wait(TIMEOUT_S / 10)  # the plan looks at its deadline
            comm.send(np.ones(1), 0, 2)
        threading.Event().wait(TIMEOUT_S)


@pytest.mark.soak
def test_a_plan_has_its_deadline_anew_in_each_call(ranks):
    assert ranks.call(2, wait_twice, timeout_s=TIMEOUT_S) == [None, None]


def test_entries_learn_while_another_thread_waits(alone):
    """It may use the block of the dtype that goes: that is kept until nobody waits."""
    out = np.zeros(1)
    receiving = Thread(alone.recv, out, 0, 1)
    until(lambda: alone._group.is_running)
    for number in range(2 * MAX_ENTRIES):
        x = np.zeros(1, f"S{number + 1}")
        for is_known in (False, True):
            work = alone.send(x, 0, 100 + number, async_op=True)
            assert isinstance(work, BegunMessage) == is_known
            work.wait()
    gc.collect()
    noise = [bytes(520) for _ in range(1000)]
    alone.send(np.full(1, 4.0), 0, 1, async_op=True)
    assert receiving.result() is out
    assert out[0] == 4
    for number in range(2 * MAX_ENTRIES):
        for _ in range(2):
            assert alone.recv(source=0, tag=100 + number).dtype == f"S{number + 1}"
    assert noise


def test_one_thread_at_a_time_teaches_an_entry(alone):
    """Two that wrote the table at once could leave a block in it that nobody kept."""
    table = alone._backend.messages._entries[0]
    is_in, may_go_on = threading.Event(), threading.Event()

    def make():
        is_in.set()
        assert may_go_on.wait(20)
        return block

    block = table._entries[0].block
    learning = Thread(table.learn, np.dtype("i2"), None, None, make)
    assert is_in.wait(20)
    before = list(table._entries)
    table.learn(np.dtype("i4"), None, None, lambda: block)
    assert table._entries == before
    may_go_on.set()
    learning.result()
    assert [entry.dtype for entry in table._entries] == [np.dtype("i2"), np.dtype("f8")]


@pytest.mark.ranks(2)
def test_what_is_pending_keeps_the_description_of_its_dtype(comm):
    """Also when the entry that has begun it has forgotten the dtype."""
    record = np.dtype([("a", "i4"), ("bcd", "f8")])
    assert len(pickle.dumps(record, 5)) % 8  # or whole words of it are the very object
    others = [np.dtype([("a", "i4"), ("b" * (n + 2), "f4")]) for n in range(MAX_ENTRIES + 1)]
    if comm.rank == 1:
        comm.barrier()
        for _ in range(3000):
            comm.recv(np.zeros(500), 0, 1)
        for n in range(2):
            assert comm.recv(source=0, tag=2).dtype == record, n
        for dtype in others:
            assert comm.recv(source=0, tag=3).dtype == dtype
        return
    works = [comm.send(np.zeros(500), 1, 1, async_op=True) for _ in range(3000)]
    works += [comm.send(np.zeros(1, record), 1, 2, async_op=True) for _ in range(2)]
    assert not works[-1].done()
    works += [comm.send(np.zeros(1, dtype), 1, 3, async_op=True) for dtype in others]
    gc.collect()
    noise = [b"?" * size for size in range(50, 300) for _ in range(200)]
    comm.barrier()
    for work in works:
        work.wait()
    assert noise
