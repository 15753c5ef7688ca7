"""Flags in the segment: answers of who is gone meanwhile, and a thread that is still at it."""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import gpucoll
from gpucoll.errors import DeadlineError, GpucollError, PeerLostError, StateError
from gpucoll.group.host import recovery
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.words import Context, State

EVENT = 7


def answer_as(members, rank):
    members.store(members.status_offset(rank) + layout.STATUS_ACKNOWLEDGED[EVENT & 1], EVENT)


def recover_from(comm, has_answered):
    """Recover from an event that rank 1 answers, or not, before it is seen to have closed."""
    if comm.rank == 1:
        return "the other one"
    group = comm._group
    group.context[Context.event_seen] = EVENT
    answer_as(group.members, 0)

    def gone_ranks():
        if has_answered:
            answer_as(group.members, 1)
        return [1]

    group.members.gone_ranks = gone_ranks
    try:
        recovery.recover(group, 20.0)
    except PeerLostError:
        return "lost"
    return "answered"


@pytest.mark.parametrize(("has_answered", "found"), [(True, "answered"), (False, "lost")])
def test_who_answers_and_closes_is_not_lost(ranks, has_answered, found):
    assert ranks.call(2, recover_from, has_answered) == [found, "the other one"]


def close_under_recovery(comm):
    """Close while a thread that waits for a Work waits for an answer that does not come."""
    if comm.rank == 1:
        return None
    group, is_waiting = comm._group, threading.Event()
    group.context[Context.event_seen] = EVENT
    group.context[Context.state] = State.NEEDS_PYTHON

    def gone_ranks():
        is_waiting.set()
        return []

    group.members.gone_ranks = gone_ranks
    work = comm.all_reduce(np.ones(3), async_op=True, timeout_s=60.0)
    errors = []

    def wait():
        try:
            work.wait()
        except GpucollError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_waiting.wait(20)
    with contextlib.suppress(DeadlineError):  # which one of the two threads is told
        comm.close()
    thread.join(20)
    assert len(errors) == 1
    assert not group.members.segment.is_mapped
    return True


def test_close_under_a_thread_that_reads_the_segment(rank_server):
    with rank_server.fork(2) as pool:
        assert pool.call(close_under_recovery, timeout_s=0.3) == [True, None]


def read_after_close(comm):
    group = comm._group
    members, messages = group.members, comm._backend.messages
    comm.close()
    reads = (
        members.abort_word,
        lambda: members.has_closed(0),
        lambda: members.header_word(0, 1),
        lambda: members.enqueued_header(0, 1),
        lambda: members.status_words(0),
        lambda: members.record_words(0, 1),
        lambda: members.store(0, 1),
        lambda: members.compare_exchange(0, 0, 1),
        messages.unreceived,
        group.raise_if_aborted,
        lambda: recovery.answer(group),
        lambda: recovery.announce(group),
        lambda: recovery.recover(group, 1.0),
    )
    for read in reads:
        with pytest.raises(StateError, match=f"rank {comm.rank} of 2 is closed"):
            read()
    comm.abort()
    return len(str(comm.describe())) > 100


def test_nothing_is_read_after_close(rank_server):
    with rank_server.fork(2) as pool:
        assert pool.call(read_after_close) == [True] * 2


def test_python_reads_no_flag_through_a_view():
    package = Path(gpucoll.__file__).parent
    views = (
        r"STATUS_(CLOSED|DONE|COPIES) // 8|(EVENT_WORD|EVENT_ABORT) // 8"
        r"|MAILBOX_(TAIL|MATCHED) // 8"
        r"|ENQUEUED_(COMPARED|FAILED) // 8|driver_table\[DriverTable\.(PLACE|GONE)"
    )
    for folder in ("group", "rendezvous", "memory", "transport", "entries", "calls", "backends"):
        paths = [*(package / folder).resolve().rglob("*.py")]
        assert paths, folder
        for path in paths:
            assert not re.search(views, path.read_text()), path
