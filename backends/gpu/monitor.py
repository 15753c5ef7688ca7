"""The monitor, which finds out how calls on GPU arrays end.

The calling thread does not wait for its calls. `Monitor.look` runs in the monitor thread, or in a
thread that waits for certainty. It finds out whether all ranks made the same call; whether the
call is done, late or can never end; and whether the vendor's library has failed. In case of a
failure the communicator is given up: for the other ranks through the segment's abort word, and on
this GPU through the backend's `abort`, which ends the work that hangs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from gpucoll.backends.gpu.deferred_release import let_go_later
from gpucoll.backends.gpu.enqueue_entry import driver_table_of
from gpucoll.backends.gpu.enqueue_words import DriverTable, Gone
from gpucoll.backends.gpu.in_flight import InFlight, IssuedCall, first_pending
from gpucoll.backends.gpu.streams import Streams
from gpucoll.devices import DEFAULT_STREAMS, Device
from gpucoll.errors import BackendError, DeadlineError, GpucollError, StateError
from gpucoll.group.protocol import EnqueuedCalls, Group
from gpucoll.transport.shared import ordering
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Status
from gpucoll.wording import MESSAGE_REASONS, rank_of

LOST_AFTER_S = 0.03
"""How long a call may go on after a rank has ended: that rank may have done its part."""
PAUSES_S = (20e-6, 2e-3)
"""First and longest pause between two looks of a waiting thread."""
_LOOK_FOR_PEERS_S = 0.01
PENDING_S = 0.02
"""For how long a call is the oldest one on the GPU before that is noted for `gpucoll why`."""
STUCK_S = 1.0
"""How long a thread is at one place in the driver before another thread acts in its stead."""


def lost_ranks(group: Group, calls: EnqueuedCalls) -> set[int]:
    """Return the ranks that calls under way will never meet; late ranks are found by `compare`.

    A rank that closes has done its part of all calls that it posted. It is lost only to calls that
    it did not post.
    """
    lost = {rank for rank in group.ended_ranks() if not group.has_closed(rank)}
    late = calls.late_rank
    return {*lost, late} if late >= 0 and group.has_closed(late) else lost


class Monitor:
    """The calls under way of one rank on one GPU, and their outcomes.

    Parameters
    ----------
    group : Group
        The ranks.
    calls : EnqueuedCalls
        Posts and compares calls.
    device : Device
        This rank's GPU.
    failure_of_library : callable
        Returns the failure that the vendor's library reports, or None. Must not wait.
    abort_library : callable
        Ends this communicator's work on the GPU.
    """

    def __init__(
        self,
        group: Group,
        calls: EnqueuedCalls,
        device: Device,
        failure_of_library: Callable[[], GpucollError | None],
        abort_library: Callable[[], None],
    ) -> None:
        self.group = group
        self.calls = calls
        self.device = device
        self.streams = Streams(device)
        self.driver_table = driver_table_of(device)
        """For calls made in one compiled step: `gpucoll.backends.gpu.compiled_call`."""
        self._stuck = 0, 0.0
        self.in_flight = InFlight()
        self.failure: GpucollError | None = None
        """Why the communicator was given up."""
        self.failed_at_s = 0.0
        self._has_ended = False
        self.lock = threading.RLock()
        """Held during calls of the vendor's library."""
        self._failure_of_library = failure_of_library
        self._abort_library = abort_library
        self._gone_since: dict[int, float] = {}
        self._looked_for_peers_s = 0.0
        self._pending: int | None = None
        self._pending_s = 0.0
        self._noted: tuple[int, bool] | None = None

    # --- finding out ------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise the error for which the communicator was given up, if it was."""
        if self.failure is not None:
            self.group.was_told = True
            raise self.failure.with_traceback(None)

    @property
    def is_busy(self) -> bool:
        """Whether calls are under way, being enqueued, or not compared yet."""
        if self.is_over:
            return False
        is_in_driver = self._word(DriverTable.place) % 2 == 1
        return bool(self.in_flight.count) or self.calls.has_uncompared or is_in_driver

    @property
    def is_over(self) -> bool:
        """Whether the communicator has released everything, so that no more can be found out."""
        if self.group.is_closed and not self._has_ended:  # by a garbage collection
            self.end()
        return self._has_ended

    def look(self) -> None:
        """Find out how far all calls are, and whether something is wrong. Does not wait.

        After the communicator's end this does nothing: what is known then stays as it is.
        """
        if self.is_over:  # a thread that hangs in the driver may hold the lock for ever
            return
        with self.lock:
            self._look_at_all()

    def _look_at_all(self) -> None:
        if self.is_over:  # it may have ended meanwhile
            return
        if self.failure is None:
            self._look_for_failures()
        try:
            # This thread may be capturing a graph, or another one of the process.
            with self.device, self.device.relaxed_capture():
                self._look_at_issued()
        except BackendError as error:  # the GPU cannot even be made current any more
            self.give_up(Abort.BACKEND, self.group.rank, self._oldest_sequence(), error)

    def look_from_outside(self) -> None:
        """Look while another thread, which the driver may be blocking, holds the lock.

        A stream takes about 1000 pieces of work. Beyond that, the driver blocks a thread that
        submits more until there is room; if the GPU waits for a rank that never comes, that is for
        ever. Events are not queried here: the driver might block this thread, too. A thread in the
        library's own calls detects failures itself.
        """
        place, now_s = self._word(DriverTable.place), time.monotonic()
        if place != self._stuck[0]:
            self._stuck = place, now_s
        stuck_s = now_s - self._stuck[1]
        if place % 2 == 0 or stuck_s < STUCK_S or self.failure is not None:
            return
        # This is stored before the place is read; that thread stores its place before it reads
        # this. So a thread that was still at that place does not enter the library from here on.
        self._set_gone(Gone.PERHAPS)
        try:
            if self._word(DriverTable.place) == place:
                self._look_for_failures()
                if stuck_s > self.group.timeout_s:
                    code, limit_s = Abort.ENQUEUED_DEADLINE, self.group.timeout_s
                    self.give_up(code, self.group.rank, self._oldest_sequence(), None, limit_s)
        finally:
            if self.failure is None:
                self._set_gone(Gone.NO)

    def _word(self, word: int) -> int:
        """Load a word of the driver table, after all earlier stores of this thread."""
        return ordering.load_after(self.driver_table.ctypes.data + 8 * word)

    def _set_gone(self, gone: Gone) -> None:
        ordering.store(self.driver_table.ctypes.data + 8 * DriverTable.gone, gone)

    def _look_for_failures(self) -> None:
        group = self.group
        if group.is_aborted:
            self._note_abort()
            return
        status = self.calls.compare()
        if status == Status.MISMATCH:
            self.give_up(Abort.ENQUEUED_MISMATCH, group.rank, self.calls.compared + 1)
        elif (error := self._failure_of_library()) is not None:
            self.give_up(Abort.BACKEND, group.rank, self._oldest_sequence(), error)
        elif status == Status.MORE or self.in_flight.count:
            self._look_for_lost_ranks()

    def _look_for_lost_ranks(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_for_peers_s < _LOOK_FOR_PEERS_S:
            return
        self._looked_for_peers_s = now_s
        for rank in lost_ranks(self.group, self.calls):
            if now_s - self._gone_since.setdefault(rank, now_s) > LOST_AFTER_S:
                self.give_up(Abort.ENQUEUED_LOST, rank, self._oldest_sequence())
                return

    def _oldest_sequence(self) -> int:
        """Return the number of the oldest call under way on any stream."""
        if self.calls.has_uncompared:
            return self.calls.compared + 1
        heads = (issued.sequence for issued in self.in_flight.heads)
        known = [sequence for sequence in heads if sequence is not None]
        return min(known, default=self.calls.sequence)

    def _look_at_issued(self) -> None:
        """Query the events of calls under way, in order on each stream; drop finished calls."""
        now_s = time.monotonic()
        spent: list[object] = []
        for stream, line in list(self.in_flight.lines.items()):
            self._note_passed(stream, line, now_s)
            if self.failure is None and self.group.is_aborted:
                # An abort lets streams continue regardless of their data: possibly this one.
                self._note_abort()
            while line and line[0].is_passed and self._is_agreed(line[0]):
                issued = line.popleft()
                issued.is_done = self.failure is None
                spent.append(issued.keep)
                issued.keep = None
                self.in_flight.count -= 1
            if not line:
                del self.in_flight.lines[stream]
        if spent:
            let_go_later(self.device, spent)
        self._note_pending(now_s)

    def _note_pending(self, now_s: float) -> None:
        """Note for `gpucoll why` which call is the oldest on the GPU, if that is so for long."""
        pending = self._first_pending()
        sequence = None if pending is None else pending.sequence
        if sequence != self._pending:
            self._pending, self._pending_s = sequence, now_s
        noted = None
        if pending is not None and sequence is not None and now_s - self._pending_s > PENDING_S:
            noted = sequence, bool(pending.begun_s)
        if noted != self._noted:
            self._noted = noted
            since_ns = int(1e9 * self._pending_s) if noted else 0
            number, has_begun = noted or (0, False)
            self.calls.note_pending(number, since_ns, has_begun=has_begun)

    def _first_pending(self) -> IssuedCall | None:
        """Return the oldest collective whose work has not ended, on any stream."""
        found = None
        for line in self.in_flight.lines.values():
            for issued in line:
                if not issued.is_passed and issued.sequence is not None:
                    if found is None or issued.sequence < (found.sequence or 0):
                        found = issued
                    break
        return found

    def _is_agreed(self, issued: IssuedCall) -> bool:
        """Return whether it is known that all ranks made a call, or that it failed."""
        return (
            issued.sequence is None
            or self.failure is not None
            or self.calls.is_compared(issued.sequence)
        )

    def _note_passed(self, stream: int, line: deque[IssuedCall], now_s: float) -> None:
        """Mark the calls of a stream whose work has ended, and give their events back.

        A program may destroy a stream with work on it, and another stream may get its number. So
        only on streams that stay does the end of a call tell about those before it.
        """
        first = sum(issued.is_passed for issued in line)  # these are the oldest
        if stream in DEFAULT_STREAMS or stream == self.streams.own:
            pending = first_pending(line, first, self._work_has_ended)
        else:
            pending = first
            while pending < len(line) and self._work_has_ended(line[pending]):
                pending += 1
        for issued in itertools.islice(line, first, pending):
            issued.begun_s = issued.begun_s or now_s
            issued.give_back(self.streams)
            issued.is_passed = True
            if issued.sequence is not None:
                self.calls.note_over(issued.sequence)
        if pending < len(line):
            self._look_at_pending(line[pending], now_s)

    def _work_has_ended(self, issued: IssuedCall) -> bool:
        if issued.launches:
            return all(launch.is_over() for launch in issued.launches)
        return self._is_reached(issued.end)

    def _look_at_pending(self, issued: IssuedCall, now_s: float) -> None:
        """Note when the oldest call of a stream has begun, and end it if it is late."""
        if not issued.begun_s and (issued.launches or self._is_reached(issued.start)):
            issued.begun_s = now_s
        if self.failure is None and issued.begun_s and now_s - issued.begun_s > issued.timeout_s:
            self._end_late(issued, issued.timeout_s)

    def _is_reached(self, event: int) -> bool:
        code = self.device.query_event(event)
        if code == self.device.not_ready:
            return False
        if code and self.failure is None:
            try:
                self.device.check(code, "go on: work on the GPU has failed")
            except BackendError as error:
                self.give_up(Abort.BACKEND, self.group.rank, self._oldest_sequence(), error)
        return True  # after an error nothing more will happen

    def _end_late(self, issued: IssuedCall, waited_s: float) -> None:
        """Break the communicator because a call has taken too long."""
        if issued.sequence is None:
            error = self._message_deadline(issued, waited_s)
            self.give_up(Abort.ENQUEUED_MESSAGE, self.group.rank, None, error)
            return
        code, rank = Abort.ENQUEUED_DEADLINE, self.group.rank
        self.give_up(code, rank, issued.sequence, None, waited_s)

    def _message_deadline(self, issued: IssuedCall, waited_s: float) -> DeadlineError:
        who = rank_of(self.group.rank, self.group.world_size)
        return DeadlineError(
            f"{who} waited {waited_s:g} s in {issued.name} on the GPU: {MESSAGE_REASONS}. "
            "The communicator is broken: close it"
        )

    # --- giving up --------------------------------------------------------------------------------

    def give_up(
        self,
        code: Abort,
        rank: int,
        sequence: int | None,
        error: BaseException | None = None,
        waited_s: float | None = None,
    ) -> None:
        """Break the communicator for all ranks, and end its work on this GPU."""
        if self.failure is not None:
            return
        self.group.abort(code, rank, self.calls.sequence if sequence is None else sequence)
        self._note_abort(error, waited_s)

    def _note_abort(
        self, error: BaseException | None = None, waited_s: float | None = None
    ) -> None:
        """Keep why the communicator is broken, and end the work that hangs on this GPU."""
        own = error if isinstance(error, GpucollError) else None
        self.failure = self.group.fail(own or self.group.abort_error(waited_s))
        self.failed_at_s = time.monotonic()
        self._set_gone(Gone.YES)
        self._abort_library()

    def end(self, reason: GpucollError | None = None) -> None:
        """Note that everything is released; calls not known to have succeeded never will be.

        Runs without the lock if a thread that hangs holds it. `reason` tells why calls under way
        were not waited for.
        """
        if self.failure is None and self.in_flight.count:
            self.failure = reason or StateError(
                f"the communicator of rank {self.group.rank} of {self.group.world_size} was given "
                "up or dropped while calls on GPU arrays were under way: whether they succeeded "
                "is not known. close() waits for them"
            )
            self.failed_at_s = time.monotonic()
        self._has_ended = True

    # --- certainty --------------------------------------------------------------------------------

    def synchronize(
        self,
        issued: IssuedCall | None = None,
        timeout_s: float | None = None,
        *,
        others_s: float | None = None,
        is_last: bool = False,
    ) -> None:
        """Wait until a call, or every issued call, has succeeded; raise the first failure.

        A call whose part on this rank is over may wait `others_s` seconds for other ranks to make
        it; default: the communicator's deadline. With `is_last`, a call that has begun and not
        ended after `timeout_s` is given up, as at its own deadline.

        Work that does not even start, because earlier work on the stream does not end, causes a
        DeadlineError and does not break the communicator.
        """
        limit_s = self.group.timeout_s if timeout_s is None else timeout_s
        begun_s, pause_s = time.monotonic(), PAUSES_S[0]
        while True:
            self.look()
            if self.is_over and issued is not None and issued.is_done:
                return  # whatever happened to later calls
            self.raise_failure()
            if issued.is_done if issued is not None else not self.is_busy:
                return
            oldest = issued or next(iter(self.in_flight.heads), None)
            has_begun = oldest is None or oldest.begun_s
            waited_s = time.monotonic() - begun_s
            is_late = waited_s > limit_s
            if (timeout_s is None or is_last) and (oldest is None or oldest.is_passed):
                # This rank's part is over: only other ranks' calls are missing.
                allowed_s = limit_s if others_s is None else others_s
                if waited_s > allowed_s:
                    mine, sequence = self.group.rank, self.calls.compared + 1
                    self.give_up(Abort.ENQUEUED_DEADLINE, mine, sequence, None, allowed_s)
                    continue
            elif is_late and is_last and oldest is not None and oldest.begun_s:
                self._end_late(oldest, limit_s)
                continue
            if is_late and (timeout_s is not None or not has_begun):
                name = oldest.name if oldest else "a call on GPU arrays"
                raise DeadlineError(
                    f"rank {self.group.rank} of {self.group.world_size} waited {limit_s:g} s for "
                    f"{name}, which "
                    + (
                        "has not ended; it goes on"
                        if has_begun
                        else "has not even begun: what is "
                        "before it on the stream does not end; it goes on"
                    )
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSES_S[1])
