"""One call that is on a stream, until it is known how it ended."""

from __future__ import annotations

from typing import Any


class Flight:
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
        "begun_s", "end", "is_done", "is_passed", "keep", "name", "sequence", "start", "stream",
        "timeout_s",
    )  # fmt: skip

    def __init__(
        self, sequence: int | None, name: str, stream: int, timeout_s: float, keep: Any
    ) -> None:
        self.sequence = sequence
        self.name = name
        self.stream = stream
        self.timeout_s = timeout_s
        self.keep = keep
        self.start = self.end = 0
        self.begun_s = 0.0
        self.is_passed = self.is_done = False
