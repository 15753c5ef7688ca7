"""Watching: every call of every rank, with its times, only while somebody watches."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest

from gpucoll.collectives import Collective
from gpucoll.errors import SharedMemoryError
from gpucoll.observe import watch
from gpucoll.observe.meetings import Meetings, Register
from gpucoll.observe.segments import find
from gpucoll.observe.watch import CALL, Watch
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.layout import Record
from gpucoll.transport.shared.spans import SpanKind
from gpucoll.types import dtype_name

SHORT = np.ones(4, np.float32)
BIG = np.ones(1 << 18, np.float32)


def watching(comm, call, count=1):
    """Return what rank 0 sees of calls that are made while it watches; None on other ranks."""
    found = find([os.getpid()])
    seen = Watch(found.segments if comm.rank == 0 else [])
    comm.barrier()
    for _ in range(count):
        call()
    comm.barrier()
    comm.barrier()  # here all ranks have written the spans of all calls before the last barrier
    looks = seen.read()
    seen.close()
    found.close()
    return looks[0] if looks else None


def see_each_call(comm):
    before = time.monotonic_ns()
    calls = watching(comm, lambda: comm.all_reduce(SHORT), 3)
    return None if calls is None else (calls.calls, calls.missed, before, time.monotonic_ns())


def test_each_call_is_seen(ranks):
    calls, missed, before, after = ranks.call(3, see_each_call)[0]
    assert missed.tolist() == [0, 0, 0]
    reductions = calls[calls["collective"] == Collective.ALL_REDUCE]
    assert len(reductions) == 3 * 3
    for rank in range(3):
        mine = reductions[reductions["rank"] == rank]
        assert np.diff(mine["sequence"]).tolist() == [1, 1]
        assert np.all(mine["begun_ns"][1:] >= mine["ended_ns"][:-1])
    assert np.all(reductions["kind"] == SpanKind.COLLECTIVE)
    assert np.all(reductions["size_bytes"] == 16)
    assert np.all(reductions["count"] == 4)
    assert {dtype_name(int(each)) for each in reductions["dtype"]} == {"float32"}
    assert np.all((before < calls["begun_ns"]) & (calls["begun_ns"] <= calls["ended_ns"]))
    assert np.all(calls["ended_ns"] < after)


def overflow(comm):
    return watching(comm, lambda: comm.all_reduce(SHORT), layout.SPANS + 100)


def test_calls_that_were_overwritten_are_counted(ranks):
    calls = ranks.call(2, count_overwritten)[0]
    for rank, missed in enumerate(calls[1]):
        kept = int(np.sum(calls[0] == rank))
        assert kept <= layout.SPANS
        assert layout.SPANS + 100 <= kept + missed <= layout.SPANS + 103  # and the barriers


def count_overwritten(comm):
    calls = overflow(comm)
    return None if calls is None else (calls.calls["rank"], calls.missed.tolist())


def notes_of(comm):
    """Return whether this rank's last call has the time of its beginning."""
    members = comm._group.members
    sequence = int(members.all_records(comm.rank)[:, Record.sequence].max())
    return int(members.record_words(comm.rank, sequence)[Record.begun_ns]) != 0


def let_it_pass(comm):
    noted = [notes_of(comm)]
    watching(comm, lambda: comm.all_reduce(SHORT))
    noted.append(notes_of(comm))
    members = comm._group.members
    if comm.rank == 0:  # as if the time had passed
        members.store(layout.EVENT_WATCHED, time.monotonic_ns())
    comm.barrier()
    comm.all_reduce(SHORT)
    noted.append(notes_of(comm))
    return noted, members.load(layout.EVENT_WATCHED)


def test_a_watch_that_is_killed_ends(ranks):
    assert ranks.call(2, let_it_pass) == [([False, True, False], 0)] * 2


def see_started(comm):
    def call():
        works = [comm.all_reduce(SHORT, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()

    calls = watching(comm, call)
    return None if calls is None else calls.calls["collective"].tolist()


def test_started_calls_are_seen(ranks):
    found = ranks.call(2, see_started)[0]
    assert found.count(Collective.ALL_REDUCE) == 2 * 3


def see_messages(comm):
    def call():
        if comm.rank == 0:
            comm.send(SHORT, 1, 7)
            comm.recv(like=BIG, source=1, tag=8)
        else:
            comm.recv(like=SHORT, source=0, tag=7)
            comm.send(BIG, 0, 8)

    calls = watching(comm, call)
    if calls is None:
        return None
    messages = calls.calls[calls.calls["kind"] >= SpanKind.SEND]
    assert np.all(messages["begun_ns"] <= messages["ended_ns"])
    names = ("kind", "rank", "root", "count", "size_bytes")
    found = [tuple(int(each[name]) for name in names) for each in messages]
    return found, {dtype_name(int(each)) for each in messages["dtype"]}


def test_messages_are_seen(ranks):
    found, dtypes = ranks.call(2, see_messages)[0]
    small = [(SpanKind.SEND, 0, 1, 7, 16), (SpanKind.RECV, 1, 0, 7, 16)]
    large = [(SpanKind.SEND, 1, 0, 8, BIG.nbytes), (SpanKind.RECV, 0, 1, 8, BIG.nbytes)]
    assert sorted(found) == sorted(small + large)
    assert dtypes == {"float32"}


@pytest.mark.parametrize("size", [4, 4 << 20])
def test_calls_between_hosts_are_seen_once(hosts, size):
    def see(comm):
        found = find([os.getpid()])
        with Watch(found.segments) as seen:
            comm.barrier()
            comm.all_reduce(np.ones(size, np.float32))
            comm.barrier()
            calls = seen.read()[0].calls
        found.close()
        whole = calls[calls["kind"] == SpanKind.SEVERAL_HOSTS]
        return whole[whole["collective"] == Collective.ALL_REDUCE]

    for calls in hosts.call("ab", see):
        assert calls["size_bytes"].tolist() == [4 * size]
        assert calls["count"].tolist() == [size]


def refused(comm):
    found = find([os.getpid()])
    segment = found.segments[0]
    segment.identity = (0, 0)
    try:
        with pytest.raises(SharedMemoryError, match="it was closed meanwhile"):
            Watch([segment])
    finally:
        found.close()


def test_another_segment_under_its_path_is_refused(ranks):
    ranks.call(2, refused)


# --- who came last --------------------------------------------------------------------------------


def calls_of(*rows):
    """Return calls of {rank, sequence, begun, ended}."""
    calls = np.zeros(len(rows), CALL)
    for name, column in zip(
        ("rank", "sequence", "begun_ns", "ended_ns"), zip(*rows, strict=True), strict=True
    ):
        calls[name] = column
    calls["kind"] = SpanKind.COLLECTIVE
    return calls


def test_who_came_last():
    calls = calls_of((0, 1, 10, 60), (1, 1, 20, 61), (2, 1, 50, 62)).reshape(1, 3)
    found = Meetings(calls)
    assert found.last.tolist() == [2]
    assert found.waited_ns.tolist() == [[40, 30, 0]]
    assert found.held_up_ns.tolist() == [[0, 0, 30]]


def test_nobody_waits_for_a_late_receiver():
    root_first = calls_of((0, 1, 10, 12), (1, 1, 11, 13), (2, 1, 50, 51)).reshape(1, 3)
    assert Meetings(root_first).waited_ns.tolist() == [[2, 2, 0]]
    assert Meetings(root_first).held_up_ns.tolist() == [[0, 0, 2]]


def watched(*rows: Any) -> Any:
    nowhere: Any = None
    return watch.Calls(nowhere, calls_of(*rows), np.zeros(2, np.int64))


def test_calls_are_put_together_over_several_looks():
    register = Register(2)
    assert register.add(watched((0, 1, 1, 9), (0, 2, 10, 19))).calls.shape == (0, 2)
    found = register.add(watched((1, 1, 2, 9), (1, 3, 20, 21)))
    assert found.calls["sequence"].tolist() == [[1, 1]]
    assert found.calls["rank"].tolist() == [[0, 1]]
    found = register.add(watched((1, 2, 11, 19), (0, 3, 20, 22)))
    assert found.calls["sequence"].tolist() == [[2, 2], [3, 3]]


def test_calls_that_stay_alone_are_forgotten():
    register = Register(2)
    for start in range(0, 5 * layout.SPANS, layout.SPANS):
        register.add(watched(*((0, start + k, k, k) for k in range(layout.SPANS))))
    assert len(register._open) == 2 * layout.SPANS
