"""Order between streams, established by reusable events."""

from __future__ import annotations

import weakref

from gpucoll.devices import PER_THREAD_STREAM, Device
from gpucoll.errors import ArgumentError

_KNOWN_STREAMS = 256


class Mark:
    """The work on a stream at some moment. Others can wait for it even when the stream is gone.

    Parameters
    ----------
    streams : Streams
        The communicator's streams.
    event : int
        Recorded on the stream; returns to the pool with this mark.
    """

    def __init__(self, streams: Streams, event: int) -> None:
        self._streams, self.event = streams, event
        # May be called by the garbage collector anywhere: it only appends to a list.
        self._dropped = weakref.finalize(self, streams.give_back, event)
        self._dropped.atexit = False

    @property
    def is_pending(self) -> bool:
        """Whether the marked work may still be running."""
        return self._dropped.alive

    def give_back(self) -> None:
        """Return the event to the pool: no stream needs to wait for it any more."""
        if self._dropped.detach():
            self._streams.give_back(self.event)


class Streams:
    """The streams that a communicator's calls run on, and a pool of events.

    The device must be current for all methods but `close`.

    Parameters
    ----------
    device : Device
        The device of the streams.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.events: list[int] = []
        """Events that are free for reuse."""
        self.known: set[int] = set()
        """Streams that were found to belong to this device."""
        self.own = 0
        """The communicator's own stream, for calls that are to overlap; 0 before `make_own`."""

    def check(self, stream: int) -> None:
        """Raise ArgumentError unless calls can run on a stream; remember streams that passed."""
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
        """Return an event that is reached when all present work on the stream is done."""
        event = self.events.pop() if self.events else self._device.create_event()
        if code := self._device.record_event(event, stream):
            self.give_back(event)
            self._device.check(code, "record an event")
        return event

    def give_back(self, *events: int) -> None:
        """Return events to the pool."""
        self.events += events

    def wait(self, stream: int, event: int) -> None:
        """Make later work on a stream wait for an event."""
        self._device.check(self._device.stream_wait_event(stream, event, 0), "make a stream wait")

    def follow(self, stream: int, leader: int) -> None:
        """Make later work on a stream wait for the present work on `leader`."""
        if stream != leader:
            event = self.record(leader)
            try:
                self.wait(stream, event)
            finally:
                self.give_back(event)  # the wait has been enqueued: it may be recorded again

    def close(self) -> None:
        """Destroy the events and the own stream; work on them still runs."""
        while self.events:
            self._device.destroy_event(self.events.pop())
        if self.own:
            self._device.destroy_stream(self.own)
            self.own = 0
