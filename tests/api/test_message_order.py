"""Which message a receive gets: order, tags, senders, probes; and messages as works."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from tests.messages import WAYS, choose_way, place, posted
from tests.waiting import until

from gpucoll import ANY_SOURCE, ANY_TAG
from gpucoll.errors import AbortedError, DeadlineError, MismatchError

POSTS = 8

STRUCTURED = [("a", "<i4"), ("b", "<f8", (2,)), ("c", "S3")]
OTHER_STRUCTURED = [("a", "<i4"), ("b", "<i8", (2,)), ("c", "S3")]


def shift(comm):
    """Return the ranks that this one sends to and receives from, in a ring."""
    return (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size


def is_sender(comm):
    return comm.rank == 0


# --- tags and senders ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2)
def test_tags_in_any_order(comm, way):
    """The messages in between are kept; each tag's own order holds."""
    choose_way(comm, way)
    counts = [3, 40_000, 0, 200_000, 1, 9000]
    messages = [(number % 3, number, counts[number % len(counts)]) for number in range(18)]
    if is_sender(comm):
        works = []
        for tag, number, count in messages:
            x = place(comm, way, count, "i4")
            x[:] = number
            works.append(comm.send(x, 1, tag, async_op=True))
        for work in works:
            work.wait()
    else:
        for wanted in (2, 0, 1):
            for tag, number, count in messages:
                if tag == wanted:
                    out = comm.recv(place(comm, way, count, "i4"), 0, tag)
                    assert (out == number).all(), (tag, number)
    comm.barrier()


@pytest.mark.ranks(2)
def test_what_was_kept_is_found_by_every_kind_of_call(comm):
    x = np.zeros(3)
    for _ in range(3):
        if is_sender(comm):
            for tag in range(1, 8):
                x[:] = tag
                comm.send(x, 1, tag)
            comm.barrier()
            continue
        assert comm.recv(x, 0, 7)[0] == 7
        assert comm.recv(x, 0, 1)[0] == 1
        assert comm.probe().tag == 2
        assert comm.probe(tag=3, wait=False).shape == (3,)
        assert comm.probe(tag=1, wait=False) is None
        assert comm.recv(tag=3)[0] == 3
        assert comm.recv(x, ANY_SOURCE, ANY_TAG)[0] == 2
        with pytest.raises(MismatchError, match=r"from rank 0 with tag 5 is float64, shape \(3,\)"):
            comm.recv(np.zeros(2), 0, 5)
        assert comm.recv(np.zeros(3), 0, 5, async_op=True).wait()[0] == 5
        out = np.zeros(3)
        with comm.group():
            comm.recv(out, tag=6)
        assert out[0] == 6
        assert comm.recv(x, tag=4)[0] == 4
        comm.barrier()


@pytest.mark.ranks(4)
def test_no_sender_starves(comm):
    x = np.array([comm.rank, 0])
    if comm.rank:
        for x[1] in range(1000):
            comm.send(x, 0, comm.rank)
        return
    seen = {1: 0, 2: 0, 3: 0}
    for _ in range(3000):
        sender, number = comm.recv(x, ANY_SOURCE, ANY_TAG).tolist()
        assert number == seen[sender]
        seen[sender] += 1
    assert seen == {1: 1000, 2: 1000, 3: 1000}


@pytest.mark.ranks(4)
def test_senders_that_wait_are_served_in_turn(comm):
    x = np.full(1, comm.rank, np.int64)
    if comm.rank:
        for _ in range(POSTS):
            comm.send(x, 0)
    comm.barrier()
    if comm.rank == 0:
        order = [int(comm.recv(x)[0]) for _ in range(3 * POSTS)]
        for start in range(0, len(order), 3):
            assert sorted(order[start : start + 3]) == [1, 2, 3], order


@pytest.mark.ranks(3)
def test_probe(comm):
    x = np.arange(6.0).reshape(2, 3)
    if comm.rank == 2:
        assert comm.probe(wait=False) is None
        assert comm.probe(0, 5, wait=False) is None
        comm.barrier()
        found = comm.probe(1)
        assert (found.source, found.tag, found.shape, found.dtype) == (1, 4, (2, 3), "float64")
        assert found == comm.probe(1, 4, wait=False)
        assert comm.probe(tag=5).source == 0
        assert comm.probe(1, 5, wait=False) is None
        assert (comm.recv(source=1, tag=4) == x).all()
        assert (comm.recv(tag=5) == x).all()
        with pytest.raises(DeadlineError, match=r"from any rank with tag 9 came within 0.05 s"):
            comm.probe(tag=9, timeout_s=0.05)
        comm.barrier()
        return
    comm.barrier()
    comm.send(x, 2, 5 - comm.rank)
    comm.barrier()


@pytest.mark.ranks(2)
def test_probing_beside_a_message_under_way(comm):
    """The rest of a streamed message is not taken for another one."""
    choose_way(comm, "streamed")
    x = np.full(3_000_000, 7, np.uint8)
    if is_sender(comm):
        for _ in range(3):
            comm.send(x, 1, 1)
        comm.send(np.zeros(2), 1, 2)
        return
    for _ in range(3):
        work = comm.recv(np.empty_like(x), 0, 1, async_op=True)
        while not work.done():
            found = comm.probe(wait=False)
            assert found is None or (found.tag, found.size_bytes) in ((1, x.nbytes), (2, 16)), found
        assert (work.wait() == 7).all()
    assert comm.recv(tag=2).shape == (2,)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2)
def test_a_misfit_stays(comm, way):
    choose_way(comm, way)
    for count in (4, 100_000):
        x = place(comm, way, count, "f4")
        x[:] = 3
        if is_sender(comm):
            comm.send(x, 1, 1)
            comm.send(x, 1, 1)
            continue
        for out in (np.empty(count - 1, "f4"), np.empty(count, "i4"), np.empty(count + 1, "f8")):
            for _ in range(2):
                with pytest.raises(MismatchError) as caught:
                    comm.recv(out, 0, 1)
                text = str(caught.value)
                assert f"message from rank 0 with tag 1 is float32, shape ({count},)" in text
                assert f"but out is {out.dtype}, shape {out.shape}. The message stays" in text
        with pytest.raises(MismatchError):
            comm.recv(np.empty(count - 1, "f4"), 0, 1, async_op=True).wait()
        assert (comm.recv(place(comm, way, count, "f4"), 0, 1) == 3).all()
        assert (comm.recv(np.empty((count // 2, 2), "f4"), 0, 1) == 3).all()
    comm.barrier()


@pytest.mark.ranks(2)
def test_structured_dtypes_are_told_apart(comm):
    x = np.zeros(3, STRUCTURED)
    if is_sender(comm):
        comm.send(x, 1)
        return
    with pytest.raises(MismatchError):
        comm.recv(np.zeros(3, OTHER_STRUCTURED), 0)
    comm.recv(x, 0)


# --- asynchronous -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.ranks(2, 3)
def test_receives_first_on_both_sides(comm, way):
    choose_way(comm, way)
    right, left = shift(comm)
    for count in (3, 100_000):
        x, out = place(comm, way, count, "f8"), place(comm, way, count, "f8")
        x[:] = comm.rank
        work = comm.recv(out, left, async_op=True)
        comm.send(x, right)
        assert work.wait() is out
        assert (out == left).all()


@pytest.mark.ranks(2)
def test_many_pending_messages_and_waits_in_any_order(comm):
    peer, order = 1 - comm.rank, random.Random(comm.rank)
    works = []
    for number in range(150):
        x = np.full(number * 40, number)
        works.append((number, comm.recv(np.empty_like(x), peer, number % 7, async_op=True)))
        comm.send(x, peer, number % 7, async_op=True)
    order.shuffle(works)
    for number, work in works:
        got = work.wait(20)
        assert (got == number).all()
        assert got.size == number * 40
    comm.barrier()


@pytest.mark.ranks(2)
def test_blocking_calls_and_collectives_among_pending_messages(comm):
    peer = 1 - comm.rank
    for turn in range(10):
        x = np.full(30_000, turn)
        received = comm.recv(np.empty_like(x), peer, 1, async_op=True)
        sent = comm.send(x, peer, 1, async_op=True)
        reduced = comm.all_reduce(x, async_op=True)
        later = comm.send_recv(x + 1, peer, peer, async_op=True)
        assert comm.all_reduce(1) == 2
        assert (comm.send_recv(x + 2, peer, peer, tag=2) == turn + 2).all()
        assert all(work.done() for work in (received, sent, reduced, later))
        assert (received.wait() == turn).all()
        assert (reduced.wait() == 2 * turn).all()
        assert (later.wait() == turn + 1).all()


@pytest.mark.ranks(2)
def test_a_work_nobody_waits_for(comm):
    if is_sender(comm):
        comm.send(np.full(100_000, 5), 1, async_op=True)
        comm.close()
    else:
        until(lambda: posted(comm, 1, 0) > 0)
        assert (comm.recv(np.empty(100_000, int), 0) == 5).all()


@pytest.mark.ranks(2)
def test_a_failure_is_raised_by_its_own_work_or_by_check(comm):
    """Not by another call, which then would not have happened."""
    peer = 1 - comm.rank
    for asks in (True, False):
        comm.send(np.zeros(3), peer)
        work = comm.recv(np.zeros(2), async_op=True)
        until(work.done)
        comm.send(np.ones(3), peer, 1)
        assert comm.recv(np.zeros(3), peer)[0] == 0
        assert comm.recv(np.zeros(3), peer, 1)[0] == 1
        assert comm.all_reduce(1) == 2
        if asks:
            with pytest.raises(MismatchError, match="The message stays"):
                work.wait()
        else:
            with pytest.raises(MismatchError):
                comm.check()
        comm.check()
        with pytest.raises(MismatchError):
            work.wait()


@pytest.mark.ranks(2)
def test_deadlines_of_pending_messages_are_their_own(comm):
    """The shortest one ends the wait, also behind messages that may wait longer."""
    if is_sender(comm):
        work = comm.recv(np.zeros(3), 1, 1, async_op=True)
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"rank 1 with tag 2 came within 0.2 s"):
            comm.recv(np.zeros(3), 1, 2, timeout_s=0.2)
        assert time.monotonic() - start < 5
        assert not work.done()
        comm.send(np.zeros(1), 1, 3)
        assert (work.wait() == 1).all()
    else:
        comm.recv(np.zeros(1), 0, 3)
        comm.send(np.ones(3), 0, 1)


@pytest.mark.ranks(2, timeout_s=20)
def test_messages_that_nobody_asks_for_do_not_put_the_deadline_off(comm):
    x = np.zeros(3)
    if is_sender(comm):

        def send_without_end():
            while True:
                comm.send(x, 1, 1)

        with pytest.raises(AbortedError):
            send_without_end()
        comm.close()
    else:
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"rank 0 with tag 2 came within 0.3 s"):
            comm.recv(x, 0, 2, timeout_s=0.3)
        assert time.monotonic() - start < 5
        comm.abort()
        with pytest.raises(MismatchError, match="without receiving"):
            comm.close()
