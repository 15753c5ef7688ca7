"""Threads that send, receive, probe and wait on one communicator, from its first message on.

Each session has a communicator of its own, because the first messages of one take other ways: the
entries learn dtypes, mailboxes take memory. In a session the same threads run on every rank; thread
number n of all ranks draws the same messages, and gives them tags that no other thread uses. Each
rank draws for itself how it sends and receives them.

``GPUCOLL_TEST_OPERATIONS`` says how many operations there are in all (default 12,000), and
``GPUCOLL_TEST_SEED`` which (default 0). A loop of polls counts once.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections import Counter

import numpy as np
import pytest

from gpucoll import ANY_SOURCE
from gpucoll.errors import DeadlineError, MismatchError, StateError

OPERATIONS = int(os.environ.get("GPUCOLL_TEST_OPERATIONS", "12000"))
SEED = int(os.environ.get("GPUCOLL_TEST_SEED", "0"))
WORLDS = (2, 3, 4)
THREADS = 4
MESSAGES = 25
"""Of each thread in a session."""
SIZES = (1, 1, 7, 300, 2048, 9000, 70_000)
RECORD = np.dtype([("number", "i8"), ("half", "f4")])
FORMS = ("i8", "i8", "f4", RECORD, "object")
TAGS = 1_000_000
"""Of each thread: the first is that of most messages, the others of one each."""


def note_refused(counts, error):
    """Count a call that was refused because another thread is in one; raise any other error."""
    if "another thread" not in str(error):
        raise error
    counts["refused"] += 1


class Exchange:
    """One thread of one rank: its part in the messages of all threads of that number."""

    def __init__(self, comm, thread, seed):
        self.comm, self.first_tag = comm, thread * TAGS
        self.together = random.Random(f"{seed} {thread}")
        self.own = random.Random(f"{seed} {thread} {comm.rank}")
        self.pending = []
        self.counts: Counter[str] = Counter()

    def run(self, start):
        start.wait(20)
        for number in range(1, MESSAGES + 1):
            sender, receiver = self.together.sample(range(self.comm.world_size), 2)
            form, size = self.together.choice(FORMS), self.together.choice(SIZES)
            tag = self.first_tag
            if self.together.random() < 0.2:
                tag += number
            content = self.content(form, size, 100 * number + sender)
            if self.comm.rank == sender:
                self.send(content, receiver, tag)
            elif self.comm.rank == receiver:
                self.receive(content, sender, tag)
            if self.own.random() < 0.2:
                assert self.count("no such message", self.comm.probe, tag=999, wait=False) is None
        self.settle()

    def content(self, form, size, value):
        if form == "object":
            return {"value": value, "bytes": b"x" * size}
        array = np.zeros(size, form)
        array["number" if form is RECORD else ...] = value + np.arange(size) % 7
        return array

    def count(self, way, function, *arguments, **options):
        self.counts[way] += 1
        return function(*arguments, **options)

    def blocking(self, way, function, *arguments, **options):
        """Make a blocking call; where another thread is in one, begin it and wait."""
        try:
            return self.count(way, function, *arguments, **options)
        except StateError as error:
            note_refused(self.counts, error)
        options.pop("info", None)
        options.pop("timeout_s", None)
        work = function(*arguments, **options, async_op=True)
        result = work.wait()
        return (result, work.message) if way == "informed" else result

    # --- sending ----------------------------------------------------------------------------------

    def send(self, content, receiver, tag):
        send = self.comm.send_object if isinstance(content, dict) else self.comm.send
        ways = ["send", "send within", "begin to send", "synchronous"]
        way = self.own.choice(ways if send == self.comm.send_object else [*ways, "plan to send"])
        if way == "send":
            self.blocking(way, send, content, receiver, tag)
        elif way == "send within":
            self.blocking(way, send, content, receiver, tag, timeout_s=15.0)
        elif way == "synchronous":
            self.blocking(way, send, content, receiver, tag, synchronous=True)
        elif way == "plan to send":
            self.run_plan(way, self.comm.plan_send, send, content, receiver, tag)
        else:
            work = self.count(way, send, content, receiver, tag, async_op=True)
            if self.own.random() < 0.7:  # else nobody ever asks for it
                self.pending.append((work, None, None))

    def run_plan(self, way, make, otherwise, array, peer, tag):
        plan = make(array, peer, tag)
        try:
            self.count(way, plan)
        except StateError as error:
            note_refused(self.counts, error)
            otherwise(array, peer, tag, async_op=True).wait()

    # --- receiving --------------------------------------------------------------------------------

    def receive(self, expected, sender, tag):
        source = ANY_SOURCE if tag != self.first_tag and self.own.random() < 0.5 else sender
        if isinstance(expected, dict):
            ways = [self.receive_object, self.begin_object, self.polled, self.probed]
        else:
            ways = [self.into, self.within, self.informed, self.unknown, self.begun]
            ways += [self.begun_unknown, self.too_small, self.polled, self.probed, self.planned]
        self.own.choice(ways)(expected, source, tag)

    def compare(self, expected, got):
        if isinstance(expected, dict):
            assert got == expected
        else:
            assert np.array_equal(got, expected), (got, expected)

    def into(self, expected, source, tag):
        out = np.zeros_like(expected)
        assert self.blocking("receive", self.comm.recv, out, source, tag) is out
        self.compare(expected, out)

    def within(self, expected, source, tag):
        out = np.zeros_like(expected)
        self.blocking("receive within", self.comm.recv, out, source, tag, timeout_s=15.0)
        self.compare(expected, out)

    def informed(self, expected, source, tag):
        out = np.zeros_like(expected)
        out, message = self.blocking("informed", self.comm.recv, out, source, tag, info=True)
        assert (message.tag, message.count) == (tag, expected.size)
        self.compare(expected, out)

    def unknown(self, expected, source, tag):
        got = self.blocking("of unknown size", self.comm.recv, source=source, tag=tag)
        self.compare(expected, got)

    def receive_object(self, expected, source, tag):
        got = self.blocking("receive an object", self.comm.recv_object, source, tag)
        self.compare(expected, got)

    def begun(self, expected, source, tag):
        out = np.zeros_like(expected)
        work = self.count("begin to receive", self.comm.recv, out, source, tag, async_op=True)
        self.pending.append((work, expected, out))

    def begun_unknown(self, expected, source, tag):
        work = self.count("begin", self.comm.recv, source=source, tag=tag, async_op=True)
        self.keep_for_later(work, expected, expected.nbytes)

    def begin_object(self, expected, source, tag):
        work = self.count("begin an object", self.comm.recv_object, source, tag, async_op=True)
        self.keep_for_later(work, expected, len(expected["bytes"]))

    def keep_for_later(self, work, expected, size_bytes):
        self.pending.append((work, expected, None))
        if size_bytes > 4000:  # its sender waits until this rank has said where it goes
            self.settle()

    def too_small(self, expected, source, tag):
        """Be refused a message that is too large, or of another dtype; receive it then."""
        self.settle()  # or the message would be another one's
        small = np.zeros(expected.size - 1, expected.dtype)
        with pytest.raises(MismatchError):
            self.blocking("too small", self.comm.recv, small, source, tag)
        self.into(expected, source, tag)

    def planned(self, expected, source, tag):
        out = np.zeros_like(expected)
        self.run_plan("plan to receive", self.comm.plan_recv, self.comm.recv, out, source, tag)
        self.compare(expected, out)

    def polled(self, expected, source, tag):
        self.settle()
        message = self.count("poll", self.comm.probe, source, tag, wait=False)
        while message is None:
            message = self.comm.probe(source, tag, wait=False)
        self.take(message, expected)

    def probed(self, expected, source, tag):
        self.settle()
        try:
            message = self.count("probe", self.comm.probe, source, tag)
        except StateError as error:
            note_refused(self.counts, error)
            self.polled(expected, source, tag)
        else:
            self.take(message, expected)

    def take(self, message, expected):
        if isinstance(expected, dict):
            receive, size_bytes = self.comm.recv_object, message.size_bytes
        else:
            receive, size_bytes = self.comm.recv, expected.nbytes
        assert message.size_bytes == size_bytes
        try:
            got = self.count("receive what was probed", message.recv)
        except StateError as error:
            note_refused(self.counts, error)
            got = receive(source=message.source, tag=message.tag, async_op=True).wait()
        self.compare(expected, got)

    # --- waiting ----------------------------------------------------------------------------------

    def settle(self):
        self.own.shuffle(self.pending)
        for work, expected, out in self.pending:
            got = self.wait_for(work)
            assert out is None or got is out
            if expected is not None:
                self.compare(expected, got)
        self.pending.clear()

    def wait_for(self, work):
        way = self.own.randrange(4)
        if way == 0:
            self.counts["poll a work"] += 1
            while not work.done():
                pass
        if way == 1:
            self.counts["wait for moments"] += 1
            while not work.done():
                with contextlib.suppress(DeadlineError):  # of this wait: the message goes on
                    work.wait(0.0005)
        return self.count("wait", work.wait)


def run_session(comm, seed):
    """Run the threads of a session; return what they did, and how often."""
    exchanges = [Exchange(comm, thread, seed) for thread in range(THREADS)]
    start, errors = threading.Barrier(THREADS), []

    def run(exchange):
        try:
            exchange.run(start)
        except BaseException as error:
            errors.append(error)
            comm.abort()  # or the others would wait for this one

    threads = [threading.Thread(target=run, args=(exchange,)) for exchange in exchanges]
    for thread in threads:
        thread.start()
    assert comm.all_reduce(1) == comm.world_size  # nothing of theirs is in its way
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    assert comm.all_reduce(1) == comm.world_size
    return sum((exchange.counts for exchange in exchanges), Counter())


def run_sessions(comm, seed, operations):
    counts: Counter[str] = Counter()
    session, interval = 0, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads meet in more places
    try:
        while comm.all_reduce(counts.total()) < operations:
            with comm.duplicate() as each:
                counts += run_session(each, f"{seed} {session}")
            session += 1
    finally:
        sys.setswitchinterval(interval)
    return dict(counts), session


def report(where, replies):
    counts = sum((Counter(reply[0]) for reply in replies), Counter())
    print(f"{where}, {replies[0][1]} sessions, {counts.total()} operations: {counts}")
    return counts


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", WORLDS)
def test_messages_of_threads(ranks, world_size):
    share = OPERATIONS // len(WORLDS)
    replies = ranks.call(world_size, run_sessions, SEED, share, limit_s=60 + share / 100)
    counts = report(f"{world_size} ranks", replies)
    assert counts.total() >= share
    assert counts["refused"]


@pytest.mark.soak
@pytest.mark.parametrize("placed", ["ab", "aab"])
def test_messages_of_threads_between_hosts(hosts, placed):
    share = OPERATIONS // 10
    replies = hosts.call(placed, run_sessions, SEED, share, limit_s=60 + share / 20)
    counts = report(placed, replies)
    assert counts.total() >= share
