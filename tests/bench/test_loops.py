"""The loops that are timed, around functions that only note how they were called."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from gpucoll.bench.rank.library import Call
from gpucoll.bench.rank.loops import WINDOW, ping_pong, repeated, stream


@pytest.fixture
def noted():
    return []


@pytest.fixture
def note(noted):
    def function(*arguments, **keywords):
        noted.append((arguments, keywords))

    return function


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("keywords", [{}, {"out": "here"}])
def test_a_call_is_made_as_it_was_described(note, noted, arguments, keywords):
    assert repeated(partial(note, *arguments, **keywords))(3) > 0
    assert noted == [(arguments, keywords)] * 3


def test_several_calls_follow_one_another(note, noted):
    repeated(partial(note, 1, out="a"), partial(note, 2, out="b"))(2)
    assert noted == [((1,), {"out": "a"}), ((2,), {"out": "b"})] * 2


@pytest.mark.parametrize("in_place", [False, True])
def test_the_arrays_of_a_list_follow_one_another_in_memory(in_place):
    source, destination = np.arange(12.0), np.zeros(12)
    target = source if in_place else destination
    call = Call("all_reduce", "private", "float64", "sum", 0, source, target, in_place, 3)
    pieces = call.pieces()
    assert [piece.source[0] for piece in pieces] == [0, 4, 8]
    assert all((piece.source is piece.destination) is in_place for piece in pieces)
    assert all(piece.pieces() == [piece] for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.destination[:] = number
    assert target.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def ends(rank):
    """Return what the ends of a message loop are called with, and the note of the calls."""
    calls = []

    def send(array, other):
        calls.append(("send", array, other))

    def receive(array, other):
        calls.append(("receive", array, other))

    return calls, (rank, send, receive, "source", "destination")


def test_ping_pong_is_half_of_the_round_trip(monkeypatch):
    monkeypatch.setattr("gpucoll.bench.rank.loops.timed", lambda *_, **__: lambda reps: 8.0 * reps)
    for rank, seconds in ((0, 12.0), (1, 12.0), (2, 0.0)):
        assert ping_pong(*ends(rank)[1])(3) == seconds


@pytest.mark.parametrize(("reps", "seconds"), [(1, 1.0), (8, 8.0), (9, 9.0), (24, 24.0)])
def test_a_stream_counts_messages_in_whole_windows(monkeypatch, reps, seconds):
    made = []

    def windows(number):
        made.append(number)
        return 1.0 * WINDOW * number

    monkeypatch.setattr("gpucoll.bench.rank.loops.timed", lambda *_, **__: windows)
    for rank in (0, 1):
        assert stream(*[*ends(rank)[1], "reply"])(reps) == seconds
    assert made == [-(-reps // WINDOW)] * 2
    assert stream(*[*ends(2)[1], "reply"])(reps) == 0.0


def test_every_message_of_ping_pong_has_its_receive():
    (first, first_ends), (second, second_ends) = ends(0), ends(1)
    ping_pong(*first_ends)(1)
    ping_pong(*second_ends)(1)
    assert first == [("send", "source", 1), ("receive", "destination", 1)]
    assert second == [("receive", "destination", 0), ("send", "source", 0)]


def test_every_message_of_a_stream_has_its_receive():
    (first, first_ends), (second, second_ends) = ends(0), ends(1)
    stream(*[*first_ends, "reply"])(1)
    stream(*[*second_ends, "reply"])(1)
    assert first == [("send", "source", 1)] * WINDOW + [("receive", "reply", 1)]
    assert second == [("receive", "destination", 0)] * WINDOW + [("send", "reply", 0)]
