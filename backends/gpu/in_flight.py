"""A call before it is put on a stream, and a call on a stream until its outcome is known."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gpucoll.backends.gpu.signature import Signature
from gpucoll.backends.gpu.streams import Mark, Streams

_Call = TypeVar("_Call")


@dataclass(slots=True)
class StreamCall:
    """A call that is to be put on a stream; a plan's is put there again and again.

    Attributes
    ----------
    name : str
        The name of the user's call.
    signatures : sequence of Signature
        Posted for the other ranks to compare; none for messages.
    launches : sequence
        What the backend enqueues for the call, all together.
    stream : int
        The device's stream, or a number from `Issuer.beside_streams`.
    keep : object
        Objects that must live until the call is done.
    is_own : bool
        Whether all of the memory belongs to the user, so that a captured graph can use it
        again.
    timeout_s : float, optional
        Time limit, counted from its start on the GPU; None: the communicator's default.
    is_captured : bool
        Whether a graph is being captured from the stream, so that nothing runs now. The backend
        sets it.
    is_awaited : bool
        Whether other streams may be made to wait for the call.
    """

    name: str
    signatures: Sequence[Signature]
    launches: Sequence[Any]
    stream: int
    keep: Any
    is_own: bool = False
    timeout_s: float | None = None
    is_captured: bool = False
    is_awaited: bool = False

    @property
    def is_on_stream(self) -> bool:
        """Whether the call runs on a stream; messages of host arrays do not."""
        return self.stream >= 0


class IssuedCall:
    """A call on a stream.

    Attributes
    ----------
    sequence : int or None
        The call's number among those that all ranks make; None: a message between two ranks.
    name : str
        The name of the user's call.
    stream : int
        The stream on which it runs.
    start, end : int
        Events before and after it on the stream; 0 once they have been reached and given back.
    launches : sequence
        For a call that is on no stream: objects whose `is_over` reports whether it has ended.
    timeout_s : float
        Time limit, counted from its start.
    keep : object
        Objects that must live until the call is done, such as arrays.
    begun_s : float
        When its start event was first seen to be reached; 0: not yet.
    is_passed : bool
        Whether its end event has been reached.
    is_done : bool
        Whether it has succeeded: its work has ended, and all ranks made the same call.
    """

    __slots__ = (
        "__weakref__", "begun_s", "end", "is_done", "is_passed", "keep", "launches", "name",
        "sequence", "start", "stream", "timeout_s",
    )  # fmt: skip

    def __init__(
        self,
        sequence: int | None,
        name: str,
        stream: int,
        timeout_s: float,
        keep: Any,
        start: int = 0,
        end: int = 0,
    ) -> None:
        self.sequence = sequence
        self.name = name
        self.stream = stream
        self.timeout_s = timeout_s
        self.keep = keep
        self.start = start
        self.end = end
        self.launches: Sequence[Any] = ()
        self.begun_s = 0.0
        self.is_passed = self.is_done = False

    def give_back(self, streams: Streams) -> None:
        """Return its events to the pool."""
        streams.give_back(*filter(None, (self.start, self.end)))
        self.start = self.end = 0


def first_pending(line: Sequence[_Call], first: int, has_ended: Callable[[_Call], bool]) -> int:
    """Return the place of the oldest call of a stream, from `first` on, that has not ended.

    A query costs two microseconds, and the driver makes a thread that submits work wait for it.
    Calls on a stream end in order, so a few queries tell about all of them: of the oldest call, of
    the newest one, and if only the oldest has ended, of those that halve what is between.
    """
    ended, pending, place = first - 1, len(line), first
    while pending - ended > 1:
        if has_ended(line[place]):
            ended = place
        else:
            pending = place
        place = len(line) - 1 if place == first else (ended + pending) // 2
    return pending


class InFlight:
    """The calls under way. Those on one stream end in order.

    Attributes
    ----------
    lines : dict of int to deque of IssuedCall
        The calls by stream, oldest first; no entry is empty.
    count : int
        Number of calls in all lines.
    n_added : int
        Number of calls that were ever added.
    captured : WeakSet of IssuedCall
        Captured calls that can still be waited for; they are in no line.
    marks : WeakSet of Mark
        The marks that plans hold.
    """

    def __init__(self) -> None:
        self.lines: dict[int, deque[IssuedCall]] = {}
        self.count = self.n_added = 0
        self.captured: weakref.WeakSet[IssuedCall] = weakref.WeakSet()
        self.marks: weakref.WeakSet[Mark] = weakref.WeakSet()

    def add(self, issued: IssuedCall) -> None:
        """Append a call to its stream's line."""
        line = self.lines.get(issued.stream)
        if line is None:
            self.lines[issued.stream] = deque((issued,))
        else:
            line.append(issued)
        self.count += 1
        self.n_added += 1

    @property
    def heads(self) -> list[IssuedCall]:
        """The oldest call on each stream."""
        return [line[0] for line in self.lines.values()]

    @property
    def arrays(self) -> list[Any]:
        """The objects that all calls keep alive."""
        return [issued.keep for line in self.lines.values() for issued in line]

    def let_go(self, streams: Streams) -> None:
        """Drop all calls: release their arrays, and return their events to the pool."""
        lines = (issued for line in self.lines.values() for issued in line)
        for issued in (*lines, *self.captured):
            issued.give_back(streams)
            issued.keep = None
        for mark in self.marks:
            mark.give_back()
        self.lines.clear()
        self.count = 0
