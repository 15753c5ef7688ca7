"""The issuer, which puts calls on streams.

The caller pays for a record in shared memory and two events. The monitor does everything else
later: `gpucoll.backends.gpu.monitor`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpucoll.backends.gpu.enqueue_entry import stepper
from gpucoll.backends.gpu.enqueue_words import DriverTable, Gone
from gpucoll.backends.gpu.in_flight import IssuedCall, StreamCall
from gpucoll.backends.gpu.monitor import PAUSES_S, Monitor
from gpucoll.backends.gpu.streams import Mark
from gpucoll.devices import PER_THREAD_STREAM
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Status

MOST_IN_FLIGHT = 128
"""How many calls may be under way.

A CUDA stream takes about 1000 pieces of work. Beyond that, the driver blocks the thread that
submits more, which holds the lock (`Issuer.in_driver` handles that case). Most calls are at most
eight pieces: our events and waits, those of the library, and its kernel.
"""


class Issuer(Monitor):
    """The calls of one rank on one GPU. Takes the arguments of `Monitor`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._step = stepper(self.driver_table)
        self._n_beside = 0
        self.wake: Callable[[], None] = _do_nothing
        """Called when there is something to watch."""

    # --- issuing ----------------------------------------------------------------------------------

    def issue(
        self, stream_calls: Sequence[StreamCall], enqueue: Callable[[], Any]
    ) -> list[IssuedCall]:
        """Post what the ranks compare, enqueue the work, and watch it from then on.

        The caller holds the lock, and the device is current.

        Parameters
        ----------
        stream_calls : sequence of StreamCall
            The calls that make up the work.
        enqueue : callable
            Puts the work on their streams; a failure there breaks the communicator. The calls keep
            its return value alive until they are done.
        """
        for stream_call in stream_calls:
            if stream_call.is_on_stream:
                self.streams.check(stream_call.stream)
        if self.in_flight.count >= MOST_IN_FLIGHT:
            self._make_room()
        in_flight: list[IssuedCall] = []
        before, is_enqueuing = self.calls.sequence, False
        try:
            for stream_call in stream_calls:
                in_flight.append(self._post(stream_call))
                if stream_call.is_on_stream and not stream_call.is_captured:
                    with self.in_driver():
                        in_flight[-1].start = self.streams.record(stream_call.stream)
            is_enqueuing = True
            self.wake()  # the driver may block this thread until another rank comes
            kept = enqueue()
            with self.in_driver():
                for issued, stream_call in zip(in_flight, stream_calls, strict=True):
                    if not stream_call.is_on_stream:
                        issued.launches = stream_call.launches
                    elif stream_call.is_awaited or not stream_call.is_captured:
                        issued.end = self.streams.record(issued.stream)
        except BaseException as error:
            for issued in in_flight:
                issued.give_back(self.streams)
            if is_enqueuing or self.calls.sequence != before:  # else no other rank has seen it
                self.give_up(Abort.BACKEND, self.group.rank, None, error)
            raise
        for issued, stream_call in zip(in_flight, stream_calls, strict=True):
            if kept is not None:
                issued.keep = issued.keep, kept
            if stream_call.is_captured:
                self._leave_to_graph(issued)
            else:
                self.in_flight.add(issued)
        self.wake()
        return in_flight

    def _leave_to_graph(self, issued: IssuedCall) -> None:
        """Watch a captured call no longer: its replays belong to those who launch them.

        The call's events are never reached. Streams of the capture can be made to wait for its end
        while the call object exists; afterwards the event can be used again like any other.
        """
        issued.is_passed = issued.is_done = True
        if issued.end:
            self.in_flight.captured.add(issued)
            # May be called by the garbage collector anywhere: it only appends to a list.
            giving_back = weakref.finalize(issued, self.streams.give_back, issued.end)
            giving_back.atexit = False

    def _post(self, stream_call: StreamCall) -> IssuedCall:
        """Post a call for the other ranks to compare."""
        limit_s, sequence = self._limit_s(stream_call), None
        for signature in stream_call.signatures:
            if status := signature.post():
                self._post_late(signature.post, status, limit_s)
            sequence = self.calls.sequence
        return IssuedCall(sequence, stream_call.name, stream_call.stream, limit_s, stream_call.keep)

    def _limit_s(self, stream_call: StreamCall) -> float:
        limit_s = stream_call.timeout_s
        return self.group.timeout_s if limit_s is None else limit_s

    def _post_late(self, post: Callable[[], int], status: int, limit_s: float) -> None:
        """Post a call that could not be posted yet; if the ring is full, wait for room."""
        begun_s, pause_s = time.monotonic(), PAUSES_S[0]
        while status:
            if status == Status.NOT_RUN:
                self.group.check_usable(limit_s)
                status = post()
                continue
            self.look()
            self.raise_failure()
            if status == Status.MORE and time.monotonic() - begun_s > limit_s:
                mine, sequence = self.group.rank, self.calls.compared + 1
                self.give_up(Abort.ENQUEUED_DEADLINE, mine, sequence, None, limit_s)
                self.raise_failure()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])
            status = post()

    def _make_room(self) -> None:
        """Wait until fewer calls are under way, each under its own deadline."""
        self.look()
        if self.in_flight.count >= MOST_IN_FLIGHT:
            longest = max(self.in_flight.lines.values(), key=len)
            self.synchronize(longest[len(longest) // 2])

    def follow(self, stream: int, leader: int) -> None:
        """Make later work on `stream` wait for the present work on `leader`."""
        if stream != leader:
            with self.lock, self.device:
                if leader != PER_THREAD_STREAM:  # the thread itself can wait for this one
                    self.streams.check(leader)
                with self.in_driver():
                    self.streams.follow(stream, leader)

    def mark(self, stream: int) -> Mark:
        """Mark the present work on a stream for later calls, when the stream may be gone."""
        with self.lock, self.device:
            if stream != PER_THREAD_STREAM:
                self.streams.check(stream)
            with self.in_driver():
                made = Mark(self.streams, self.streams.record(stream))
        self.in_flight.marks.add(made)
        return made

    def follow_mark(self, stream: int, mark: Mark) -> None:
        """Make later work on `stream` wait for the marked work, unless that is done."""
        with self.lock, self.device:
            with self.device.relaxed_capture():
                is_done = self.device.query_event(mark.event) != self.device.not_ready
            if is_done:
                mark.give_back()
            else:
                with self.in_driver():
                    self.streams.wait(stream, mark.event)

    def wait_on(self, stream: int, issued: IssuedCall) -> None:
        """Make later work on `stream` wait for a call."""
        with self.lock, self.device:
            if issued.end:
                with self.in_driver():
                    self.streams.wait(stream, issued.end)

    @contextlib.contextmanager
    def in_driver(self) -> Iterator[None]:
        """Tell `look_from_outside` that this thread is in the driver; raise what it found."""
        self._step()
        try:
            yield
        finally:
            gone = self._step()
        while gone == Gone.PERHAPS:
            time.sleep(PAUSES_S[0])
            gone = self._word(DriverTable.gone)
        if gone == Gone.YES:
            self.raise_failure()

    @property
    def own_stream(self) -> int:
        """The communicator's own stream, for calls that are to overlap with others."""
        if not self.streams.own:
            with self.lock, self.device:
                self.streams.make_own()
        return self.streams.own

    def beside_streams(self) -> int:
        """Return a unique number in place of a stream, for a call that is on no stream."""
        self._n_beside += 1
        return -self._n_beside

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything, without regard to calls under way."""
        with self.lock:
            self.end()
            self.in_flight.let_go(self.streams)
            self.streams.close()


def _do_nothing() -> None:
    """Do nothing, in place of `wake`, while there is no monitor thread."""
