"""A call in one compiled step: what it calls, with what, and what it says when that fails."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from gpucoll.backends.gpu.enqueue_entry import driver_table_of, enqueuer
from gpucoll.backends.gpu.enqueue_words import POLLS, DriverTable, Gone, Step
from gpucoll.collectives import Collective
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.types import ReduceOp

FEW = {"GPUCOLL_CPU_TUNING": "enqueued_records=4"}
STREAM, LEADER, START, END = 0x10, 0x18, 0x20, 0x30
ADDRESSES = (0x7FFF_1234_5678, 0x7FFF_1234_5678 + 64)
SETTINGS = (16, 7, 0, 3)
HANDLE = 0x40
IN_PROGRESS = 7
"""What this library says while a thread of its own is about to enqueue the work."""


class Recorded:
    """A driver and a library that write down what they are asked."""

    def __init__(self, kind, failing, states=()):
        self.calls = []
        self.failing = failing
        self.states = [*states]
        """What the communicator says of itself, poll by poll; then that it is busy."""
        self._kind = kind
        self._functions = {}
        self._current = 5
        self.library = self._function("call", 8)
        self.poll = self._function("poll", 2)

    def _function(self, name, n_arguments):
        def called(*arguments):
            self.calls.append((name, *(argument or 0 for argument in arguments)))
            if name in ("is_capturing", "get"):
                place = arguments[name == "is_capturing"]
                value = self.failing == ("capture", arguments[0])
                value = value if name == "is_capturing" else self._current
                ctypes.c_int.from_address(place).value = value
                self.calls[-1] = (name, *arguments[:-1])
            if name == "pop":
                self.calls[-1] = (name,)
            if name == "set":
                self._current = arguments[0]
            if name == "poll":
                state = self.states.pop(0) if self.states else IN_PROGRESS
                ctypes.c_int.from_address(arguments[1]).value = state
                self.calls[-1] = (name, arguments[0])
            if name == "call" and self.failing == "slow":
                return IN_PROGRESS
            return 77 if self.failing == (name, sum(call[0] == name for call in self.calls)) else 0

        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * n_arguments)
        self._functions[name] = kind(called)
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value

    def addresses(self):
        both = {
            "RECORD": self._function("record", 2),
            "IS_CAPTURING": self._function("is_capturing", 2),
            "WAIT": self._function("wait", 3),
        }
        if self._kind == "rocm":
            entering = {
                "GET_DEVICE": self._function("get", 1),
                "SET_DEVICE": self._function("set", 1),
            }
            return {**both, **entering, "NUMBER": 2}
        entering = {"PUSH": self._function("push", 1), "POP": self._function("pop", 1)}
        return {**both, **entering, "CONTEXT": 0x99}


ENTERED: dict[str, list[tuple]] = {"cuda": [("push", 0x99)], "rocm": [("get",), ("set", 2)]}
LEFT: dict[str, list[tuple]] = {"cuda": [("pop",)], "rocm": [("set", 5)]}
WORK: list[tuple] = [
    ("is_capturing", STREAM),
    ("record", START, STREAM),
    ("call", *ADDRESSES, *SETTINGS, HANDLE, STREAM),
    ("record", END, STREAM),
]
FOLLOWING: list[tuple] = [
    ("is_capturing", STREAM),
    ("is_capturing", LEADER),
    ("record", END, LEADER),
    ("wait", STREAM, END, 0),
    *WORK[1:],
]


def enqueue(comm, kind, failing, leader=STREAM, states=()):
    """Return what a call returned, what it called, and whether it was posted."""
    calls = comm._group.enqueued_calls()
    block = CallBlock(Collective.ALL_REDUCE, 0, dtype="float32", op=ReduceOp.parse("sum"))
    block.set_arrays((16,), 0, 0)
    calls.poster(block)
    recorded: Any = Recorded(kind, failing, states)
    table, before = driver_table_of(recorded), calls.sequence
    go, _words = enqueuer(table, block, recorded.library, SETTINGS, recorded.poll, IN_PROGRESS)
    result = go(*ADDRESSES, HANDLE, STREAM, leader, START, END)
    return result, recorded.calls, calls.sequence - before


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
@pytest.mark.parametrize(
    ("failing", "step", "code", "n_done", "posted"),
    [
        (None, 0, 0, 4, 1),
        (("capture", STREAM), Step.NOTHING, 0, 1, 0),
        (("is_capturing", 1), Step.NOTHING, 0, 1, 0),
        (("record", 1), Step.START, 77, 2, 1),
        (("call", 1), Step.CALL, 77, 3, 1),
        (("record", 2), Step.END, 77, 4, 1),
    ],
)
def test_how_far_it_gets(ranks, kind, failing, step, code, n_done, posted):
    (found,) = ranks.call(1, enqueue, kind, failing, environment=FEW)
    expected = [*ENTERED[kind], *WORK[:n_done], *LEFT[kind]]
    assert found == ((step << 32) | code, expected, posted)


@pytest.mark.parametrize(
    ("failing", "step", "code", "n_done", "posted"),
    [
        (None, 0, 0, 7, 1),
        (("capture", STREAM), Step.NOTHING, 0, 1, 0),
        (("capture", LEADER), Step.NOTHING, 0, 2, 0),
        (("is_capturing", 2), Step.NOTHING, 0, 2, 0),
        (("record", 1), Step.NOTHING, 0, 3, 0),
        (("wait", 1), Step.NOTHING, 0, 4, 0),
        (("record", 2), Step.START, 77, 5, 1),
        (("call", 1), Step.CALL, 77, 6, 1),
        (("record", 3), Step.END, 77, 7, 1),
    ],
)
def test_how_far_one_gets_that_follows_another_stream(ranks, failing, step, code, n_done, posted):
    (found,) = ranks.call(1, enqueue, "cuda", failing, LEADER, environment=FEW)
    expected = [*ENTERED["cuda"], *FOLLOWING[:n_done], *LEFT["cuda"]]
    assert found == ((step << 32) | code, expected, posted)


@pytest.mark.parametrize(("kind", "failing"), [("cuda", "push"), ("rocm", "get"), ("rocm", "set")])
def test_a_device_that_does_not_become_current(ranks, kind, failing):
    ((result, calls, posted),) = ranks.call(1, enqueue, kind, (failing, 1), environment=FEW)
    assert result >> 32 == Step.NOTHING
    assert calls[-1][0] == failing
    assert posted == 0


@pytest.mark.parametrize(
    ("states", "step", "code", "n_polls"),
    [
        ((IN_PROGRESS, IN_PROGRESS, 0), 0, 0, 3),
        ((IN_PROGRESS, 6), Step.CALL, 6, 2),
        ((), Step.CALL, IN_PROGRESS, POLLS),
    ],
)
def test_a_library_that_is_in_progress_is_polled_before_the_event(
    ranks, states, step, code, n_polls
):
    """As every communicator of several ranks is that was made non-blocking."""
    (found,) = ranks.call(1, enqueue, "cuda", "slow", STREAM, states, environment=FEW)
    last = WORK[3:] if not step else []
    work = [*WORK[:3], *[("poll", HANDLE)] * n_polls, *last]
    assert found == ((step << 32) | code, [*ENTERED["cuda"], *work, *LEFT["cuda"]], 1)


def depart_when_gone(comm):
    """The communicator is given up while the driver keeps the thread at the first event."""
    calls = comm._group.enqueued_calls()
    block = CallBlock(Collective.ALL_REDUCE, 0, dtype="float32", op=ReduceOp.parse("sum"))
    block.set_arrays((16,), 0, 0)
    calls.poster(block)
    recorded: Any = Recorded("cuda", None)
    table = driver_table_of(recorded)
    go, _words = enqueuer(table, block, recorded.library, SETTINGS, recorded.poll, IN_PROGRESS)
    places = [int(table[DriverTable.place])]
    go(*ADDRESSES, HANDLE, STREAM, STREAM, START, END)
    places.append(int(table[DriverTable.place]))
    table[DriverTable.gone] = Gone.YES
    del recorded.calls[:]
    result = go(*ADDRESSES, HANDLE, STREAM, STREAM, START, END)
    places.append(int(table[DriverTable.place]))
    return result >> 32, recorded.calls, places


def test_a_communicator_that_is_gone_is_not_called(ranks):
    ((step, calls, places),) = ranks.call(1, depart_when_gone, environment=FEW)
    assert step == Step.GONE
    assert calls == [*ENTERED["cuda"], *WORK[:2], *LEFT["cuda"]]
    assert places[0] < places[1] < places[2]  # another thread sees that this one goes on
    assert not any(place % 2 for place in places)


def depart_when_full(comm):
    found = [enqueue(comm, "cuda", None) for _ in range(5)]
    return [result >> 32 for result, _, _ in found], found[-1][1]


def test_a_full_ring_is_left_to_python(ranks):
    ((steps, calls),) = ranks.call(1, depart_when_full, environment=FEW)
    assert steps == [0, 0, 0, 0, Step.NOTHING]
    assert calls == [*ENTERED["cuda"], WORK[0], *LEFT["cuda"]]
