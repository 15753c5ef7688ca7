"""A receive or probe whose own deadline comes before a message ends alone: a master may poll."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import pytest
from tests.messages import WAYS, choose_way
from tests.waiting import is_stopped, until

from gpucoll import ANY_SOURCE, ANY_TAG
from gpucoll.errors import DeadlineError

BRIEF_S = 0.02
N_MESSAGES = int(os.environ.get("GPUCOLL_TEST_POLLED_MESSAGES", "400"))
SIZES = 1, 100, 3000, 200_000


def in_a_group(comm):
    with comm.group(timeout_s=BRIEF_S):
        comm.recv(np.zeros(3), 1, 5)
        comm.recv(np.zeros(3), 1, 6)


def ask_until_done(comm):
    work = comm.recv(np.zeros(3), 1, 5, async_op=True, timeout_s=BRIEF_S)
    until(work.done)
    work.wait()


POLLS = {
    "into": lambda comm: comm.recv(np.zeros(3), 1, 5, timeout_s=BRIEF_S),
    "new": lambda comm: comm.recv(source=1, tag=5, timeout_s=BRIEF_S),
    "any": lambda comm: comm.recv(source=ANY_SOURCE, tag=ANY_TAG, timeout_s=BRIEF_S),
    "informed": lambda comm: comm.recv(np.zeros(3), 1, 5, info=True, timeout_s=BRIEF_S),
    "record": lambda comm: comm.recv(np.zeros(3, "i4,f8"), 1, 5, timeout_s=BRIEF_S),
    "object": lambda comm: comm.recv_object(1, 5, timeout_s=BRIEF_S),
    "probe": lambda comm: comm.probe(1, 5, timeout_s=BRIEF_S),
    "work": lambda comm: comm.recv(np.zeros(3), 1, 5, async_op=True, timeout_s=BRIEF_S).wait(),
    "new work": lambda comm: comm.recv(source=1, async_op=True, timeout_s=BRIEF_S).wait(),
    "asked": ask_until_done,
    "both": lambda comm: comm.send_recv(
        np.ones(3), comm.rank, 1, np.zeros(3), tag=5, timeout_s=BRIEF_S
    ),
    "group": in_a_group,
}


def poll_in_vain(comm, name):
    texts = []
    if comm.rank == 0:
        for _ in range(3):  # the first may go through Python, and teach the entry
            with pytest.raises(DeadlineError) as error:
                POLLS[name](comm)
            texts.append(str(error.value))
    comm.barrier()
    if comm.rank == 1:
        comm.send(np.arange(3.0), 0, 5)
        return None
    received = comm.recv(np.zeros(3), 1, 5).tolist()
    if name == "both":
        for _ in texts:
            comm.recv(np.zeros(3), 0, 5)  # what it sent to itself
    comm.check()
    return texts, received


def check_vain_polls(texts, received):
    assert received == [0, 1, 2]
    assert len(texts) == 3
    for text in texts:
        assert f"came within {BRIEF_S:g} s. The " in text
        assert text.endswith(" was withdrawn: the communicator stays usable")
        assert "on rank 0 of 2: no message from " in text


@pytest.mark.parametrize("name", POLLS)
def test_the_communicator_stays_usable(ranks, name):
    check_vain_polls(*ranks.call(2, poll_in_vain, name)[0])


@pytest.mark.parametrize("name", ["into", "new", "object", "probe", "work"])
def test_the_communicator_stays_usable_between_hosts(hosts, name):
    check_vain_polls(*hosts.call("ab", poll_in_vain, name)[0])


def poll_at_random(comm, seed, way=None):
    """Send and poll at random moments: each message comes once, whole and in order."""
    if way is not None:
        choose_way(comm, way)
    choices, peer = random.Random(1000 * seed + comm.rank), 1 - comm.rank
    sizes = random.Random(seed).choices(SIZES, (40, 20, 10, 1), k=N_MESSAGES)
    n_sent = n_received = n_vain = 0
    until_s = time.monotonic() + 60
    while n_received < N_MESSAGES or n_sent < N_MESSAGES:
        assert time.monotonic() < until_s
        if n_sent < N_MESSAGES and choices.random() < 0.3:
            comm.send(np.full(sizes[n_sent], n_sent), peer, async_op=True)
            n_sent += 1
            continue
        if n_received == N_MESSAGES:
            continue
        try:
            got = polled(comm, peer, choices)
        except DeadlineError as error:
            assert "stays usable" in str(error)  # noqa: PT017
            n_vain += 1
            continue
        if got is not None:
            assert len(got) == sizes[n_received]
            assert (got == n_received).all()
            n_received += 1
    comm.barrier()
    return n_vain


def polled(comm, peer, choices):
    """Poll in one of its ways; return what was received, or None."""
    limit = {"timeout_s": 10 ** choices.uniform(-6, -3)}
    way = choices.randrange(4)
    if way == 0:
        out, message = comm.recv(np.empty(max(SIZES), int), peer, info=True, **limit)
        return out[: message.count]
    if way == 1:
        return comm.recv(source=peer, **limit)
    if way == 2:
        comm.probe(peer, **limit)
        return None
    return comm.recv(source=ANY_SOURCE, tag=ANY_TAG, async_op=True, **limit).wait()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_lost_or_received_twice(ranks, way):
    for n_vain in ranks.call(2, poll_at_random, 1, way):
        assert n_vain > 0


@pytest.mark.soak
def test_nothing_is_lost_or_received_twice_between_hosts(hosts):
    for n_vain in hosts.call("ab", poll_at_random, 2):
        assert n_vain > 0


def stop_in_the_middle(comm):
    """Rank 1 sends a message in parts, and is stopped before it has written all of them."""
    choose_way(comm, "streamed")
    if comm.rank == 1:
        comm.send(np.array([os.getpid()]), 0)
        work = comm.send(np.zeros(5_000_000, np.uint8), 0, 1, async_op=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        work.wait()
        return
    pid = int(comm.recv(np.zeros(1, int), 1)[0])
    until(lambda: is_stopped(pid))
    try:
        comm.recv(np.zeros(5_000_000, np.uint8), 1, 1, timeout_s=BRIEF_S)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_what_stands_in_the_middle_breaks_the_communicator(ranks):
    """When the communicator's deadline has passed: its own was for a message to come."""
    reply = ranks.replies(2, stop_in_the_middle, timeout_s=1.0)[0]

    assert isinstance(reply.error, DeadlineError), reply
    assert "The communicator is broken" in str(reply.error)
