"""Finds out beside the streams how calls on GPU arrays end.

Nobody waits for such a call. The monitor thread, or whoever asks for certainty, looks
(`Monitor.look`): whether all ranks made the same call, whether it is done, late, or will never be,
whether the vendor's library has failed. Then the communicator is given up: for the other ranks by
the segment's abort word, and on this GPU by the backend's `abort`, which ends what hangs there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gpucoll.backends.gpu.deferred_release import let_go_later
from gpucoll.backends.gpu.enqueue_entry import driver_table_of
from gpucoll.backends.gpu.enqueue_words import DriverTable, Gone
from gpucoll.backends.gpu.in_flight import InFlight, IssuedCall
from gpucoll.backends.gpu.streams import Streams
from gpucoll.devices import Device
from gpucoll.errors import BackendError, DeadlineError, GpucollError, StateError
from gpucoll.group.protocol import EnqueuedCalls, Group
from gpucoll.transport.shared import ordering
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Status
from gpucoll.wording import MESSAGE_REASONS, rank_of

LOST_AFTER_S = 0.03
"""How long a call may go on after a rank has ended: it may have done its part."""
PAUSES_S = (20e-6, 2e-3)
"""First and longest pause between two looks of who waits."""
_LOOK_FOR_PEERS_S = 0.01
STUCK_S = 1.0
"""So long a thread is at one place in the driver before another one acts in its stead."""


def lost_ranks(group: Group, calls: EnqueuedCalls) -> set[int]:
    """Return the ranks that are lost to calls under way; what is late was found by `compare`.

    A rank that closes has done its part of all calls that it has posted. It is lost to the others
    where it has not posted theirs.
    """
    lost = {rank for rank in group.ended_ranks() if not group.has_closed(rank)}
    late = calls.late_rank
    return {*lost, late} if late >= 0 and group.has_closed(late) else lost


class Monitor:
    """What is under way of one rank's calls on one GPU, and what has become of it.

    Parameters
    ----------
    group : Group
        The ranks.
    calls : EnqueuedCalls
        Where calls are posted and compared.
    device : Device
        This rank's GPU.
    failure_of_library : callable
        Returns what the vendor's library has to report, or None. Must not wait.
    abort_library : callable
        Ends what runs on the GPU for this communicator.
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
        """For calls that go in one compiled step: `gpucoll.backends.gpu.compiled_call`."""
        self._stuck = 0, 0.0
        self.in_flight = InFlight()
        self.failure: GpucollError | None = None
        """Why the communicator was given up."""
        self.failed_at_s = 0.0
        self._has_ended = False
        self.lock = threading.RLock()
        """Held while the vendor's library is called."""
        self._failure_of_library = failure_of_library
        self._abort_library = abort_library
        self._gone_since: dict[int, float] = {}
        self._looked_for_peers_s = 0.0

    # --- finding out ------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raise why the communicator was given up, if it was."""
        if self.failure is not None:
            self.group.was_told = True
            raise self.failure.with_traceback(None)

    @property
    def is_busy(self) -> bool:
        """Whether calls are under way, or not compared yet."""
        return not self.is_over and (bool(self.in_flight.count) or self.calls.has_uncompared)

    @property
    def is_over(self) -> bool:
        """Whether the communicator has let go of everything: nothing more can be found out."""
        if self.group.is_closed and not self._has_ended:  # by a garbage collection
            self.end()
        return self._has_ended

    def look(self) -> None:
        """Find out how far all calls are, and whether something is wrong. Does not wait.

        After the communicator's end nothing is looked at: what is known then stays so.
        """
        if self.is_over:  # the lock may be held for ever by a thread that hangs in the driver
            return
        with self.lock:
            self._look_at_all()

    def _look_at_all(self) -> None:
        if self.is_over:  # by now
            return
        if self.failure is None:
            self._look_for_failures()
        try:
            # Whoever looks may be capturing a graph, or another thread of the process.
            with self.device, self.device.relaxed_capture():
                self._look_at_issued()
        except BackendError as error:  # the GPU does not even become current any more
            self.give_up(Abort.BACKEND, self.group.rank, self._oldest_sequence(), error)

    def look_from_outside(self) -> None:
        """Look while another thread has the lock, and the driver may have that thread.

        A stream takes about 1000 pieces of work; then the driver keeps whoever brings more until
        there is room, and where the GPU waits for a rank that never comes, that is for ever. Events
        are not asked for: the driver may keep this thread, too. In the library's own calls a thread
        looks after itself.
        """
        place, now_s = self._word(DriverTable.PLACE), time.monotonic()
        if place != self._stuck[0]:
            self._stuck = place, now_s
        stuck_s = now_s - self._stuck[1]
        if place % 2 == 0 or stuck_s < STUCK_S or self.failure is not None:
            return
        # Stored before the place is looked at, as that thread stores its place before it looks at
        # this: if it was still there it does not go into the library from here on.
        self._set_gone(Gone.PERHAPS)
        try:
            if self._word(DriverTable.PLACE) == place:
                self._look_for_failures()
                if stuck_s > self.group.timeout_s:
                    code, limit_s = Abort.ENQUEUED_DEADLINE, self.group.timeout_s
                    self.give_up(code, self.group.rank, self._oldest_sequence(), None, limit_s)
        finally:
            if self.failure is None:
                self._set_gone(Gone.NO)

    def _word(self, word: DriverTable) -> int:
        """Load a word of the driver table, after all that this thread has stored before."""
        return ordering.load_after(self.driver_table.ctypes.data + 8 * word)

    def _set_gone(self, gone: Gone) -> None:
        ordering.store(self.driver_table.ctypes.data + 8 * DriverTable.GONE, gone)

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
        """Return the number of the oldest call that is under way on some stream."""
        if self.calls.has_uncompared:
            return self.calls.compared + 1
        heads = (issued.sequence for issued in self.in_flight.heads)
        known = [sequence for sequence in heads if sequence is not None]
        return min(known, default=self.calls.sequence)

    def _look_at_issued(self) -> None:
        """Ask for the events of calls under way, stream by stream in order; drop what is done."""
        now_s = time.monotonic()
        spent: list[object] = []
        for stream, in_flight in list(self.in_flight.lines.items()):
            while in_flight and self._is_over(in_flight[0], now_s):
                issued = in_flight.popleft()
                if self.failure is None and self.group.is_aborted:
                    # An abort lets streams go on over whatever is there: it may have been this.
                    self._note_abort()
                issued.is_done = self.failure is None
                spent.append(issued.keep)
                issued.keep = None
                self.in_flight.count -= 1
            if not in_flight:
                del self.in_flight.lines[stream]
        if spent:
            let_go_later(self.device, spent)

    def _is_over(self, issued: IssuedCall, now_s: float) -> bool:
        """Return whether nothing more is to be known of a call."""
        if not issued.is_passed and not self._is_passed(issued, now_s):
            self._look_at_deadline(issued, now_s)
            return False
        if issued.sequence is None or self.failure is not None:
            return True
        return self.calls.is_compared(issued.sequence)

    def _is_passed(self, issued: IssuedCall, now_s: float) -> bool:
        """Return whether a call's work has ended; give its events back then."""
        if issued.launches:
            issued.begun_s = issued.begun_s or now_s
            issued.is_passed = all(launch.is_over() for launch in issued.launches)
            return issued.is_passed
        if not issued.begun_s and self._is_reached(issued.start):
            issued.begun_s = now_s
        if not issued.begun_s or not self._is_reached(issued.end):
            return False
        issued.give_back(self.streams)
        issued.is_passed = True
        return True

    def _is_reached(self, event: int) -> bool:
        code = self.device.query_event(event)
        if code == self.device.not_ready:
            return False
        if code and self.failure is None:
            try:
                self.device.check(code, "go on: work on the GPU has failed")
            except BackendError as error:
                self.give_up(Abort.BACKEND, self.group.rank, self._oldest_sequence(), error)
        return True  # after an error nothing more will come of it

    def _look_at_deadline(self, issued: IssuedCall, now_s: float) -> None:
        if self.failure is None and issued.begun_s and now_s - issued.begun_s > issued.timeout_s:
            self._end_late(issued, issued.timeout_s)

    def _end_late(self, issued: IssuedCall, waited_s: float) -> None:
        """Give up for a call that has taken too long."""
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
        """Break the communicator for all ranks, and on this GPU."""
        if self.failure is not None:
            return
        self.group.abort(code, rank, self.calls.sequence if sequence is None else sequence)
        self._note_abort(error, waited_s)

    def _note_abort(
        self, error: BaseException | None = None, waited_s: float | None = None
    ) -> None:
        """Keep why the communicator is broken, and end what hangs on this GPU."""
        own = error if isinstance(error, GpucollError) else None
        self.failure = self.group.fail(own or self.group.abort_error(waited_s))
        self.failed_at_s = time.monotonic()
        self._set_gone(Gone.YES)
        self._abort_library()

    def end(self, reason: GpucollError | None = None) -> None:
        """Note that everything is let go of; what is not known to have succeeded never will be.

        Without the lock where a thread that hangs has it. `reason` says why calls under way were
        not waited for.
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
        """Wait until a call has succeeded; by default all that were issued. Raise what went wrong.

        `others_s` is how long one whose part here is over may wait for other ranks to make it, in
        seconds; default: the communicator's deadline. `is_last`: what has begun and has not ended
        after `timeout_s` is given up, as by its own deadline.

        Work that does not even start, because something before it on the stream does not end, is a
        DeadlineError that breaks nothing.
        """
        limit_s = self.group.timeout_s if timeout_s is None else timeout_s
        begun_s, pause_s = time.monotonic(), PAUSES_S[0]
        while True:
            self.look()
            if self.is_over and issued is not None and issued.is_done:
                return  # whatever became of later ones
            self.raise_failure()
            if issued.is_done if issued is not None else not self.is_busy:
                return
            oldest = issued or next(iter(self.in_flight.heads), None)
            has_begun = oldest is None or oldest.begun_s
            waited_s = time.monotonic() - begun_s
            is_late = waited_s > limit_s
            if (timeout_s is None or is_last) and (oldest is None or oldest.is_passed):
                # This rank's part is over: only another rank's call is waited for.
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
