"""Calls over connections that do not end well: who is told what, and how soon."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import select
import signal
import socket
import struct
import threading
import time

import numpy as np
import pytest
from tests.transport.tcp import schedules
from tests.transport.tcp.schedules import row
from tests.transport.tcp.stream_ends import HEADER, HEADER_SENT, Ends, reduction

from gpucoll.transport.tcp.stream_words import MAGIC
from gpucoll.transport.tcp.streams import Outcome, StreamStatus, deadline_after

GONE, RESET = StreamStatus.GONE, (errno.ECONNRESET, errno.EPIPE)
BIG = 16 << 20


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def close_hard(connection: socket.socket) -> None:
    """Close so that the other end sees a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("more_bytes", [0, 1, 7])
def test_a_peer_that_closes_at_every_step(kind, step, more_bytes):
    """The left one sends so many blocks of a ring, and some bytes, then it closes."""
    size, count = 3, 3000
    array = np.ones(count, np.float32)
    rows = schedules.ring_all_reduce(0, size, count, 4)
    sent_bytes = 4000 * step + more_bytes - (4001 if step == 4 else 0)
    with Ends(size, kind) as ends:
        ends.sockets[2][0].send((HEADER_SENT + bytes(4 * 4000))[: len(HEADER_SENT) + sent_bytes])
        ends.sockets[2][0].close()
        outcome = ends.run_one(0, rows, array, reduction=reduction("float32"))
        assert outcome == Outcome(GONE, ends.link(0, 2), 0)


@pytest.mark.parametrize("sent_bytes", range(0, 33, 8))
def test_a_peer_that_closes_within_the_header(sent_bytes):
    array = np.ones(4, np.float32)
    with Ends(2, "tcp") as ends:
        ends.sockets[1][0].send(HEADER_SENT[:sent_bytes])
        ends.sockets[1][0].close()
        outcome = ends.run_one(0, [row(0, receive=(1, 0, 16))], array)
    assert outcome == Outcome(GONE, 0, 0)
    assert array.sum() == 4


def test_a_peer_that_is_reset():
    array = np.ones(4, np.float32)
    with Ends(3, "tcp") as ends:
        close_hard(ends.sockets[2][0])
        rows = [row(0, (1, 0, 16), (1, 0, 16)), row(0, receive=(2, 0, 16))]
        outcome = ends.run_one(0, rows, array)
        assert (outcome.status, outcome.link) == (GONE, ends.link(0, 2))
    assert outcome.errno in (0, errno.ECONNRESET)  # of TLS it is 0


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_peer_that_closes_while_it_is_sent_to(kind):
    array = np.zeros(BIG, np.uint8)
    with Ends(3, kind) as ends:
        taker = ends.sockets[1][0]

        def take_some() -> None:
            taker.settimeout(30)
            assert len(taker.recv(1 << 16)) > 0
            taker.close()

        thread = in_thread(take_some)
        outcome = ends.run_one(0, [row(0, (1, 0, BIG))], array)
        thread.join()
    assert outcome.status == GONE
    assert outcome.link == 0
    assert outcome.errno in (*RESET, 0)  # of TLS it may be 0


def test_a_peer_that_closes_when_all_is_there_is_not_gone():
    array = np.zeros(1000, np.uint8)
    with Ends(2, "tcp") as ends:
        ends.sockets[1][0].send(HEADER_SENT + b"\1" * 1000)
        ends.sockets[1][0].close()
        assert ends.run_one(0, [row(0, receive=(1, 0, 1000))], array).status == StreamStatus.DONE
    assert array.all()


@pytest.mark.parametrize("word", range(4))
@pytest.mark.parametrize("reduces", [0, 1])
def test_a_header_that_does_not_match(word, reduces):
    theirs = [MAGIC, *HEADER]
    theirs[word] ^= 1 << 33
    array = np.ones(1000, np.float32)
    with Ends(3, "tcp") as ends:
        ends.sockets[2][0].send(struct.pack("<4q", *theirs) + bytes(4000))
        rows = [row(0, receive=(2, 0, 4000), reduces=reduces)]
        outcome = ends.run_one(0, rows, array, reduction=reduction("float32"))
        assert outcome.link == ends.link(0, 2)
    assert outcome.status == StreamStatus.MISMATCH
    assert outcome.header == tuple(theirs)
    assert array.sum() == 1000, "something was written"


def test_a_header_says_more_than_that_its_sender_is_gone():
    """Who finds a mismatch closes: the others are to find it, too, and no lost rank."""
    array = np.zeros(BIG, np.uint8)
    rows = [row(0, (1, 0, BIG), (1, 0, BIG))]
    with Ends(2, "tcp") as ends:
        ends.sockets[1][0].send(struct.pack("<4q", MAGIC, 7, 4, 0))
        ends.sockets[1][0].close()
        broken = select.poll()
        broken.register(ends.sockets[0][1], 0)
        ends.sockets[0][1].send(b"?")  # is answered by a reset
        assert broken.poll(10_000)
        outcome = ends.run_one(0, rows, array)
    assert outcome == Outcome(StreamStatus.MISMATCH, 0, header=(MAGIC, 7, 4, 0))


def test_a_header_that_matches_says_nothing_more():
    array = np.zeros(BIG, np.uint8)
    with Ends(2, "tcp") as ends:
        ends.sockets[1][0].send(HEADER_SENT)
        ends.sockets[1][0].close()
        broken = select.poll()
        broken.register(ends.sockets[0][1], 0)
        ends.sockets[0][1].send(b"?")
        assert broken.poll(10_000)
        outcome = ends.run_one(0, [row(0, (1, 0, BIG), (1, 0, BIG))], array)
    assert (outcome.status, outcome.link) == (GONE, 0)
    assert outcome.errno in RESET


def test_rubbish_is_a_mismatch():
    array = np.zeros(100, np.uint8)
    with Ends(2) as ends:
        ends.sockets[1][0].send(b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n")
        outcome = ends.run_one(0, [row(0, receive=(1, 0, 100))], array)
    assert outcome.status == StreamStatus.MISMATCH
    assert struct.pack("<4q", *outcome.header).startswith(b"GET / HTTP/1.1\r\n")


def test_abort():
    word, array, found = ctypes.c_int64(0), np.ones(8, np.uint8), []
    with Ends(2, "tcp") as ends:

        def run() -> None:
            rows = [row(0, (1, 0, 8), (1, 0, 8))]
            found.append(ends.run_one(0, rows, array, abort_address=ctypes.addressof(word)))

        thread = in_thread(run)
        peer = ends.sockets[1][0]
        peer.settimeout(30)
        assert peer.recv(100)  # the call has begun
        word.value = 5
        start = time.monotonic()
        thread.join()
        assert time.monotonic() - start < 0.5
    assert found == [Outcome(StreamStatus.ABORTED)]


def test_an_abort_that_was_there_before():
    word = ctypes.c_int64(-1)
    array = np.zeros(8, np.uint8)
    with Ends(2) as ends:
        rows = [row(0, (1, 0, 8))]
        outcome = ends.run_one(0, rows, array, abort_address=ctypes.addressof(word))
        assert outcome == Outcome(StreamStatus.ABORTED)
        ends.expect_silence()


@pytest.mark.parametrize("seconds", [-1.0, 0.05, 0.3])
def test_deadline(seconds):
    array = np.zeros(8, np.uint8)
    with Ends(2, "tcp") as ends:
        start = time.monotonic()
        rows = [row(0, (1, 0, 8), (1, 0, 8))]
        outcome = ends.run_one(0, rows, array, deadline_ns=deadline_after(seconds))
        took_s = time.monotonic() - start
    assert outcome == Outcome(StreamStatus.DEADLINE)
    assert seconds <= took_s < seconds + 1.5


def test_what_is_there_is_done_though_the_deadline_is_over():
    array = np.zeros(8, np.uint8)
    with Ends(2) as ends:
        ends.sockets[1][0].send(HEADER_SENT + bytes(8))
        rows = [row(0, (1, 0, 8), (1, 0, 8))]
        assert ends.run_one(0, rows, array, deadline_ns=1).status == StreamStatus.DONE


@pytest.mark.parametrize("moving", [False, True])
def test_ctrl_c(moving):
    """In a wait, and while bytes move all the time: a row is sent over and over."""
    array = np.zeros(1 << 20, np.uint8)
    with Ends(2, "tcp") as ends, contextlib.ExitStack() as stack:
        sent = []
        stop = threading.Event()

        def interrupt() -> None:
            taker = ends.sockets[1][0]
            taker.settimeout(30)
            taker.recv(1)
            sent.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            while moving and not stop.is_set() and taker.recv(1 << 20):
                pass

        rows = [row(0, (1, 0, 1))]
        rows += [row(1, (1, 0, 1 << 20))] * 50_000 if moving else [row(0, receive=(1, 0, 1))]
        thread = in_thread(interrupt)
        stack.callback(thread.join)
        stack.callback(ends.sockets[0][1].shutdown, socket.SHUT_RDWR)
        stack.callback(stop.set)
        with pytest.raises(KeyboardInterrupt):
            ends.run_one(0, rows, array)
        assert time.monotonic() - sent[0] < 0.5


def test_a_slice_ends_while_bytes_move():
    array = np.zeros(1000, np.uint8)
    with Ends(2) as ends:
        rows = ends.rows(0, [row(0, (1, 0, 1))] * 100)
        streams = ends.streams[0]
        streams.begin(rows, array.ctypes.data, 1000, HEADER, slice_ns=0)
        for _ in range(99):
            assert streams.proceed() == Outcome(StreamStatus.AGAIN)
        assert streams.proceed() == Outcome(StreamStatus.DONE)


def test_a_signal_handler_that_returns_lets_the_call_go_on():
    array = np.zeros(8, np.uint8)
    handled = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(time.monotonic()))
    try:
        with Ends(2, "tcp") as ends:
            peer = ends.sockets[1][0]
            peer.settimeout(30)

            def answer() -> None:
                peer.recv(1)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                while not handled:
                    time.sleep(0.001)
                peer.send(HEADER_SENT + b"\1" * 8)

            thread = in_thread(answer)
            outcome = ends.run_one(0, [row(0, (1, 0, 8), (1, 0, 8))], array)
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert outcome == Outcome(StreamStatus.DONE)
    assert array.all()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(1, (1, 0, 8)), row(0, (1, 0, 8))], "row 1 .*step is less"),
        ([row(0, (1, 0, 9))], "not in the working buffer"),
        ([row(0, receive=(1, 8, 1))], "not in the working buffer"),
        ([row(0, receive=(1, -1, 1))], "not in the working buffer"),
        ([row(0, receive=(1, 0, -1))], "not in the working buffer"),
        ([row(0, (1, 2**62, 2**62))], "not in the working buffer"),
        ([row(0, receive=(1, 0, 6), reduces=1)], "whole number of items"),
        ([row(0, (1, 0, 8), forwards=1)], "no row before receives"),
        ([row(0, receive=(1, 0, 4)), row(1, (1, 0, 8), forwards=1)], "no row before receives"),
        (
            [row(0, receive=(1, 0, 8)), row(0, receive=(1, 4, 4)), row(1, (1, 0, 8), forwards=1)],
            "a later one changes",
        ),
    ],
)
def test_rows_that_cannot_be(rows, said):
    array = np.zeros(8, np.uint8)
    with Ends(2) as ends:
        with pytest.raises(ValueError, match=said):
            ends.run_one(0, rows, array, reduction=reduction("float32"))
        ends.expect_silence()


def test_links_that_are_not_there():
    array = np.zeros(8, np.uint8)
    table = np.array([[*row(0, (2, 0, 8)), 0, 1, 0]], np.int64)
    with Ends(2) as ends:
        for table[0, 1] in (1, -2):
            with pytest.raises(ValueError, match="no link of that number"):
                ends.streams[0].run(table, array.ctypes.data, 8, HEADER)


@pytest.mark.parametrize(
    "rows", [np.zeros((1, 13), np.int32), np.zeros((1, 9), np.int64), np.zeros((13, 2), np.int64).T]
)
def test_tables_of_another_form(rows):
    with Ends(2) as ends, pytest.raises(ValueError, match="a schedule is a C-contiguous table"):
        ends.streams[0].run(rows, 0, 0, HEADER)


def test_a_reduction_without_a_kernel():
    array = np.zeros(8, np.uint8)
    with Ends(2) as ends, pytest.raises(ValueError, match="no kernel"):
        ends.run_one(0, [row(0, receive=(1, 0, 8), reduces=1)], array)
