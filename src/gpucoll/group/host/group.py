"""The group of the ranks of one host, around one segment.

A `HostGroup` runs call blocks through compiled loops and turns their statuses into errors that
explain what happened. Backends add loops; `group.host.channel` adds objects.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpucoll import config
from gpucoll.entries import collectives
from gpucoll.entries.collectives import LEAST_SLICE_S, SLICE_S
from gpucoll.errors import GpucollError, StateError
from gpucoll.finalizers import is_first, leave
from gpucoll.group.host import binding, diagnosis, recovery
from gpucoll.group.host.context import new_context
from gpucoll.group.host.enqueued import EnqueuedCalls
from gpucoll.group.host.members import Members
from gpucoll.group.host.progress import StartedCalls, hold_started
from gpucoll.group.host.records import difference, last_completed
from gpucoll.group.host.segment_room import make_room
from gpucoll.group.protocol import ENDING_S
from gpucoll.kernels.cpu.builtins import METH_NOARGS, builtin, capsule
from gpucoll.rendezvous.held_signals import held_signals
from gpucoll.rendezvous.job import Job
from gpucoll.transport.shared import layout, ordering, room
from gpucoll.transport.shared.call_block import CallBlock
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.words import Call, Context, State, Status
from gpucoll.wording import another_thread

if TYPE_CHECKING:
    from gpucoll.group.survivors import Agreement

_groups: weakref.WeakSet[HostGroup] = weakref.WeakSet()
_LOOKS = 5


class HostGroup:
    """This rank's part in the group.

    Parameters
    ----------
    members : Members
        What the ranks share; it belongs to the group from here on.
    timeout_s : float
        Default deadline of every wait, in seconds.
    waiting : (int, int)
        How often a wait spins, and yields, before it sleeps.
    """

    def __init__(self, members: Members, timeout_s: float, waiting: tuple[int, int]) -> None:
        self.members = members
        self.rank = members.rank
        self.world_size = members.world_size
        self.timeout_s = timeout_s
        self.keeps_order = False
        self.over_mpi: Any = None
        self.n_founders = 0
        self.object_key: bytes | None = None
        self.failure: GpucollError | None = None
        self.was_told = False
        """Whether `failure` has been raised to the program."""
        self.is_closed = False
        self._ending = threading.RLock()
        """Held while `is_closed` or `failure` is set: after that no other thread lets calls go
        on."""
        self._is_forked = False
        self._settling = threading.Lock()
        """Held by the thread that agrees with the other ranks on where to go on."""
        self._started: StartedCalls | None = None
        self._at_close: list[Callable[[], None]] = []
        self.error_elsewhere: Callable[[], GpucollError] = _no_elsewhere
        """Returns the error for the abort code `ELSEWHERE`."""
        self.lost_elsewhere: Callable[[int], GpucollError] = _no_rank_elsewhere
        """Returns the error for a lost rank of another host, by its place after this host's
        ranks."""
        self.standing_elsewhere: Callable[[list[int]], str] = _nothing_elsewhere
        """Describes where ranks of other hosts stand: sentences for errors, each after a full
        stop."""
        self.tell_elsewhere: Callable[[], None] = _nothing_to_tell
        """Makes other hosts hear of a failure, before this rank waits for a report on it."""
        self.is_in_use = False
        """Whether a thread that cannot be ended may still look at what is shared."""
        self.spans_hosts = False
        """Whether calls are parts of calls that span hosts, which no rank can end alone.

        The group of all hosts then owns this one, and closes it.
        """
        self._cpus = ""
        self._tables = np.zeros((2, self.world_size), np.int64)
        self._waiting = waiting
        self.context = new_context(members, self._tables, waiting)
        self.context_address: int = self.context.ctypes.data
        """Address of the context that compiled loops get."""
        self._beside: list[npt.NDArray[np.int64]] = []
        # Read at every call on GPU arrays: an item of a memoryview takes a tenth of NumPy's time.
        asked: Any = partial(getitem, self.context.data, int(Context.status))
        self.last_status: Callable[[], int] = asked
        """Returns the `Status` with which this rank's last compiled entry ended."""
        self._set_timeout(timeout_s)
        _groups.add(self)

    def context_beside(self) -> npt.NDArray[np.int64]:
        """Return one more context, for code that runs concurrently with collectives.

        It shares no words with the group's own context, and is taken out of use together with it.
        """
        context = new_context(self.members, self._tables, self._waiting)
        context[Context.timeout_ns] = self.context[Context.timeout_ns]
        context[Context.state] = State.NEEDS_PYTHON if self._is_over else State.IDLE
        self._beside.append(context)
        return context

    @property
    def _is_over(self) -> bool:
        return self._is_forked or self.is_closed or self.failure is not None

    def _set_timeout(self, timeout_s: float) -> None:
        self.context[Context.timeout_ns] = int(min(timeout_s, 1e9) * 1e9)
        self.context[Context.slice_ns] = int(max(min(SLICE_S, timeout_s), LEAST_SLICE_S) * 1e9)

    def reset_timeout(self) -> None:
        """Give calls the communicator's own deadline again."""
        self._set_timeout(self.timeout_s)

    # --- running calls ---------------------------------------------------------------------------

    def bind(self, call: CallBlock) -> None:
        """Make a call block one of this group's."""
        call.words[Call.context] = self.context_address

    def prepare(self, call: CallBlock, *, queued: bool = False) -> Callable[[], int]:
        """Return the built-in that runs `call` and returns its status.

        The caller keeps the block alive. A call with `queued` takes its turn in the queue of
        asynchronous calls. Any other does not run while that queue has calls to run.
        """
        self.bind(call)
        code = collectives.queued_call if queued else collectives.prepared_call
        run: Callable[[], int] = builtin(code.address, METH_NOARGS, capsule(call.words.ctypes.data))
        return run

    def run(self, call: CallBlock, timeout_s: float | None = None) -> None:
        """Run a call once, now or when its turn in the queue has come; raise what went wrong."""
        self.run_prepared(self.prepare(call, queued=True), timeout_s)

    def run_prepared(
        self,
        run: Callable[[], int],
        timeout_s: float | None = None,
        goes_on: tuple[Status, ...] = (),
    ) -> int:
        """Run a prepared call, with a deadline of its own if one is given.

        Returns its status: OK, or one of `goes_on`; raises for any other.
        """
        self.check_usable(timeout_s)
        if timeout_s is not None:
            self._set_timeout(timeout_s)
        try:
            while (status := run()) == Status.NO_ROOM:
                self.raise_for(status)
            if status != Status.OK and status not in goes_on:
                self.raise_for(status)
            return status
        finally:
            if timeout_s is not None:
                self._set_timeout(self.timeout_s)

    def check_usable(self, timeout_s: float | None = None) -> None:
        """Raise unless a call can run now; first settle what an earlier mismatch has left open."""
        if self._state == State.IDLE and self.failure is None:
            return
        self.check_open()
        with self._settling:
            # A call of another thread may end between any two looks, so only the state tells
            # whether there is something to settle.
            while self._state != State.NEEDS_PYTHON:
                has_ended = self._started is None or self._started.settle()
                if self._state == State.IDLE:
                    return
                if self.is_running or not has_ended:
                    self.raise_if_aborted()  # that call ends, too, in a moment
                    raise another_thread(self.rank, self.world_size)
            self.raise_if_aborted()
            recovery.recover(self, self.timeout_s if timeout_s is None else timeout_s)

    def check_alive(self) -> None:
        """Raise if this rank has closed the communicator, or is a forked child."""
        if self._is_forked or self.is_closed:
            self.check_open()

    def check_open(self) -> None:
        """Raise if this communicator can never run a call again."""
        if not self._is_over:
            return
        who = self.members.who(self.rank)
        if self._is_forked:
            raise StateError(
                f"this process was forked from {who}: a child cannot use its parent's "
                "communicator. Start ranks with gpucoll-run or gpucoll.launch instead of forking"
            )
        if self.is_closed:
            raise StateError(f"the communicator of {who} is closed")
        assert self.failure is not None
        self.was_told = True
        raise self.failure.with_traceback(None)  # or it would keep every caller's arrays

    def raise_for(self, status: int) -> None:
        """Raise what a compiled loop's status means.

        Returns after NO_ROOM if more memory was granted: the call can be made again. An entry
        leaves the call's own deadline in the context, from which messages read it; this restores
        the default.
        """
        try:
            if status == Status.NO_ROOM:
                self.go_on()  # the call had not begun
                make_room(self.context)
                return
            if status == Status.NOT_RUN:
                self.check_usable()
                raise StateError("the communicator was used while it was in another call")
            if status == Status.MISMATCH:
                recovery.announce(self)
            self.raise_if_aborted()
            raise recovery.answer(self)
        finally:
            self._set_timeout(self.timeout_s)

    def take_memory(self, offset: int, size_bytes: int) -> None:
        """Take memory for a part of the segment that is used for the first time."""
        address = self.members.at(offset)
        while room.reserve_part.ctypes(self.context_address, address, size_bytes):
            make_room(self.context)

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child's copy, which cannot be used."""
        return self._is_forked

    @property
    def is_running(self) -> bool:
        """Whether a Python thread is running a call at this moment."""
        for _ in range(_LOOKS):
            if not self._is_busy() or (self._started is not None and self._started.is_running):
                return False
            if self._started is None:
                return True
            time.sleep(0.001)  # a thread that runs started calls sets its flag a moment late
        return True

    @property
    def is_in_collective(self) -> bool:
        """Whether compiled code is running a collective at this moment, in whatever thread."""
        return self._state == State.BUSY

    def _is_busy(self) -> bool:
        contexts = (self.context, *self._beside)
        return any(int(context[Context.state]) == State.BUSY for context in contexts)

    @property
    def is_aborted(self) -> bool:
        """Whether some rank has given the communicator up."""
        return bool(self.members.abort_word())

    @property
    def was_interrupted(self) -> bool:
        """Whether an interrupt in this rank's call has broken it, so that the program knows."""
        return self.members.abort_word() & 0xFFFFFFFF == Abort.INTERRUPTED | self.rank << 8

    @property
    def local_rank(self) -> int:
        """This rank's place among the ranks of its host."""
        return self.rank

    @property
    def here(self) -> int:
        """The number of this rank's host: always 0."""
        return 0

    @property
    def interface(self) -> str:
        """The network interface that links this host to others: none, so always empty."""
        return ""

    @property
    def path(self) -> int:
        """The `Path` that this rank's last call took."""
        return int(self.context[Context.path])

    @property
    def number(self) -> int:
        """The number of the last collective that this rank has begun."""
        return int(self.context[Context.sequence])

    @property
    def completed(self) -> int:
        """The number of the last collective that this rank has completed."""
        return last_completed(self.members, int(self.context[Context.sequence]))

    def agreement(self, timeout_s: float) -> Agreement:
        """Return this rank's part in the agreement on the survivors after losses."""
        from gpucoll.group.host.shrinking import HostAgreement

        return HostAgreement(self, timeout_s)

    def settle_growth(self, number: int, made: bool) -> bool:
        """Decide, once for all ranks, whether a growth is made; return which it is."""
        word = 2 * number + made
        while (found := self.members.load(layout.EVENT_GROWTH)) >> 1 != number:
            if self.members.compare_exchange(layout.EVENT_GROWTH, found, word) == found:
                return made
        return bool(found & 1)

    def enqueued_calls(self) -> EnqueuedCalls:
        """Return this rank's ring of calls on GPU arrays; take memory for all rings first."""
        self.take_enqueued_memory()
        return EnqueuedCalls(self.members, self.context)

    def take_enqueued_memory(self) -> None:
        """Take the memory for all ranks' rings of calls on GPU arrays."""
        place = self.members.layout
        self.take_memory(place.enqueued, place.mailboxes - place.enqueued)

    # --- who is still there ----------------------------------------------------------------------

    def ended_ranks(self) -> list[int]:
        """Return the ranks whose process has ended."""
        return self.members.ended_ranks()

    def has_closed(self, rank: int) -> bool:
        """Return whether a rank has closed the communicator."""
        return self.members.has_closed(rank)

    def gone_ranks(self) -> list[int]:
        """Return the ranks that will never take part again: ended or closed."""
        return self.members.gone_ranks()

    # --- asynchronous calls ----------------------------------------------------------------------

    def started_calls(self) -> StartedCalls:
        """Return the queue in which compiled code runs started calls; the first call makes it."""
        if self._started is None:
            make_more = partial(make_room, self.context)
            self._started = StartedCalls(self.context, self.timeout_s, make_more)
        with self._ending:
            if not self.is_closed and not self._is_forked:  # nothing would take it from the thread
                self._started.serve()
        return self._started

    def hold(self, n_reasons: int) -> None:
        """Make compiled entries leave every call to Python while `n_reasons` is not 0."""
        hold_started(self.context_address, n_reasons)

    @property
    def needs_settling(self) -> bool:
        """Whether no call can run until `check_usable` has settled something, or ever again."""
        return self._state == State.NEEDS_PYTHON

    @property
    def _state(self) -> int:
        # Not NumPy's integer: when it is compared with an enum, NumPy looks up attributes of arrays
        # in the enum's class. Until Python 3.12 that runs Python code, and drops a
        # KeyboardInterrupt raised there.
        return int(self.context[Context.state])

    def go_on(self) -> None:
        """Let calls begin again, unless the group has been closed or has failed in the meantime."""
        with self._ending:
            if not self._is_over:
                self.context[Context.state] = State.IDLE

    # --- breaking --------------------------------------------------------------------------------

    def raise_if_aborted(self) -> None:
        """Raise, now and from now on, if the communicator has been given up."""
        if self.is_aborted:
            self.was_told = True
            raise self.fail(self.failure or self.abort_error())

    def abort_error(self, waited_s: float | None = None) -> GpucollError:
        """Return the error for why the communicator was given up.

        `waited_s` is how long this rank itself waited, if it gave up a call on GPU arrays.
        """
        return diagnosis.abort_error(self, self.members.abort_word(), waited_s)

    def fail(self, error: GpucollError) -> GpucollError:
        """Store the error that broke the communicator, and return it; later calls raise it."""
        with self._ending:
            is_new, self.failure = self.failure is None, error
        self._take_out_of_use()  # a running call keeps its state until it has ended
        self.members.arena.retire()
        if is_new:
            self.add_report(error)
        return error

    def add_report(self, error: GpucollError) -> None:
        """Append to an error of a call where the report on it is, if the user wants reports.

        One rank of the host writes the report, and the others wait until it is written. Takes no
        more than a few seconds.
        """
        if config.variable(config.REPORT_DIR):
            from gpucoll.group.host import report  # few programs need it

            self.tell_elsewhere()
            report.add(error, self.members, _all_members)

    def break_with(self, code: Abort, rank: int, why: str = "") -> None:
        """Give the communicator up for all ranks, unless a rank already has; raise the error.

        `why` is not used here: the rank itself has left its exception in the segment, if it had
        one.
        """
        self.abort(code, rank)
        self.raise_if_aborted()

    def abort(
        self, code: Abort = Abort.REQUESTED, rank: int | None = None, sequence: int | None = None
    ) -> None:
        """Give the communicator up for all ranks, unless a rank already has.

        The sequence number is by default that of this rank's last call.
        """
        if self._is_forked:
            self.check_open()
        if sequence is None:
            sequence = int(self.context[Context.sequence])
        number = difference(sequence, 0)  # it may be one beyond the last of 32 bits
        word = code | ((self.rank if rank is None else rank) << 8) | (number << 32)
        self.members.compare_exchange(layout.EVENT_ABORT, 0, word)

    # --- description, the end --------------------------------------------------------------------

    def bind_cpus(self) -> None:
        """Bind this process to CPUs of its own, if the ranks share enough of them."""
        self._cpus = binding.bind(self.members.allowed_cpus, self.rank)

    def meeting_of(
        self, ranks: Sequence[int], token: str, call: str, tell: Callable[[bytes], list[bytes]]
    ) -> Job:
        """Return the job in which this rank and others of the group meet anew."""
        if not ranks:
            return Job(0, 1, token, call)
        return Job(ranks.index(self.rank), len(ranks), token, call)

    def describe(self) -> dict[str, str]:
        """Return facts about the group for people to read: name -> sentence."""
        members = self.members
        try:
            taken = f"{members.segment_bytes / 2**20:.1f} MiB so far, of"
        except StateError:
            taken = "closed; had"
        return {
            "shared segment": f"{taken} at most {members.layout.size_bytes / 2**20:.1f} MiB for "
            f"{self.world_size} ranks",
            "CPUs": self._cpus or binding.describe(members.allowed_cpus, self.rank),
            "arena of this rank": f"{members.arena.used_bytes} bytes in use of "
            f"{members.arena.size_bytes} of address space",
        }

    def note_exception(self, error: BaseException) -> None:
        """Store the exception that takes this rank out of the group, for the others to read.

        It must be called before `close` or `abort`.
        """
        if not self.is_closed and not self._is_forked:
            self.members.write_reason(error)

    def close(self) -> None:
        """Report that this rank leaves the group, and release everything shared.

        A call that runs in another thread is given up. If it does not end, or if the group
        `is_in_use`, the memory stays until the process ends.
        """
        if self.is_closed or self._is_forked:
            return
        with held_signals():  # an interrupt in the middle would leave something open
            if is_first(self, "close"):
                self._let_go()

    def at_close(self, function: Callable[[], None]) -> None:
        """Register a function that is called before the shared memory is released.

        A forked child does not call it.
        """
        self._at_close.append(function)

    def _let_go(self) -> None:
        with self._ending:
            self.is_closed = True
        for function in self._at_close:
            function()
        _groups.discard(self)  # or the weak set's callback might swallow a Ctrl-C
        if not self.end_calls():
            self.is_in_use = True
        if self.is_aborted:
            self.members.arena.retire()
        words = self.members.status_words(self.rank)
        words[layout.STATUS_CLOSED_SEQUENCE // 8] = self.context[Context.sequence]
        self.members.store(self.members.status_offset(self.rank) + layout.STATUS_CLOSED, 1)
        if not self.is_in_use:
            self.members.close()

    def end_calls(self) -> bool:
        """Let no call begin, give up one that runs in another thread; return whether it has ended.

        It waits for the running call for `ENDING_S` at most.
        """
        if self._take_out_of_use():
            self.abort()
        started, until = self._started, time.monotonic() + ENDING_S
        if started is not None and not started.close():
            return False
        while self._take_out_of_use():
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return started is None or started.settle()

    def _take_out_of_use(self) -> bool:
        """Let no call begin; return whether one is running."""
        contexts = (self.context, *self._beside)
        places = [context.ctypes.data + 8 * Context.state for context in contexts]
        before = [
            ordering.compare_exchange(at, state, State.NEEDS_PYTHON)
            for at in places
            for state in (State.IDLE, State.TAKEN)
        ]
        return State.BUSY in before

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True) and not self._is_forked and not self.spans_hosts:
            leave(self.close)
            text = f"communicator of {self.members.who(self.rank)} was not closed"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def forget_in_child(self) -> None:
        """Make this unusable in a forked child, without touching anything shared."""
        self._is_forked = True
        self._ending = threading.RLock()
        for context in (self.context, *self._beside):
            context[Context.state] = State.NEEDS_PYTHON


def _all_members() -> list[Members]:
    return [each.members for each in list(_groups)]


def _no_elsewhere() -> GpucollError:
    raise AssertionError("the ranks of one host alone have nothing elsewhere")


def _no_rank_elsewhere(place: int) -> GpucollError:
    raise AssertionError(f"there is no rank {place}")


def _nothing_elsewhere(places: list[int]) -> str:
    return ""


def _nothing_to_tell() -> None:
    pass


def _after_fork() -> None:
    for group in list(_groups):
        group.forget_in_child()


os.register_at_fork(after_in_child=_after_fork)
