"""Calls posted beside the work: compared in order, bounded, wrapping; no GPU takes part."""

from __future__ import annotations

import numpy as np
from tests.waiting import until

from gpucoll.collectives import Collective
from gpucoll.group.host import diagnosis
from gpucoll.group.host.segment_view import words_at
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Context, Status
from gpucoll.types import ReduceOp

FEW = {"GPUCOLL_CPU_TUNING": "enqueued_records=4"}


_kept: list[CallBlock] = []


def poster(comm, calls, count, dtype="float32"):
    block = CallBlock(Collective.ALL_REDUCE, 0, dtype=dtype, item_bytes=4, op=ReduceOp.parse("sum"))
    block.set_arrays((count,), 0, 0)
    _kept.append(block)
    return calls.poster(block)


def exchange(comm, start):
    """Post many calls on every rank, whatever the ring holds; all are compared in the end."""
    calls = comm._group.enqueued_calls()
    comm._group.context[Context.enqueued_sequence] = start
    comm._group.context[Context.enqueued_seen] = start
    members = comm._group.members
    words_at(members.at(members.enqueued_offset(comm.rank)), 1).view(np.int32)[0] = start
    comm.barrier()
    posts = [poster(comm, calls, count) for count in range(3)]
    full = 0
    for step in range(200):
        while (status := posts[step % 3]()) != Status.OK:
            assert status == Status.MORE
            full += 1
            assert calls.compare() in (Status.OK, Status.MORE)
    until(lambda: calls.compare() == Status.OK)
    assert not calls.has_uncompared
    assert calls.is_compared(calls.sequence)
    comm.barrier()
    return (start + 200 - calls.sequence) % 2**32 == 0, full > 0


def test_a_ring_bounds_how_far_a_rank_runs_ahead(ranks):
    for is_there, was_full in ranks.call(3, exchange, 0, environment=FEW):
        assert is_there
        assert was_full


def test_sequence_numbers_wrap(ranks):
    for is_there, _ in ranks.call(2, exchange, 2**31 - 50, environment=FEW):
        assert is_there


def differ(comm):
    calls = comm._group.enqueued_calls()
    same, other = poster(comm, calls, 8), poster(comm, calls, 9 if comm.rank == 1 else 8)
    for post in (same, same, other):
        assert post() == Status.OK
    until(lambda: calls.compare() != Status.MORE)
    assert calls.compare() == Status.MISMATCH
    assert calls.compared == 2, (calls.compared, calls.sequence)
    comm.barrier()
    comm._group.abort(Abort.ENQUEUED_MISMATCH, comm.rank, 3)
    assert same() == Status.EVENT
    word = comm._group.members.abort_word()
    return str(diagnosis.abort_error(comm._group, word))


def test_a_mismatch_names_the_odd_ranks(ranks):
    for text in ranks.call(3, differ, environment=FEW):
        assert "(#3): rank 1 called all_reduce(op=sum, float32, shape (9,)); ranks 0, 2" in text


def be_late(comm):
    calls = comm._group.enqueued_calls()
    if comm.rank != 2:
        assert poster(comm, calls, 8)() == Status.OK
        comm.barrier()
        status, late = calls.compare(), calls.late_rank
        comm.barrier()
        return int(status), late
    comm.barrier()
    comm.barrier()
    return None


def test_who_is_late_is_known(ranks):
    assert ranks.call(3, be_late, environment=FEW) == [(Status.MORE, 2), (Status.MORE, 2), None]


def post_after(comm):
    calls = comm._group.enqueued_calls()
    post = poster(comm, calls, 8)
    comm.close()
    return post()


def test_nothing_is_posted_after_close(ranks):
    assert ranks.call(1, post_after, environment=FEW) == [Status.NOT_RUN]
