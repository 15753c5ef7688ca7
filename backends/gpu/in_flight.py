"""A call that is about to be put on a stream, and one that is there until its end is known."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpucoll.backends.gpu.signature import Signature
from gpucoll.backends.gpu.streams import Mark, Streams


@dataclass(slots=True)
class StreamCall:
    """A call that is about to be put on a stream; a plan's does so again and again.

    Attributes
    ----------
    name : str
        What the user called.
    signatures : sequence of Signature
        What is posted for the other ranks to compare; none for messages.
    launches : sequence
        What the backend enqueues for it, all of it at once.
    stream : int
        Where: one of the device's, or `Issuer.beside_streams`.
    keep : object
        What must live until it is done.
    is_own : bool
        Whether all of the memory is the user's: what a captured graph can use again.
    timeout_s : float, optional
        How long it may take from its start on; None: the communicator's default.
    is_captured : bool
        Whether a graph is being captured from the stream, so that nothing runs now: for the backend
        to find out.
    is_awaited : bool
        Whether other streams may be told to wait for it.
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
        """Whether a stream has a part in it: none has in messages of host arrays."""
        return self.stream >= 0


class IssuedCall:
    """A call on a stream.

    Attributes
    ----------
    sequence : int or None
        Its number among the calls that all ranks make; None: a message between two ranks.
    name : str
        What the user called.
    stream : int
        Where it runs.
    start, end : int
        Events before and behind it on the stream; 0 once they are passed and given back.
    launches : sequence
        Of one that is on no stream: what says whether it is over, by `is_over`.
    timeout_s : float
        How long it may take from its start on.
    keep : object
        What must live until it is done: arrays.
    begun_s : float
        When its start was first seen to be passed; 0: not yet.
    is_passed : bool
        Whether its end is.
    is_done : bool
        Whether also all ranks made the same call: it has succeeded.
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
        """Give its events to the pool."""
        streams.give_back(*filter(None, (self.start, self.end)))
        self.start = self.end = 0


class InFlight:
    """The calls under way: on each stream they end in order.

    Attributes
    ----------
    lines : dict of int to deque of IssuedCall
        By stream, the oldest first; no line is empty.
    count : int
        Of all of them.
    captured : WeakSet of IssuedCall
        Captured calls that can still be waited for; in no line.
    marks : WeakSet of Mark
        Of what plans have.
    """

    def __init__(self) -> None:
        self.lines: dict[int, deque[IssuedCall]] = {}
        self.count = 0
        self.captured: weakref.WeakSet[IssuedCall] = weakref.WeakSet()
        self.marks: weakref.WeakSet[Mark] = weakref.WeakSet()

    def add(self, issued: IssuedCall) -> None:
        """Put a call behind those on its stream."""
        line = self.lines.get(issued.stream)
        if line is None:
            self.lines[issued.stream] = deque((issued,))
        else:
            line.append(issued)
        self.count += 1

    @property
    def heads(self) -> list[IssuedCall]:
        """The oldest call on each stream."""
        return [line[0] for line in self.lines.values()]

    @property
    def arrays(self) -> list[Any]:
        """What all of them keep alive."""
        return [issued.keep for line in self.lines.values() for issued in line]

    def let_go(self, streams: Streams) -> None:
        """Forget all of them: their arrays, and their events to the pool."""
        lines = (issued for line in self.lines.values() for issued in line)
        for issued in (*lines, *self.captured):
            issued.give_back(streams)
            issued.keep = None
        for mark in self.marks:
            mark.give_back()
        self.lines.clear()
        self.count = 0
