"""Patterns of gpucoll's calls, on a communicator of threads."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from tests.bench.threads_double import (
    RANKS,
    Threads,
    may_be_asynchronous,
    on_all,
    prepare,
    sessions_of_threads,
)

from gpucoll.bench.collectives import COLLECTIVES
from gpucoll.bench.patterns import PATTERNS
from gpucoll.bench.rank.jobs import RESULT, STOP, TASK
from gpucoll.bench.rank.objects import LARGE_BYTES
from gpucoll.bench.rank.own_patterns import ArrayMessages

IN_RANKS = [name for name, row in PATTERNS.items() if not row.own_program]
WITH_ARRAYS = [name for name in IN_RANKS if PATTERNS[name].has_data]
ONLY_OUT_OF_PLACE = [
    name for name in WITH_ARRAYS if not name.startswith("async_") and "overlap" not in name
]


@pytest.fixture
def sessions():
    return sessions_of_threads()


def check(sessions, case):
    """Return how much is wrong on each rank."""
    answers = on_all(sessions, {"do": "check", "case": case})
    return [answer.get("wrong", answer.get("traceback")) for answer in answers]


@pytest.mark.parametrize("name", WITH_ARRAYS)
def test_every_case_of_a_pattern(sessions, name):
    parts = [*PATTERNS[name].parts]
    cases = prepare(sessions, name, ["private", *parts], work_s=1e-4)
    sides = {case.partition("/")[2] for case in cases}
    if name in ONLY_OUT_OF_PLACE:
        assert sides == {"out_of_place"}
    elif parts:
        assert cases == ["private/in_place", "blocking/in_place", "work/in_place"]
    else:
        assert sides == {"out_of_place", "in_place"}
    for case in cases:
        assert case.startswith("work") or check(sessions, case) == [0] * RANKS
        answers = on_all(sessions, {"do": "measure", "case": case, "reps": 2})
        assert all(answer["seconds"] >= 0 for answer in answers)
        assert all(answer["cpu_seconds"] >= 0 for answer in answers)


@pytest.mark.parametrize("name", [*COLLECTIVES, *IN_RANKS])
def test_only_what_is_asynchronous_is_started_so(sessions, name):
    cases = prepare(sessions, name, ["private"], work_s=1e-5)
    on_all(sessions, {"do": "measure", "case": cases[0], "reps": 1})
    started = [session.library.comm.started for session in sessions]
    two = 2 * 2  # a receive and a send, in the loop of one and in that of one more before it
    per_rank = 2 if name.startswith(("async_", "overlap")) else two if name == "isend_irecv" else 0
    assert started == [per_rank] * RANKS


def test_the_work_beside_a_call_takes_as_long_as_it_is_to(sessions):
    prepare(sessions, "overlap_sleep", ["private", "blocking", "work"], work_s=0.01)
    for case in ("private/in_place", "work/in_place"):
        for answer in on_all(sessions, {"do": "measure", "case": case, "reps": 3}):
            assert answer["seconds"] >= 0.03
            assert answer["cpu_seconds"] < 10


@pytest.mark.parametrize("size_bytes", [16, LARGE_BYTES - 4, LARGE_BYTES, 10 * LARGE_BYTES])
@pytest.mark.parametrize("name", ["broadcast_object", "scatter_object"])
def test_small_objects_carry_bytes_and_large_ones_arrays(sessions, name, size_bytes, monkeypatch):
    carried = []
    right = getattr(Threads, name)

    def noting(self, *arguments):
        received = right(self, *arguments)
        carried.append(type(received["data"]).__name__)
        return received

    monkeypatch.setattr(Threads, name, noting)
    count = size_bytes // 4 * (RANKS if name == "scatter_object" else 1)
    prepare(sessions, name, ["private"], count=count)
    assert check(sessions, "private/out_of_place") == [0] * RANKS
    assert {*carried} == {"bytes" if size_bytes < LARGE_BYTES else "ndarray"}


@pytest.mark.parametrize(
    ("name", "method", "wrong"),
    [("async_all_gather", "all_gather", [0, 1, 0]), ("recv_unknown", "recv", [0, 1, 0]),
     ("probe_recv", "recv", [0, 1, 0]), ("isend_irecv", "recv", [0, 1, 0]),
     ("overlap", "all_reduce", [0, 1, 0])],
)  # fmt: skip
def test_what_is_wrong_is_counted_on_the_rank_where_it_is(
    sessions, name, method, wrong, monkeypatch
):
    right = getattr(Threads, method).__wrapped__

    def spoiling(self, *arguments, **keywords):
        result = right(self, *arguments, **keywords)
        if self.rank == 1:
            out = keywords.get("out", arguments[0] if arguments else None)
            (result if out is None else out)[-1] += 1
        return result

    monkeypatch.setattr(Threads, method, may_be_asynchronous(spoiling))
    case = prepare(sessions, name, ["private"], work_s=1e-5)[0]
    assert check(sessions, case) == wrong


def test_jobs_are_given_to_everybody_and_counted(sessions):
    assert prepare(sessions, "producer_consumer", ["private"]) == ["private/out_of_place"]
    assert check(sessions, "private/out_of_place") == [0] * RANKS
    for reps in (1, 2, 50):
        answers = on_all(sessions, {"do": "measure", "case": "private/out_of_place", "reps": reps})
        assert all(answer["seconds"] > 0 for answer in answers), answers
    assert not any(session.library.comm.meeting.messages[0] for session in sessions)


def test_jobs_are_objects_where_there_are_messages_of_objects(sessions, monkeypatch):
    sent = []

    def send_object(self, value, dest, tag=0):
        sent.append(tag)
        self.send(np.frombuffer(pickle.dumps(value), np.uint8), dest, tag)

    def recv_object(self, source, tag, *, info=False):
        message = self.probe(source, tag)
        value = pickle.loads(self.recv(source=message.source, tag=message.tag))
        return (value, message) if info else value

    monkeypatch.setattr(Threads, "send_object", send_object, raising=False)
    monkeypatch.setattr(Threads, "recv_object", recv_object, raising=False)
    prepare(sessions, "producer_consumer", ["private"])
    assert check(sessions, "private/out_of_place") == [0] * RANKS
    assert {*sent} == {TASK, RESULT, STOP}


def test_a_wrong_result_of_a_job_is_counted(sessions, monkeypatch):
    right = ArrayMessages.give_result

    def spoiling(self, result):
        right(self, {**result, "sum": -1} if result["id"] in (3, 7) else result)

    monkeypatch.setattr(ArrayMessages, "give_result", spoiling)
    prepare(sessions, "producer_consumer", ["private"])
    assert check(sessions, "private/out_of_place") == [2, 0, 0]
