"""Errors after a wait say where the late ranks stand, and in which call this one."""

from __future__ import annotations

import os
import re
import signal

import numpy as np
import pytest
from tests.waiting import is_broken, until

from gpucoll import ANY_SOURCE
from gpucoll.errors import AbortedError, DeadlineError, MismatchError, PeerLostError
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Doing, Record, RecordState
from gpucoll.transport.shared.words import Context

BRIEF_S = 0.2
PATIENT_S = 2.0
"""Where the other rank has something to do in that time, on a busy machine."""
LARGE = 5_000_000


def in_message(comm, rank):
    """Return whether a rank has said that it waits for a message."""
    return comm._group.members.bell_words(rank)[layout.BELL_DOING // 8 + Doing.kind] != 0


def in_call(comm, rank, ahead=1):
    """Return whether a rank is in the call that comes so many after this rank's last."""
    sequence = int(comm._group.context[Context.sequence]) + ahead
    words = comm._group.members.record_words(rank, sequence)
    return words[Record.sequence] == sequence and words[Record.state] == RecordState.STARTED


def texts(replies, error):
    assert {type(reply.error) for reply in replies} == {error}, replies
    return [str(reply.error) for reply in replies]


def wait_until_broken(comm):
    until(lambda: is_broken(comm))
    comm.barrier()


# --- deadlines ------------------------------------------------------------------------------------


def meet_a_sender(comm):
    if comm.rank == 1:
        comm.send(np.zeros(LARGE, "u1"), 0, 3)
    until(lambda: in_message(comm, 1))
    comm.barrier(timeout_s=BRIEF_S)


def test_a_barrier_says_that_the_late_rank_stands_in_a_send(ranks):
    found = texts(ranks.replies(2, meet_a_sender), DeadlineError)

    told = (
        "barrier() (#1): rank 1 had not arrived. Rank 1 is waiting in send(uint8, 5000000 bytes, "
        "dest=0, tag=3). So they wait for each other. Order the calls so that no rank waits for a "
        "later call of another rank; to send and receive several messages at once, use send_recv() "
        "or group(). The communicator is broken: close it"
    )
    assert found == [
        f"rank 0 of 2 waited 0.2 s in {told}",
        f"rank 1 of 2: rank 0 gave up waiting in {told}",
    ]


def come_never(comm, calls_before):
    for _ in range(calls_before):
        comm.barrier()
    if comm.rank in (1, 3):
        wait_until_broken(comm)
    if comm.rank == 0:
        until(lambda: in_call(comm, 2))
    comm.all_reduce(np.ones(3), timeout_s=None if comm.rank else BRIEF_S)


@pytest.mark.parametrize("calls_before", [0, 1, 40])
def test_ranks_in_no_call_are_said_to_be_in_none(ranks, calls_before):
    found = texts(ranks.replies(4, come_never, calls_before), DeadlineError)

    before = (
        f"; the last collective: barrier() (#{calls_before})"
        if calls_before
        else "; no collective before"
    )
    late = (
        "ranks 1, 3 had not arrived. Ranks 1, 3 are in no call of this communicator"
        f"{before}. Is a rank stopped"
    )
    assert all(late in text for text in found), found


def test_the_last_collective_is_found_where_numbers_wrap(ranks):
    tuning = {"GPUCOLL_CPU_TUNING": f"initial_sequence={2**31 - 20}"}
    found = texts(ranks.replies(4, come_never, 30, environment=tuning), DeadlineError)

    number = 2**31 - 20 + 30 - 2**32
    late = "Ranks 1, 3 are in no call of this communicator; the last collective: barrier()"
    assert all(f"{late} (#{number})." in text for text in found), found


def chain(comm):
    """0 waits for 1, 1 for 2, 2 for 3, and 3 for nobody."""
    comm.barrier()
    if comm.rank == 3:
        wait_until_broken(comm)
    if comm.rank == 2:
        comm.barrier()
    if comm.rank == 1:
        comm.recv(np.empty(2), source=2, tag=8)
    until(lambda: in_message(comm, 1) and in_call(comm, 2))
    comm.send(np.zeros(LARGE, "u1"), 1, timeout_s=BRIEF_S)


def test_a_chain_of_waits_is_followed_to_its_end(ranks):
    found = texts(ranks.replies(4, chain), DeadlineError)

    assert found[0] == (
        "rank 0 of 4 waited 0.2 s in send(uint8, 5000000 bytes, dest=1, tag=0): nobody had "
        "received it. "
        "Rank 1 is waiting in recv(float64, 16 bytes, source=2, tag=8). Rank 2 is waiting in "
        "barrier() (#2). Rank 3 is in no call of this communicator; the last collective: "
        "barrier() (#1). Is the other rank in a different call, or do two ranks wait for each "
        "other's message? send_recv() and group() avoid such deadlocks. The communicator is "
        "broken: close it"
    )


def several_messages(comm):
    if comm.rank == 1:
        with comm.group():
            for tag in range(3):
                comm.recv(np.empty(1), source=0, tag=tag)
    until(lambda: in_message(comm, 1))
    comm.barrier(timeout_s=BRIEF_S)


def test_a_group_of_messages_counts_the_others(ranks):
    found = texts(ranks.replies(2, several_messages), DeadlineError)

    told = "Rank 1 is waiting in recv(float64, 8 bytes, source=0, tag=0) and 2 more messages."
    assert told in found[0]


def no_message_any_more(comm):
    """Rank 1 has slept for a message, got it, and is in no call now."""
    if comm.rank == 1:
        comm.recv(np.empty(1), source=0)
        wait_until_broken(comm)
    until(lambda: in_message(comm, 1))
    comm.send(np.ones(1), 1)
    comm.send(np.ones(LARGE), 1, timeout_s=PATIENT_S)


@pytest.mark.soak
def test_a_message_that_came_is_not_waited_for(ranks):
    found = texts(ranks.replies(2, no_message_any_more), DeadlineError)

    assert "Rank 1 is in no call of this communicator; no collective before." in found[0]


def no_call_after_a_mismatch(comm):
    with pytest.raises(MismatchError):
        comm.all_reduce(np.ones(2 + comm.rank))
    if comm.rank == 1:
        until(lambda: is_broken(comm))
        comm.barrier()
    comm.send(np.zeros(LARGE, "u1"), 1, timeout_s=BRIEF_S)


def test_a_call_that_ended_with_a_mismatch_is_not_where_a_rank_stands(ranks):
    found = texts(ranks.replies(2, no_call_after_a_mismatch), DeadlineError)

    assert (
        "Rank 1 is in no call of this communicator; the last collective: all_reduce(op=sum, "
        "float64, shape (3,)) (#1)."
    ) in found[0]


def stop(comm):
    if comm.rank == 1:
        until(lambda: in_call(comm, 0))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        comm.barrier(timeout_s=PATIENT_S)
    finally:
        if comm.rank == 0:
            os.kill(comm._group.members.pids[1], signal.SIGCONT)


def test_a_stopped_process_is_said_to_be_stopped(ranks):
    replies = ranks.replies(2, stop)

    assert isinstance(replies[0].error, DeadlineError), replies
    assert re.search(r"and stopped \(process \d+\)\. Is a rank stopped", str(replies[0].error))


# --- lost ranks and interrupts --------------------------------------------------------------------


def lose_in(comm, call):
    comm.all_reduce(np.ones(3))
    if comm.rank == 1:
        until(lambda: in_message(comm, 0) or in_call(comm, 0))
        return
    call(comm)


LOSSES = {
    "recv": (
        lambda comm: comm.recv(np.empty(2), source=1, tag=4),
        "in recv(float64, 16 bytes, source=1, tag=4)",
    ),
    "any": (lambda comm: comm.recv(source=ANY_SOURCE), "in recv or probe(source=ANY_SOURCE, tag=0"),
    "barrier": (lambda comm: comm.barrier(), "in barrier() (#2)"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_rank_is_missed_in_the_call_that_needs_it(ranks, name):
    call, text = LOSSES[name]
    reply = ranks.replies(2, lose_in, call)[0]

    assert isinstance(reply.error, PeerLostError), reply
    assert f"rank 0 of 2 lost rank 1 {text}" in str(reply.error)


def lose_before(comm):
    comm.all_reduce(np.ones(3))
    if comm.rank == 0:
        return None
    if comm.rank == 1:
        comm.barrier()
    until(lambda: is_broken(comm))
    try:
        comm.barrier()
    except PeerLostError as error:
        return str(error)


def test_a_rank_that_comes_later_says_after_which_call(ranks):
    text = ranks.replies(3, lose_before)[2].result

    assert text.startswith(
        "rank 2 of 3 lost rank 0 after all_reduce(op=sum, float64, shape (3,)) (#1): it closed the "
        "communicator after call #1."
    )


def interrupt(comm):
    comm.barrier()
    if comm.rank == 1:
        until(lambda: in_message(comm, 0))
        os.kill(comm._group.members.pids[0], signal.SIGINT)
        wait_until_broken(comm)
    with pytest.raises(KeyboardInterrupt):
        comm.recv(np.empty(2), source=1)
    comm.barrier()


def test_an_interrupted_message_is_named(ranks):
    found = texts(ranks.replies(2, interrupt), AbortedError)

    assert "rank 0 was interrupted in recv(float64, 16 bytes, source=1, tag=0). Close" in found[1]


# --- mismatches -----------------------------------------------------------------------------------


def differ(comm, odd, usual):
    with pytest.raises(MismatchError) as caught:
        (odd if comm.rank == 1 else usual)(comm)
    return str(caught.value), comm.all_reduce(1)


def told_of(ranks, world_size, odd, usual):
    (text, *_), totals = zip(*ranks.call(world_size, differ, odd, usual), strict=True)
    assert totals == (world_size,) * world_size
    return text


def rows(*counts):
    return np.zeros((sum(counts), 2))


def test_counts_in_conflict_say_between_whom(ranks):
    text = told_of(
        ranks,
        3,
        lambda comm: comm.all_to_all(rows(1, 2, 3), send_counts=[1, 2, 3], recv_counts=[1, 2, 7]),
        lambda comm: comm.all_to_all(rows(1, 1, 3), send_counts=[1, 1, 3], recv_counts=[1, 1, 3]),
    )

    assert text.startswith(
        "the ranks did not make the same call (#1): rank 0 sends 3 rows to rank 2, which expects "
        "1, in all_to_all with send_counts and recv_counts (and 3 more pairs of ranks differ). "
        "This is rank 0 of 3. Nothing was written; "
    ), text
    assert "(send_counts and recv_counts must agree between each two ranks)" in text


def lists(*shapes):
    return lambda comm: comm.all_reduce([np.zeros(shape) for shape in shapes])


def test_lists_are_lists_of_all_reduce(ranks):
    text = told_of(ranks, 2, lists((2, 3), 4), lists(5))

    assert "rank 1 called all_reduce(a list of 2 arrays, op=sum, float64, 10 elements)" in text
    assert "rank 0 called all_reduce(a list of 1 arrays, op=sum, float64, 5 elements)" in text


def again(*shapes):
    """Call twice: the second call takes the compiled entry."""

    def call(comm):
        lists(1)(comm)
        lists(*shapes)(comm)

    return call


@pytest.mark.parametrize("make", [lists, again])
def test_what_reads_the_same_says_that_it_does(ranks, make):
    text = told_of(ranks, 2, make(4, 2), make(2, 4))

    assert "called all_reduce(a list of 2 arrays, op=sum, float64, 6 elements)" in text
    assert "(they differ in what is not shown here: the shapes of the list's arrays)" in text


def test_counts_that_are_asked_for_name_their_call(ranks):
    text = told_of(
        ranks,
        2,
        lambda comm: comm.all_gather(np.zeros(2), counts="auto"),
        lambda comm: comm.all_to_all(np.zeros(2), send_counts=[1, 1]),
    )

    assert 'rank 1 called all_gather(counts="auto")' in text
    assert 'rank 0 called all_to_all(recv_counts="auto")' in text
