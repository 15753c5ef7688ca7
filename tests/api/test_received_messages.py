"""Receives as people need them: larger buffers, unknown sizes, objects, and who sent what."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.messages import eager_bytes, members_of, pattern
from tests.waiting import until

from gpucoll import ANY_SOURCE, ANY_TAG
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    MismatchError,
    StateError,
)

RECORD = np.dtype([("a", "<i4"), ("b", "<f8", (2,)), ("c", "S3")], align=True)


@pytest.mark.ranks(2)
def test_into_a_larger_buffer(comm):
    for count in (0, 3, 2000, 100_000):
        x = np.arange(float(count))
        if comm.rank == 0:
            for tag in range(4):
                comm.send(x, 1, tag)
            continue
        out, message = comm.recv(np.full(count + 2, -1.0), 0, 0, info=True)
        assert (message.source, message.tag, message.count, message.dtype) == (
            0,
            0,
            count,
            "float64",
        )
        assert (out[:count] == x).all()
        assert (out[count:] == -1).all()
        work = comm.recv(np.full(count + 2, -1.0), 0, 1, async_op=True)
        assert (work.wait()[:count] == x).all()
        assert work.message.count == count
        spread = np.full((count + 2, 2), -1.0)
        comm.recv(spread[:, 0], 0, 2)
        assert (spread[:count, 0] == x).all()
        assert (spread[count:] == -1).all()
        assert (spread[:, 1] == -1).all()
        made = comm.recv(shape=count + 2, dtype="float64", source=0, tag=3)
        assert (made[:count] == x).all()
        assert (made[count:] == 0).all()
    comm.barrier()


@pytest.mark.ranks(2)
def test_of_unknown_size(comm):
    for turn in range(2):
        for number, count in enumerate((0, 1, 2000, 100_000, 3_000_000)):
            x = pattern(count, turn)
            if comm.rank == 0:
                for tag in (1, 2, 3, 4):
                    comm.send(x, 1, tag)
                continue
            assert (comm.recv(source=0, tag=1) == x).all()
            work = comm.recv(source=0, tag=2, async_op=True)
            assert (work.wait() == x).all(), number
            assert (work.message.source, work.message.count) == (0, count)
            with comm.group():
                later = comm.recv(source=0, tag=3)
                assert not later.done()
            assert (later.wait() == x).all()
            got, message = comm.recv(info=True, tag=4)
            assert (got == x).all()
            assert message.size_bytes == count
        comm.barrier()


@pytest.mark.ranks(2)
def test_records_and_long_doubles_arrive_as_sent(comm):
    arrays = [
        np.arange(5, dtype=np.longdouble) / 3,
        np.zeros((2, 3), RECORD),
        np.array(["2026-11-22", "1970-01-01"], "M8[us]"),
        np.array(["ab", "c"]),
        np.zeros(100_000, RECORD),
    ]
    arrays[1]["a"], arrays[1]["c"] = 7, b"xyz"
    for x in arrays:
        for _ in range(2):
            if comm.rank == 0:
                comm.send(x, 1)
                comm.send(x, 1)
                continue
            message = comm.probe(0)
            assert (message.dtype, message.shape) == (str(x.dtype), x.shape)
            for got in (comm.recv(source=0), comm.recv(source=0, async_op=True).wait()):
                assert got.dtype == x.dtype
                assert got.dtype.itemsize == x.dtype.itemsize
                assert (got == x).all()
    comm.barrier()


@pytest.mark.ranks(3)
def test_from_anybody_and_from_whom(comm):
    if comm.rank:
        comm.send(np.full(2, comm.rank), 0, comm.rank + 5)
        return
    work = comm.recv(np.empty(2, int), ANY_SOURCE, ANY_TAG, async_op=True)
    first = work.wait()
    assert (first == work.message.source).all()
    second, message = comm.recv(np.empty(2, int), ANY_SOURCE, ANY_TAG, info=True)
    assert (second == message.source).all()
    assert sorted((work.message.tag, message.tag)) == [6, 7]


@pytest.mark.ranks(2)
def test_a_message_is_received_once(comm):
    if comm.rank == 0:
        for number in range(6):
            comm.send(np.full(3, number), 1, 1)
        comm.send_object({"a": 1}, 1, 1)
        comm.barrier()
        return
    first = comm.probe(0, 1)
    assert first == comm.probe(0, 1, wait=False)
    assert (first.recv() == 0).all()
    with pytest.raises(StateError, match="was received already"):
        first.recv()
    second = comm.probe(0, 1)
    assert (comm.recv(np.empty(3, int), 0, 1) == 1).all()
    with pytest.raises(StateError, match="was received already"):
        second.recv(np.empty(3, int))
    third = comm.probe(0, 1)
    got = []
    threads = [threading.Thread(target=lambda: got.append(third.recv())) for _ in range(1)]
    for thread in threads:
        thread.start()
        thread.join(20)
    assert (got[0] == 2).all()
    fourth = comm.probe(0, 1)
    with pytest.raises(MismatchError, match="The message stays"):
        fourth.recv(np.empty(2, int))
    with pytest.raises(MismatchError):
        fourth.recv(np.empty(3))
    assert (fourth.recv(np.empty(5, int))[:3] == 3).all()
    _, told = comm.recv(source=0, tag=1, info=True)
    with pytest.raises(StateError, match="only tells what it was"):
        told.recv()
    assert (comm.recv(source=0, tag=1) == 5).all()
    found = comm.probe(0, 1)
    assert (found.dtype, found.shape, found.count) == ("object", (), 1)
    assert found.recv() == {"a": 1}
    comm.barrier()


@pytest.mark.ranks(2)
def test_objects(comm):
    values = [
        None,
        {"a": [1, 2]},
        "x" * 100_000,
        {"large": np.arange(200_000), "small": np.arange(3), "other": np.ones((300, 400))},
        [np.full(5000, number) for number in range(20)],
    ]
    for value in values:
        if comm.rank == 0:
            comm.send_object(value, 1, 3)
            comm.send_object(value, 1, 4, async_op=True).wait()
            comm.send_object(value, 1, 5, synchronous=True)
            continue
        later = comm.recv_object(0, 4, async_op=True)
        for got in (comm.recv_object(0, 3), later.wait(), comm.recv_object(info=True, tag=5)[0]):
            np.testing.assert_equal(got, value)
            assert type(got) is type(value)
        assert (later.message.dtype, later.message.tag) == ("object", 4)
    comm.barrier()
    assert comm.probe(wait=False) is None


@pytest.mark.ranks(2)
def test_objects_and_arrays_are_told_apart(comm):
    if comm.rank == 0:
        with pytest.raises(ArgumentTypeError, match="cannot be pickled"):
            comm.send_object(lambda: None, 1)
        comm.send_object([1], 1, 1)
        comm.send(np.arange(3), 1, 2)
        comm.barrier()
        return
    for _ in range(2):
        with pytest.raises(MismatchError, match="is an object"):
            comm.recv(source=0, tag=1)
        with pytest.raises(MismatchError, match="an object, for recv_object"):
            comm.recv(np.empty(100, np.uint8), 0, 1)
        with pytest.raises(MismatchError, match=r"not an object\. The message stays"):
            comm.recv_object(0, 2)
        with pytest.raises(MismatchError, match="not an object"):
            comm.recv_object(0, 2, async_op=True).wait()
    assert comm.recv_object(0, 1) == [1]
    assert comm.recv(source=0, tag=2).tolist() == [0, 1, 2]
    comm.barrier()
    with comm.group(), pytest.raises(ArgumentTypeError, match=r"inside group\(\)"):
        comm.recv_object(0)


@pytest.mark.ranks(2)
def test_a_synchronous_send_is_over_when_it_is_matched(comm):
    x = np.zeros(2)
    if comm.rank == 0:
        work = comm.send(x, 1, 1, synchronous=True, async_op=True)
        comm.send(x, 1, 2)
        comm.barrier()
        assert not work.done()
        comm.barrier()
        work.wait()
        comm.send(x, 1, 3, synchronous=True)
        return
    comm.recv(x, 0, 2)  # takes the other one aside
    comm.barrier()
    comm.barrier()
    comm.recv(x, 0, 1)
    comm.recv(x, 0, 3)


@pytest.mark.ranks(2)
def test_plans_of_messages(comm):
    peer, x, out = 1 - comm.rank, np.zeros(5), np.zeros(7)
    send, receive = comm.plan_send(x, peer, 3), comm.plan_recv(out, peer, 3)
    for number in range(100):
        x[:] = number
        send()
        assert receive() is out
        assert (out[:5] == number).all()
    assert (out[5:] == 0).all()
    comm.send(np.zeros(8), peer, 3)
    with pytest.raises(MismatchError):
        receive()
    comm.recv(np.zeros(8), peer, 3)
    with pytest.raises(ArgumentError, match="a plan needs x"):
        comm.plan_send(np.zeros((4, 4))[:, 0], peer)
    with pytest.raises(ArgumentError, match="a plan needs out"):
        comm.plan_recv(np.zeros((4, 4))[:, 0], peer)


# --- the eager room -----------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_thousands_of_small_sends_do_not_wait(comm):
    peer, count = 1 - comm.rank, 12_000
    for _ in range(2):
        for number in range(count):
            comm.send(np.array([number]), peer, 3, timeout_s=5)
        comm.barrier()
        out = np.empty(1, int)
        assert [int(comm.recv(out, peer, 3)[0]) for _ in range(count)] == list(range(count))
        comm.barrier()  # messages of two rounds are more than the room, and would wait


def fill_the_room(comm):
    """Return how many sends of eager messages did not wait."""
    x, count = np.zeros(eager_bytes(comm), np.uint8), 0
    if comm.rank == 0:
        works = [comm.send(x, 1, async_op=True) for _ in range(200)]
        count = sum(work.done() for work in works)
        with pytest.raises(DeadlineError, match=r"waited 1 s in send\(uint8, 8192 bytes, dest=1"):
            comm.send(x, 1)
    else:
        until(lambda: comm._group.is_aborted)
        with pytest.raises(DeadlineError):
            comm.check()
    return count


def test_the_eager_room_is_counted_in_bytes(ranks):
    room = {"GPUCOLL_CPU_TUNING": "eager_room_bytes=262144"}
    assert ranks.call(2, fill_the_room, timeout_s=1.0)[0] == (1 << 20) // (8192 + 64)
    assert ranks.call(2, fill_the_room, timeout_s=1.0, environment=room)[0] == 262144 // 8256


def wait_in_a_barrier(comm):
    """A send that waits is told of, also where its rank stands in something else."""
    if comm.rank == 0:
        comm.send(np.zeros(3), 1, 7, synchronous=True, async_op=True)
        with pytest.raises(DeadlineError):
            comm.barrier(timeout_s=0.3)
        return ""
    try:
        comm.recv(np.zeros(3), 0, 8)
    except DeadlineError as error:
        return str(error)


def test_a_send_that_waits_says_so(ranks):
    told = ranks.call(2, wait_in_a_barrier)[1]

    assert "Rank 0 itself: its send to rank 1, tag 7, waits for its receive" in told


def use_mailboxes(comm):
    import os

    def taken():
        return 512 * os.fstat(members_of(comm).segment_fd).st_blocks

    before = taken()
    comm.barrier()
    if comm.rank == 0:
        comm.send(np.zeros(3), 1)
    elif comm.rank == 1:
        comm.recv(np.zeros(3), 0)
    comm.barrier()
    return taken() - before


def test_memory_of_a_mailbox_is_taken_when_it_is_first_used(ranks):
    assert max(ranks.call(4, use_mailboxes)) <= 16384


def lack_memory(comm):
    from gpucoll.errors import SharedMemoryError
    from gpucoll.transport.shared.words import Context

    steps = comm._backend.messages._steps
    if comm.rank == 0:
        for call in (
            lambda: comm.send(np.zeros(3), 1),
            lambda: comm.send(np.zeros(3), 1, async_op=True).wait(),
        ):
            fd, steps[Context.segment_fd] = int(steps[Context.segment_fd]), -1
            with pytest.raises(SharedMemoryError, match="were refused"):
                call()
            steps[Context.segment_fd] = fd
        steps[Context.room_bytes] = 0  # Python looks, and grants more
        comm.send(np.ones(3), 1)
        return comm.all_reduce(1)
    assert comm.recv(np.zeros(3), 0)[0] == 1
    return comm.all_reduce(1)


def test_no_memory_for_a_mailbox_is_an_error_of_that_send(ranks):
    assert ranks.call(2, lack_memory) == [2, 2]
