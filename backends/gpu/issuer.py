"""Puts calls on streams.

The caller pays for a record in shared memory and two events. Everything else is looked at later:
`gpucoll.backends.gpu.monitor`.
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

A stream of CUDA's takes about 1000 pieces of work; then the driver keeps who brings more waiting,
with the lock (`Issuer.in_driver` is the way out of that). Most calls are up to eight pieces: events
and waits of ours and of the library's, and its kernel.
"""


class Issuer(Monitor):
    """The calls of one rank on one GPU; made as a `Monitor`."""

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
        """Post what ranks compare, enqueue the work, and watch it from here on.

        The lock is held, and the device is current.

        Parameters
        ----------
        stream_calls : sequence of StreamCall
            The calls that make up the work.
        enqueue : callable
            Puts it on their streams; a failure there breaks the communicator. What it returns lives
            until the calls are done.
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
            if is_enqueuing or self.calls.sequence != before:  # else nobody knows of it
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
        """Watch a captured call no further: its replays belong to who launches them.

        Its events are never passed. Streams of the capture can be told to wait for its end as long
        as somebody has the call; then the event is as good as any other.
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
        """Post what could not be posted at once; where the ring is full, wait for the slowest."""
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
        """Wait until there are fewer calls under way, each under its own deadline."""
        self.look()
        if self.in_flight.count >= MOST_IN_FLIGHT:
            longest = max(self.in_flight.lines.values(), key=len)
            self.synchronize(longest[len(longest) // 2])

    def follow(self, stream: int, leader: int) -> None:
        """Make what comes on `stream` wait for what is on `leader` now."""
        if stream != leader:
            with self.lock, self.device:
                if leader != PER_THREAD_STREAM:  # which can be waited for from the thread itself
                    self.streams.check(leader)
                with self.in_driver():
                    self.streams.follow(stream, leader)

    def mark(self, stream: int) -> Mark:
        """Note what is on a stream now, for calls that are made when it may be gone."""
        with self.lock, self.device:
            if stream != PER_THREAD_STREAM:
                self.streams.check(stream)
            with self.in_driver():
                made = Mark(self.streams, self.streams.record(stream))
        self.in_flight.marks.add(made)
        return made

    def follow_mark(self, stream: int, mark: Mark) -> None:
        """Make what comes on `stream` wait for what was marked, unless that is done."""
        with self.lock, self.device:
            with self.device.relaxed_capture():
                is_done = self.device.query_event(mark.event) != self.device.not_ready
            if is_done:
                mark.give_back()
            else:
                with self.in_driver():
                    self.streams.wait(stream, mark.event)

    def wait_on(self, stream: int, issued: IssuedCall) -> None:
        """Make what comes on `stream` wait for a call."""
        with self.lock, self.device:
            if issued.end:
                with self.in_driver():
                    self.streams.wait(stream, issued.end)

    @contextlib.contextmanager
    def in_driver(self) -> Iterator[None]:
        """Say that this thread is in the driver: `look_from_outside`. Raise what came of that."""
        self._step()
        try:
            yield
        finally:
            gone = self._step()
        while gone == Gone.PERHAPS:
            time.sleep(PAUSES_S[0])
            gone = self._word(DriverTable.GONE)
        if gone == Gone.YES:
            self.raise_failure()

    @property
    def own_stream(self) -> int:
        """The communicator's own stream, for what is to overlap."""
        if not self.streams.own:
            with self.lock, self.device:
                self.streams.make_own()
        return self.streams.own

    def beside_streams(self) -> int:
        """Return what stands for a stream in a call that is on none, nor behind another call."""
        self._n_beside += 1
        return -self._n_beside

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of everything; what is under way is nobody's concern any more."""
        with self.lock:
            self.end()
            self.in_flight.let_go(self.streams)
            self.streams.close()


def _do_nothing() -> None:
    """Wake nobody: there is no monitor thread."""
