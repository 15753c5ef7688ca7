"""Messages between hosts whose other end is late, leaves, is gone, or sends what no rank sends."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time

import numpy as np
import pytest
from tests.api.test_received_messages import fill_the_room
from tests.faults.test_messages import (
    LARGE,
    WAITS,
    abort_while_awaited,
    be_interrupted,
    close_after_deadline,
    close_while_awaited,
    errors,
    leave_messages,
    receive_from_the_closed,
    wait_in_vain,
)
from tests.group.world.test_bulk import held_open
from tests.messages import pattern, posted
from tests.ranks import Ended, Reply
from tests.waiting import SOON_S, is_broken, is_stopped, thread_names, until

from gpucoll import ANY_SOURCE, ANY_TAG
from gpucoll.backends.cpu.wires.words import Frame, Wire
from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Envelope, Way
from gpucoll.transport.shared.words import Mode
from gpucoll.types import dtype_code

# --- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAITS)
def test_a_deadline_names_the_message_and_where_the_other_is(hosts, name):
    call, text = WAITS[name]
    found = errors(hosts.replies("ab", wait_in_vain, call, timeout_s=0.3))

    assert {type(error) for error in found} == {DeadlineError}, list(map(str, found))
    assert f"rank 0 of 2 waited 0.3 s in {text}" in str(found[0])
    assert "Rank 1 on " in str(found[0])
    assert "is in no call of this communicator" in str(found[0])
    assert "rank 1 of 2: rank 0 waited 0.3 s in" in str(found[1])


def send_and_stop(comm):
    """Rank 1 stops after a message; rank 0 waits for another one."""
    if comm.rank == 1:
        comm.send(np.array([os.getpid()]), 0, synchronous=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        until(lambda: is_broken(comm))
        return None
    pid = int(comm.recv(np.zeros(1, int), 1)[0])
    until(lambda: is_stopped(pid))
    try:
        with pytest.raises(DeadlineError) as error:
            comm.send(np.zeros(LARGE, "u1"), 1, 5, timeout_s=1)
        return str(error.value)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.soak
def test_a_rank_that_is_stopped_does_not_answer_where_it_is(hosts):
    text = hosts.replies("ab", send_and_stop)[0].result

    assert "rank 0 of 2 waited 1 s in send(uint8, 20000000 bytes, dest=1, tag=5)" in text
    assert "is not answering (stopped, or its host is cut off)" in text


def wait_for_who_cannot_connect(comm, name):
    """Rank 1 has another secret since: no connection for messages comes about."""
    if comm.rank == 1:
        connector = comm._group.pairs._connector
        other = connector._credentials._replace(secret=b"another secret, as long")
        connector._credentials = other
    comm.barrier()
    if comm.rank == 1:
        until(lambda: is_broken(comm))
        return None
    with pytest.raises(DeadlineError) as error:
        WAITS[name][0](comm)
    return str(error.value)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("name", ["send", "recv"])
def test_a_deadline_says_why_there_is_no_connection(hosts, name):
    text = hosts.replies("ab", wait_for_who_cannot_connect, name, timeout_s=1.0)[0].result

    assert "Rank 1 on " in text
    assert "is out of reach: closed the connection instead of taking this rank's proof" in text


# --- who goes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sends", [False, True])
def test_a_peer_that_closes_is_lost(hosts, sends):
    start = time.monotonic()
    found = errors(hosts.replies("ab", close_while_awaited, sends))

    assert time.monotonic() - start < SOON_S
    assert isinstance(found[0], PeerLostError), found[0]
    assert "rank 0 of 2 lost rank 1" in str(found[0])


@pytest.mark.parametrize("placed", ["abc", "aab"])
@pytest.mark.parametrize("when", ["sleeping", "closed"])
def test_what_was_sent_before_closing_is_received(hosts, placed, when):
    for _ in range(3):
        replies = hosts.call(placed, receive_from_the_closed, when)
        assert replies[0] == [24, 20, 21, 14, 10, 11, 3, 2, 2, 3]


@pytest.mark.parametrize("name", ["send", "recv", "async"])
def test_abort_ends_messages(hosts, name):
    found = errors(hosts.replies("ab", abort_while_awaited, WAITS[name][0]))

    assert {type(error) for error in found} == {AbortedError}
    assert all("rank 1 aborted it" in str(error) for error in found)


def test_ctrl_c(hosts):
    pool = hosts.pool("ab")
    pids = [rank.pid for rank in pool.ranks]
    hosts.start(pool, "ab", be_interrupted, WAITS["recv"][0], pids)
    took_s, _ = pool.results()

    assert took_s < SOON_S


def send_until_killed(comm):
    """Rank 1 is killed in the middle of what it sends."""
    x = np.zeros(200 << 20, np.uint8)
    if comm.rank == 0:
        comm.recv(x, 1)
    elif comm.rank == 1:
        work = comm.send(x, 0, async_op=True)
        wires = comm._backend.messages._thread.wires
        until(lambda: wires.wires and wires.wires[0].words[15])  # some of it has gone
        os.kill(os.getpid(), signal.SIGKILL)
        work.wait()
    comm.barrier()


@pytest.mark.parametrize("placed", ["ab", "abb", "aba"])
def test_a_peer_killed_in_the_middle_of_a_large_message(hosts, rank_server, placed):
    with rank_server.fork(len(placed)) as pool:
        start = time.monotonic()
        hosts.start(pool, placed, send_until_killed)
        replies = pool.collect()

    assert time.monotonic() - start < SOON_S
    assert replies[1] == Ended(-signal.SIGKILL)
    for reply in (replies[0], *replies[2:]):
        assert isinstance(reply.error, PeerLostError), reply
        assert "rank 1" in str(reply.error)


def shut_a_connection(comm):
    comm.send_recv(np.zeros(1), 1 - comm.rank, 1 - comm.rank)
    comm.barrier()
    if comm.rank == 0:
        comm._backend.messages._thread.wires.wires[0].end.shutdown(2)
    comm.recv(np.zeros(1), 1 - comm.rank, 7)


def test_a_connection_that_ends_without_a_word(hosts):
    start = time.monotonic()
    found = errors(hosts.replies("ab", shut_a_connection))

    assert time.monotonic() - start < SOON_S
    assert {type(error) for error in found} == {PeerLostError}
    assert all("the connection for messages ended" in str(error) for error in found), found


@pytest.mark.parametrize("who_first", [0, 1])
def test_messages_left_behind_are_named_at_close(hosts, who_first):
    sender, receiver = errors(hosts.replies("ab", leave_messages, who_first))

    assert isinstance(receiver, MismatchError)
    assert "rank 1 of 2 closed without receiving" in str(receiver)
    for tag in (0, 1, 3):
        assert f"from rank 0 with tag {tag}" in str(receiver)
    assert "tag 2" not in str(receiver)
    if who_first == 0:
        assert sender is None


def test_closing_a_broken_communicator_does_not_complain_of_messages(hosts):
    assert hosts.replies("ab", close_after_deadline, timeout_s=0.2) == [Reply(), Reply()]


def test_the_eager_room_is_counted_in_bytes(hosts):
    assert hosts.call("ab", fill_the_room, timeout_s=1.0)[0] == (1 << 20) // (8192 + 64)


# --- beside collectives -------------------------------------------------------------------------


def arrive_beside_work(comm):
    """Messages end while nobody calls in: a callback, a descriptor, `done`, a large one."""
    peer = 1 - comm.rank
    called, out, large = threading.Event(), np.zeros(3), np.zeros(LARGE, np.uint8)
    works = [comm.recv(out, peer, 1, async_op=True), comm.recv(large, peer, 2, async_op=True)]
    works[0].add_done_callback(lambda work: called.set())
    comm.barrier()
    comm.send(np.ones(3), peer, 1)
    sent = comm.send(np.full(LARGE, 7, np.uint8), peer, 2, async_op=True)
    assert called.wait(10)
    rows = comm._backend.messages
    until(lambda: rows._words[1] == 0)  # nothing is pending, and nobody has looked
    assert [work.done() for work in (*works, sent)] == [True] * 3
    return float(out.sum()), int(large.min())


def test_they_arrive_while_nobody_calls(hosts):
    assert hosts.call("ab", arrive_beside_work) == [(3.0, 7)] * 2


def receive_from_both_kinds(comm):
    """Rank 0 receives from ranks of its own host and of others, whoever comes."""
    count, random = 60, np.random.default_rng(comm.rank)
    sizes = [0, 1, 16, 17, 8192, 8193, 32769, 300_000, 3 << 20]
    if comm.rank:
        for number in range(count):
            size = int(random.choice(sizes))
            head = np.array([comm.rank, number, size])
            comm.send(head, 0, 1)
            comm.send(pattern(size, comm.rank * count + number), 0, 2 + comm.rank)
        return count
    seen = dict.fromkeys(range(1, comm.world_size), 0)
    for _ in range(count * (comm.world_size - 1)):
        head, found = comm.recv(np.zeros(3, int), ANY_SOURCE, 1, info=True)
        rank, number, size = head.tolist()
        assert found.source == rank
        assert seen[rank] == number
        seen[rank] += 1
        data = comm.recv(source=rank, tag=ANY_TAG if comm.world_size == 2 else 2 + rank)
        assert np.array_equal(data, pattern(size, rank * count + number)), (rank, number, size)
    return sum(seen.values())


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aab", "abac"])
def test_any_source_over_both_kinds_of_ranks(hosts, placed):
    assert hosts.call(placed, receive_from_both_kinds)[0] == 60 * (len(placed) - 1)


# --- what no rank sends -------------------------------------------------------------------------


def record(number, *, way=Way.POSTED, size_bytes=8, dtype="float64", mode=0, acknowledgement=0):
    """Return a message's record as it travels."""
    words = [0] * (layout.ENVELOPE_BYTES // 8)
    words[Envelope.number], words[Envelope.size_bytes] = number, size_bytes
    words[Envelope.dtype] = dtype_code(dtype)
    words[Envelope.packed] = way | mode << 8 | 17 << 16 | acknowledgement << 24
    words[Envelope.place] = 1
    return struct.pack("<8q", *words)


def frame(kind, body=b"", value=0, length=None):
    size_bytes = len(body) if length is None else length
    return struct.pack("<qq", kind | size_bytes << 8, value) + body


FORGED = {
    "an object that is not sealed": frame(Frame.RECORD, record(2, dtype="object")),
    "a part of an object": frame(Frame.RECORD, record(2, mode=Mode.FOLLOWS)),
    "an object elsewhere": frame(
        Frame.RECORD, record(2, way=Way.ON_ANOTHER_HOST, dtype="object", acknowledgement=1)
    )
    + frame(Frame.DATA, b"x" * 8, 1),
    "a number out of turn": frame(Frame.RECORD, record(3)),
    "a way that is another host's own": frame(Frame.RECORD, record(2, way=Way.IN_PROCESS)),
    "a size that is not its record's": frame(Frame.RECORD, record(2, size_bytes=4096)),
    "a negative size": frame(Frame.RECORD, record(2, size_bytes=-8)),
    "a part of no message": frame(Frame.RECORD, record(0, way=Way.PART)),
    "a record that is too short": frame(Frame.RECORD, b"x" * 16),
    "an acknowledgement that is none": frame(Frame.RECORD, record(2, acknowledgement=60000)),
    "data that nobody asked for": frame(Frame.DATA, b"x" * 64, 1),
    "data beyond the table": frame(Frame.DATA, b"x" * 64, 1 << 40),
    "a question for nothing": frame(Frame.ASK, value=3),
    "a question beyond the table": frame(Frame.ASK, value=-1),
    "an answer beyond the table": frame(Frame.TAKEN, value=1 << 33),
    "a frame without end": frame(Frame.RECORD, length=1 << 40),
    "sealed without a key": frame(Frame.SEALED, struct.pack(">I", 64) + b"x" * 96),
    "no frame at all": b"\xff" * 64,
}


def forge(comm, data):
    """Rank 1 writes bytes of its own into the connection; rank 0 waits for messages."""
    comm.send_recv(np.zeros(1), 1 - comm.rank, 1 - comm.rank)
    comm.barrier()
    if comm.rank == 1:
        comm._backend.messages._thread.wires.wires[0].end.send(data)
        until(lambda: is_broken(comm))
        comm.check()
    comm.recv_object(1, ANY_TAG)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("what", FORGED)
def test_what_no_rank_sends(hosts, what):
    found = errors(hosts.replies("ab", forge, FORGED[what]))

    assert all(isinstance(error, PeerLostError) for error in found), found
    assert "the connection for messages ended" in str(found[0])


def frames_sent(comm):
    """Return which kinds of frames rank 0 sends for an object, and whether its bytes are in one."""
    word = b"a word that nobody else says"
    if comm.rank == 1:
        return comm.recv_object(0) == word, comm.recv_object(0)[1].sum() == 40_000
    comm.send_object(word, 1)
    messages = comm._backend.messages
    until(lambda: messages._thread.wires.wires)
    wire = messages._thread.wires.wires[0]
    until(lambda: word in bytes(wire._buffers[Wire.sealed_buffer]))
    is_plain = word in bytes(wire._buffers[Wire.out_buffer])
    comm.send_object([word, np.ones(40_000)], 1)
    return is_plain is False, True


def test_objects_go_sealed(hosts):
    assert hosts.call("ab", frames_sent) == [(True, True)] * 2


# --- what is left -------------------------------------------------------------------------------


def open_and_close(seat):
    found = []
    for _ in range(3):
        with seat.init() as comm:
            for peer in range(comm.world_size):
                comm.send(np.zeros(3), peer, async_op=True)
                comm.send_object({}, peer, async_op=True)
            for peer in range(comm.world_size):
                comm.recv(np.zeros(3), peer)
                comm.recv_object(peer)
            assert "gpucoll-message" in thread_names()
        found.append((held_open(), {*thread_names()}))
    return found


def test_nothing_is_left(hosts):
    for found in hosts.call("aab", open_and_close, gives="seat"):
        assert found[1] == found[2]
        assert "gpucoll-message" not in found[2][1]


def fork_a_child(comm):
    peer = 1 - comm.rank
    comm.send_recv(np.zeros(1), peer, peer)
    number = comm._backend.messages._thread.wires.wires[0].end.fileno()
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, b"%d" % os.path.exists(f"/proc/self/fd/{number}"))
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(reading, 10)
    os.close(reading)
    os.close(writing)
    comm.send_recv(np.zeros(1), peer, peer)
    return said


def test_a_forked_child_keeps_no_connection(hosts):
    assert hosts.call("ab", fork_a_child) == [b"0"] * 2


def test_posted_counts_on_both_hosts(hosts):
    def count(comm):
        if comm.rank == 0:
            comm.send(np.zeros(1), 1)
        until(lambda: posted(comm, 1, 0) == 1)
        if comm.rank == 1:
            comm.recv(np.zeros(1), 0)

    hosts.call("ab", count)
