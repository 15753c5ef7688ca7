"""Order between streams, by events that are used again and again."""

from __future__ import annotations

import weakref

from gpucoll.devices import PER_THREAD_STREAM, Device
from gpucoll.errors import ArgumentError

_KNOWN_STREAMS = 256


class Mark:
    """What was on a stream at some moment: others can come behind it, whatever becomes of that one.

    Parameters
    ----------
    streams : Streams
        Of the communicator.
    event : int
        Recorded there; goes back to the pool with this.
    """

    def __init__(self, streams: Streams, event: int) -> None:
        self._streams, self.event = streams, event
        # May be called by the garbage collector anywhere: it only appends to a list.
        self._dropped = weakref.finalize(self, streams.give_back, event)
        self._dropped.atexit = False

    @property
    def is_pending(self) -> bool:
        """Whether it is not known that all of that is done."""
        return self._dropped.alive

    def give_back(self) -> None:
        """Nobody needs to wait for it any more."""
        if self._dropped.detach():
            self._streams.give_back(self.event)


class Streams:
    """The streams that a communicator's calls run on, and a pool of events.

    The device must be current for all methods but `close`.

    Parameters
    ----------
    device : Device
        Whose streams.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.events: list[int] = []
        """Events that nobody asks for any more."""
        self.known: set[int] = set()
        """Streams that were found to be of this device."""
        self.own = 0
        """The communicator's own stream, for what is to overlap; 0 before `make_own`."""

    def check(self, stream: int) -> None:
        """Raise ArgumentError unless calls can run on a stream; who passed is remembered."""
        if stream in self.known:
            return
        if stream == PER_THREAD_STREAM:
            raise ArgumentError(
                "the per-thread default stream cannot be used: the vendor's library launches its "
                "work in a thread of its own, where that handle stands for another stream. Give "
                "stream= a stream of your own, or call with async_op=True"
            )
        if not self._device.owns_stream(stream):
            raise ArgumentError(
                f"the stream {stream:#x} belongs to another GPU; this communicator's is "
                f"{self._device.label}. Give one that was made while {self._device.label} was the "
                "current device, or leave stream= out"
            )
        if len(self.known) >= _KNOWN_STREAMS:
            self.known.clear()
        self.known.add(stream)

    def make_own(self) -> None:
        """Make the communicator's own stream."""
        self.own = self._device.create_stream(is_urgent=True)

    def record(self, stream: int) -> int:
        """Return an event that is reached when all that is on the stream now is done."""
        event = self.events.pop() if self.events else self._device.create_event()
        if code := self._device.record_event(event, stream):
            self.give_back(event)
            self._device.check(code, "record an event")
        return event

    def give_back(self, *events: int) -> None:
        """Take events that nobody asks for any more."""
        self.events += events

    def wait(self, stream: int, event: int) -> None:
        """Make what comes on a stream wait for an event."""
        self._device.check(self._device.stream_wait_event(stream, event, 0), "make a stream wait")

    def follow(self, stream: int, leader: int) -> None:
        """Make what comes on a stream wait for what is on `leader` now."""
        if stream != leader:
            event = self.record(leader)
            try:
                self.wait(stream, event)
            finally:
                self.give_back(event)  # the wait has been enqueued: it may be recorded again

    def close(self) -> None:
        """Destroy events and the own streams; what is on them still runs."""
        while self.events:
            self._device.destroy_event(self.events.pop())
        if self.own:
            self._device.destroy_stream(self.own)
            self.own = 0
