"""gpucoll's loops on a communicator of threads: each call with the arguments that it is to have."""

from __future__ import annotations

import pytest
from tests.bench.threads_double import RANKS, Threads, on_all, prepare, sessions_of_threads

from gpucoll.bench.collectives import COLLECTIVES

CALLS = [name for name in COLLECTIVES if name != "barrier"]


@pytest.fixture
def sessions():
    return sessions_of_threads()


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
