"""Messages whose other end dies, closes, gives up or never comes; mismatches and leftovers."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from tests.messages import choose_way, pattern, posted, sleeps
from tests.ranks import Ended, Reply
from tests.waiting import SOON_S, is_broken, until

from gpucoll import ANY_SOURCE, ANY_TAG
from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError
from gpucoll.transport.shared.words import Context

LARGE = 20_000_000


def errors(replies):
    return [reply.error for reply in replies]


# --- deadlines ----------------------------------------------------------------------------------


def wait_in_vain(comm, call):
    if comm.rank == 0:
        call(comm)
    until(lambda: is_broken(comm))
    comm.barrier()


WAITS = {
    "send": (
        lambda comm: comm.send(np.zeros(LARGE, "u1"), 1, 3),
        "send(uint8, 20000000 bytes, dest=1, tag=3)",
    ),
    "recv": (lambda comm: comm.recv(np.zeros(3), 1, 4), "recv(float64, 24 bytes, source=1, tag=4)"),
    "any": (lambda comm: comm.recv(), "recv or probe(source=ANY_SOURCE, tag=0)"),
    "async": (
        lambda comm: comm.recv(np.zeros(3), tag=ANY_TAG, async_op=True).wait(),
        "recv(float64, 24 bytes, source=ANY_SOURCE, tag=ANY_TAG)",
    ),
    "send_recv": (
        lambda comm: comm.send_recv(np.zeros(2), 1, 1),
        "recv(float64, 16 bytes, source=1, tag=0)",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_deadline_names_the_message(ranks, name):
    call, text = WAITS[name]
    found = errors(ranks.replies(2, wait_in_vain, call, timeout_s=0.3))

    assert {type(error) for error in found} == {DeadlineError}
    assert f"rank 0 of 2 waited 0.3 s in {text}" in str(found[0])
    assert f"rank 1 of 2: rank 0 gave up waiting in {text}" in str(found[1])


# --- peers that go ------------------------------------------------------------------------------


def lose_peer(comm, way, direction):
    """Rank 1 is killed while rank 0 waits for it, or in the middle of a message."""
    choose_way(comm, way)
    x = np.zeros(LARGE, "u1")
    if comm.rank == 1:
        if direction == "waits":
            until(lambda: sleeps(comm, 0))
        elif direction == "sends":
            comm.send(x, 0, async_op=True)
            until(lambda: posted(comm, 0, 1) > 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if direction == "sends":
        until(lambda: posted(comm, 0, 1) > 0 or 1 in comm._group.ended_ranks())
    while True:
        comm.send_recv(x, 1, 1)


@pytest.mark.parametrize("way", ["private", "streamed"])
@pytest.mark.parametrize("direction", ["waits", "sends"])
def test_a_killed_peer_is_lost(rank_server, way, direction):
    with rank_server.fork(2) as pool:
        start = time.monotonic()
        pool.start(lose_peer, way, direction)
        replies = pool.collect()

    assert time.monotonic() - start < SOON_S
    assert replies[1] == Ended(-signal.SIGKILL)
    # Its memory may go before its end is known (bugs.md, 11): AbortedError says so.
    assert isinstance(replies[0].error, (PeerLostError, AbortedError)), replies[0]
    assert "rank 1" in str(replies[0].error)


def close_while_awaited(comm, sends):
    if comm.rank == 1:
        until(lambda: sleeps(comm, 0))
        return
    if sends:
        comm.send(np.zeros(LARGE, "u1"), 1)
    else:
        comm.recv(np.zeros(3), 1)


@pytest.mark.parametrize("sends", [False, True])
def test_a_peer_that_closes_is_lost(ranks, sends):
    start = time.monotonic()
    found = errors(ranks.replies(2, close_while_awaited, sends))

    assert time.monotonic() - start < SOON_S
    assert isinstance(found[0], PeerLostError), found[0]
    assert "rank 0 of 2 lost rank 1" in str(found[0])
    assert "it closed the communicator" in str(found[0])


def receive_from_the_closed(comm, when):
    if comm.rank:
        if when == "sleeping":
            until(lambda: sleeps(comm, 0))
        for tag in range(5):
            comm.send(np.full(3, comm.rank * 10 + tag), 0, tag)
        comm.close()
        return None
    if when == "closed":
        until(lambda: all(map(comm._group.has_closed, (1, 2))))
    got = [int(comm.recv(np.zeros(3, int), peer, tag)[0]) for peer in (2, 1) for tag in (4, 0, 1)]
    got += [int(comm.recv(np.zeros(3, int), ANY_SOURCE, tag)[0]) % 10 for tag in (3, 2, 2, 3)]
    return got


@pytest.mark.parametrize("when", ["sleeping", "closed"])
def test_what_was_sent_before_closing_is_received(ranks, when):
    for _ in range(10):
        replies = ranks.call(3, receive_from_the_closed, when)
        assert replies[0] == [24, 20, 21, 14, 10, 11, 3, 2, 2, 3]


def abort_while_awaited(comm, call):
    if comm.rank == 1:
        until(lambda: sleeps(comm, 0))
        comm.abort()
    call(comm)


@pytest.mark.parametrize("name", ["send", "recv", "async"])
def test_abort_ends_messages(ranks, name):
    found = errors(ranks.replies(2, abort_while_awaited, WAITS[name][0]))

    assert {type(error) for error in found} == {AbortedError}
    assert all("rank 1 aborted it" in str(error) for error in found)


def be_interrupted(comm, call, pids):
    if comm.rank == 1:
        until(lambda: sleeps(comm, 0))
        os.kill(pids[0], signal.SIGINT)
        until(lambda: is_broken(comm))
        with pytest.raises(AbortedError, match="rank 0 was interrupted"):
            comm.check()
        return None
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call(comm)
    took_s = time.monotonic() - start
    until(lambda: comm._group.has_closed(1))  # close then says nothing of what was cut off
    return took_s


@pytest.mark.parametrize("name", ["send", "recv", "any", "send_recv"])
def test_ctrl_c(ranks, name):
    pids = [rank.pid for rank in ranks.pool(2).ranks]
    took_s, _ = ranks.call(2, be_interrupted, WAITS[name][0], pids)

    assert took_s < SOON_S


def be_interrupted_between_steps(comm):
    """Ctrl-C while Python, and no compiled loop, has a message: nobody waits for that rank."""
    if comm.rank == 1:
        with pytest.raises(AbortedError, match="rank 0 was interrupted"):
            comm.recv(np.zeros(3), 0, 4)
        return

    def interrupt(*_):
        raise KeyboardInterrupt

    messages = comm._backend.messages
    messages._steps[Context.room_bytes] = 0  # so that Python has to look
    messages._grant = interrupt
    with pytest.raises(KeyboardInterrupt):
        comm.send(np.zeros(3), 1, 5, timeout_s=10)
    with pytest.raises(AbortedError):
        comm.check()


def test_ctrl_c_between_two_steps(ranks):
    ranks.call(2, be_interrupted_between_steps)


# --- mismatches beside messages -----------------------------------------------------------------


def mismatch_beside_a_message(comm, way, waits_first):
    """Two ranks have begun a call that differs from the others', and exchange a message."""
    choose_way(comm, way)
    x = pattern(LARGE, 1)
    if comm.rank < 2:
        until(lambda: posted(comm, 2, 3) > 0)
        with pytest.raises(MismatchError):
            comm.all_reduce(np.zeros(2))
    else:
        work = comm.all_reduce(np.zeros(1), async_op=True)
        if comm.rank == 3:
            comm.send(x, 2)  # ends well: it is under way
        elif waits_first:
            assert (comm.recv(np.empty(LARGE, "u1"), 3) == x).all()
        with pytest.raises(MismatchError):
            work.wait()
        if comm.rank == 2 and not waits_first:
            assert (comm.recv(np.empty(LARGE, "u1"), 3) == x).all()
    assert comm.all_reduce(1) == 4
    return comm.send_recv(3, comm.rank ^ 1, comm.rank ^ 1)


@pytest.mark.parametrize("way", ["private", "streamed"])
@pytest.mark.parametrize("waits_first", [False, True])
def test_a_mismatch_of_others_ends_no_message(ranks, way, waits_first):
    assert ranks.call(4, mismatch_beside_a_message, way, waits_first, timeout_s=8) == [3] * 4


def keep_waiting(comm):
    """A mismatch of a call that a rank has begun ends no receive, and loses no message."""
    x = np.zeros(2)
    if comm.rank == 2:
        work = comm.all_reduce(x, async_op=True)
        assert comm.recv(x, 1, 7)[0] == 7
        assert comm.recv(x, 1, 3)[0] == 3
        with pytest.raises(MismatchError):
            work.wait()
        return comm.all_reduce(1)
    if comm.rank == 1:
        until(lambda: sleeps(comm, 2))
        comm.send(x + 3, 2, 3)
    with pytest.raises(MismatchError):
        comm.all_reduce(np.zeros(3))
    if comm.rank == 1:
        comm.send(x + 7, 2, 7)
    return comm.all_reduce(1)


def test_a_mismatch_ends_no_receive(ranks):
    assert ranks.call(3, keep_waiting, timeout_s=8) == [3] * 3


def break_beside_a_message(comm):
    """A mismatch that breaks the communicator ends messages, too, until it is shrunk."""
    if comm.rank == 2:
        comm.broadcast(np.zeros(2), 2)
        with pytest.raises(MismatchError, match="broken"):
            comm.recv(np.zeros(2), 1, 7)
    else:
        if comm.rank == 1:
            until(lambda: sleeps(comm, 2))
        with pytest.raises(MismatchError, match="broken"):
            comm.broadcast(np.zeros(3), 2)
    with comm.shrink() as whole:
        return whole.all_reduce(1)


def test_a_mismatch_that_breaks_ends_messages(ranks):
    assert ranks.call(3, break_beside_a_message, timeout_s=8) == [3] * 3


# --- messages left behind -----------------------------------------------------------------------


def leave_messages(comm, who_first):
    if comm.rank == 0:
        for tag in range(7):
            comm.send(np.zeros(2), 1, tag)
        if who_first == 1:
            until(lambda: comm._group.has_closed(1))
    else:
        until(lambda: posted(comm, 1, 0) == 7)
        comm.recv(np.zeros(2), 0, 2)
        if who_first == 0:
            until(lambda: comm._group.has_closed(0))
    comm.close()


@pytest.mark.parametrize("who_first", [0, 1])
def test_messages_left_behind_are_named_at_close(ranks, who_first):
    sender, receiver = errors(ranks.replies(2, leave_messages, who_first))

    assert isinstance(receiver, MismatchError)
    assert "rank 1 of 2 closed without receiving" in str(receiver)
    for tag in (0, 1, 3):
        assert f"from rank 0 with tag {tag}" in str(receiver)
    assert "tag 2" not in str(receiver)
    if who_first == 0:
        assert sender is None
    else:
        assert isinstance(sender, MismatchError)
        assert "sent messages that nobody received before closing: 6 to rank 1" in str(sender)
    assert ranks.call(2, lambda comm: comm.all_reduce(1)) == [2, 2]


def close_after_deadline(comm):
    comm.send(np.zeros(2), 1 - comm.rank, 5)
    with pytest.raises((DeadlineError, AbortedError)):  # who came later hears of the other's
        comm.recv(np.zeros(2), 1 - comm.rank, 6)
    comm.close()


def test_closing_a_broken_communicator_does_not_complain_of_messages(ranks):
    assert ranks.replies(2, close_after_deadline, timeout_s=0.2) == [Reply(), Reply()]


def test_an_asynchronous_send_that_nobody_receives_is_an_error_at_close(ranks):
    def forget(comm):
        if comm.rank == 0:
            comm.send(np.zeros(LARGE, "u1"), 1, async_op=True)
        else:
            until(lambda: is_broken(comm))

    sender, receiver = errors(ranks.replies(2, forget, timeout_s=0.5))

    assert isinstance(sender, (DeadlineError, AbortedError)), sender
    assert isinstance(receiver, (MismatchError, DeadlineError, AbortedError)), receiver
