"""gpucoll's loops on a communicator of threads: each call with the arguments that it is to have."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from gpucoll.bench.collectives import COLLECTIVES
from gpucoll.bench.rank.own import Own
from gpucoll.bench.rank.session import Session

RANKS = 3
ROOT = 1
DEADLINE_S = 20.0
CALLS = [name for name in COLLECTIVES if name != "barrier"]


class Threads:
    """The communicator's methods, for one of several threads; what they say is what they do."""

    def __init__(self, rank, meeting):
        self.rank, self.world_size = rank, RANKS
        self.meeting = meeting

    def exchange(self, mine):
        """Return what every rank has given."""
        meeting = self.meeting
        meeting.given[self.rank] = None if mine is None else np.array(mine)
        meeting.barrier.wait(DEADLINE_S)
        everything = list(meeting.given)
        meeting.barrier.wait(DEADLINE_S)
        return everything

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def barrier(self):
        self.exchange(None)

    def all_reduce(self, x, op, *, out):
        if isinstance(x, list):
            assert [len(one) for one in x] == [len(one) for one in out] == [10] * 4
            for one, target in zip(x, out, strict=True):
                self.all_reduce(one, op, out=target)
            return
        out[:] = sum(self.exchange(x))

    def reduce(self, x, op, root, *, out):
        assert (out is not None) is (root == self.rank)
        result = sum(self.exchange(x))
        if out is not None:
            out[:] = result

    def broadcast(self, x, root, *, out):
        out[:] = self.exchange(x)[root]

    def all_gather(self, x, *, out):
        out[:] = np.concatenate(self.exchange(x))

    def gather(self, x, root, *, out):
        assert (out is not None) is (root == self.rank)
        result = np.concatenate(self.exchange(x))
        if out is not None:
            out[:] = result

    def reduce_scatter(self, x, op, *, out):
        out[:] = sum(self.exchange(x)).reshape(RANKS, -1)[self.rank]

    def scatter(self, x, root, *, out):
        assert (x is not None) is (root == self.rank)
        out[:] = self.exchange(x)[root].reshape(RANKS, -1)[self.rank]

    def all_to_all(self, x, *, out):
        blocks = [one.reshape(RANKS, -1)[self.rank] for one in self.exchange(x)]
        out[:] = np.concatenate(blocks)

    def scan(self, x, op, *, out):
        out[:] = sum(self.exchange(x)[: self.rank + 1])

    def exclusive_scan(self, x, op, *, out):
        out[:] = sum(self.exchange(x)[: self.rank])

    def send_recv(self, x, dest, source, *, out):
        assert dest == (self.rank + 1) % RANKS
        out[:] = self.exchange(x)[source]

    def send(self, x, dest):
        with self.meeting.arrived:
            self.meeting.messages[dest].append(np.array(x))
            self.meeting.arrived.notify_all()

    def recv(self, out, source):
        messages = self.meeting.messages[self.rank]
        with self.meeting.arrived:
            assert self.meeting.arrived.wait_for(lambda: messages, DEADLINE_S)
            out[:] = messages.pop(0)

    def __getattr__(self, name):
        if not name.startswith("plan_"):
            raise AttributeError(name)
        method = getattr(self, name.removeprefix("plan_"))
        return lambda *arguments, **keywords: lambda: method(*arguments, **keywords)


@pytest.fixture
def sessions():
    meeting = SimpleNamespace(
        barrier=threading.Barrier(RANKS),
        arrived=threading.Condition(),
        given=[None] * RANKS,
        messages=[[] for _ in range(RANKS)],
    )
    return [Session(Own(Threads(rank, meeting))) for rank in range(RANKS)]


def on_all(sessions, command):
    """Return every rank's answer to a command."""
    answers = [None] * RANKS

    def answer(rank):
        answers[rank] = sessions[rank].answer(command)

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return answers


def prepare(sessions, collective, variants, **more):
    traits = COLLECTIVES[collective]
    command = {
        "do": "prepare", "collective": collective, "dtype": "int32", "root": ROOT, "count": 30,
        "redop": "sum" if traits.reduces else "none", "variants": variants, **more,
    }  # fmt: skip
    first, *others = on_all(sessions, command)
    assert others == [first] * (RANKS - 1)
    return first["cases"]


@pytest.mark.parametrize("collective", CALLS)
def test_every_case_of_a_collective(sessions, collective):
    planned = ["plan"] if COLLECTIVES[collective].planned else []
    cases = prepare(sessions, collective, ["private", "symmetric", *planned])
    sides = 1 if collective in ("send_recv", "ping_pong", "stream") else 2
    assert len(cases) == sides * (2 + len(planned))
    for case in cases:
        assert on_all(sessions, {"do": "check", "case": case}) == [{"wrong": 0}] * RANKS
        assert all(
            answer["seconds"] >= 0
            for answer in on_all(sessions, {"do": "measure", "case": case, "reps": 2})
        )


def test_a_list_is_one_call(sessions):
    cases = prepare(sessions, "all_reduce", ["private", "fused"], count=10, list_length=4)
    assert cases == [
        f"{variant}/{side}"
        for variant in ("private", "fused")
        for side in ("out_of_place", "in_place")
    ]
    for case in cases:
        assert on_all(sessions, {"do": "check", "case": case}) == [{"wrong": 0}] * RANKS


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "stream"])
def test_what_is_wrong_is_counted_on_the_rank_where_it_is(sessions, collective, monkeypatch):
    name = "recv" if collective == "stream" else collective
    right = getattr(Threads, name)

    def spoiling(self, *arguments, **keywords):
        right(self, *arguments, **keywords)
        out = keywords.get("out", arguments[0])
        if self.rank == 1:
            out[-1] += 1

    monkeypatch.setattr(Threads, name, spoiling)
    prepare(sessions, collective, ["private"])
    answers = on_all(sessions, {"do": "check", "case": "private/out_of_place"})
    assert answers == [{"wrong": 0}, {"wrong": 1}, {"wrong": 0}]
