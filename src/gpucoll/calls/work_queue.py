"""The asynchronous calls of one communicator, in the order in which they were started.

Most are in the group's compiled queue (`StartedCalls`): a thread that waits runs them, or the
process's compiled thread does. A call that needs Python in its middle (exchanged counts,
compression, objects), and every call behind it, waits in this queue. A thread that waits runs it,
or a thread of Python's, which exists from the first such call on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from gpucoll.backends.protocol import PreparedCall
from gpucoll.calls.started_works import Endings, StartedWorks
from gpucoll.calls.work import Work
from gpucoll.errors import DeadlineError, GpucollError, StateError
from gpucoll.group.in_one_piece import give_up
from gpucoll.group.protocol import ENDING_S, Group, StartedCalls
from gpucoll.wording import rank_of

_SLICE_S, _SHORTEST_PAUSE_S = 0.02, 0.0001
_ASKING_S = 0.05
_LINGER_S = 1.0
"""Time for which the thread waits for more calls. The thread keeps the queue alive, and the frames
of a failure keep everything else: a communicator that was dropped is collected after it ends."""
_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


class _Hold:
    """A context that holds calls back. Not a generator, because every call of Python's has one."""

    __slots__ = ("_queue", "caller")

    def __init__(self, queue: WorkQueue, caller: int) -> None:
        self._queue = queue
        self.caller = caller
        """The thread that makes a blocking call meanwhile; 0 if none does."""

    def __enter__(self) -> None:
        try:
            self._queue.take_hold(self)
        except BaseException:  # Ctrl-C
            self._queue.let_hold_go(self)
            raise

    def __exit__(self, *_: object) -> None:
        self._queue.let_hold_go(self)


class WorkQueue:
    """Runs calls in the order started.

    Parameters
    ----------
    group : Group
        The ranks.
    """

    def __init__(self, group: Group) -> None:
        self.ends_process = False
        """Whether a failure that was never inspected makes the program's exit code 1."""
        self._group = group
        self._process = os.getpid()
        self._endings = Endings(group)
        self._started = StartedWorks(group, self._endings)
        self._works = self._started.by_number
        """The works of the compiled queue."""
        self._wait: Callable[[int], int] = _not_yet
        self._waiting: deque[tuple[Work[Any], Callable[[], None]]] = deque()
        """Calls that run after those. The first may be running."""
        self._begun: Work[Any] | None = None
        """The call that runs, or that an interrupt has stopped before its end."""
        self._asked, self._asked_at_s = 0, 0.0
        """The next call when a query first found that a call had not ended; and that time."""
        self._watched: set[Work[Any]] = set()
        self._lock = threading.RLock()
        """Guards all of these, except calls that compiled code starts by itself.

        The condition is not entered: entering is Python code, and an interrupt in it can leave the
        lock held.
        """
        self._changed = threading.Condition(self._lock)
        self._turn = threading.Lock()
        """Held by the thread that runs the calls waiting here."""
        self._holders: set[_Hold] = set()
        self._thread: threading.Thread | None = None
        self._is_served = False
        """Whether the thread will look for more work."""
        self._is_stopping = False
        _queues.add(self)

    @property
    def who(self) -> str:
        """This rank, as errors name it."""
        return rank_of(self._group.rank, self._group.world_size)

    # --- starting ---------------------------------------------------------------------------------

    def begin_compiled(self) -> StartedCalls:
        """Return the group's compiled queue, made when it is first needed."""
        if (queue := self._started.queue) is None:
            with self._lock:
                queue = self._group.started_calls()
                self._wait = queue.wait
                self._started.queue = queue
        return queue

    def note_started(self, number: int, name: str, result: object, keep: object) -> Work[object]:
        """Return the Work of a call that a compiled entry has started."""
        work: Work[Any] = Work(self, name, None, result, keep)
        self._started.note(number, work)
        return work

    def start(
        self,
        call: PreparedCall,
        name: str,
        finish: Callable[[], object] | None,
        timeout_s: float | None,
    ) -> Work[object]:
        """Start a prepared call."""
        work: Work[Any] = Work(self, name, finish, keep=call)
        try:
            self._settle_ended()  # makes room in the compiled queue
            with self._lock:
                is_next = not self._waiting and not self._holders
                if is_next and (number := call.start(self.begin_compiled(), timeout_s)):
                    self._started.note(number, work)
                    return work
                self._append(work, lambda: call.run(timeout_s))
        except BaseException as error:
            self.note_lost(name, None, call, error)
            raise
        return work

    def note_lost(self, name: str, result: object, keep: object, error: BaseException) -> None:
        """Keep the arrays of a call if `error`, an interrupt, came before the call was noted.

        The program does not have its Work, so its arrays would be released while compiled code
        still writes to them. If no call was started here, the other ranks start it nevertheless:
        the communicator is given up.
        """
        lost = self._started.lost()
        for number in lost:
            self.note_started(number, name, result, keep)
        if not lost and not isinstance(error, Exception):
            give_up(self._group, error)

    def submit(
        self, task: Callable[[], None], name: str, finish: Callable[[], object] | None = None
    ) -> Work[object]:
        """Queue a task that Python must run; return its Work."""
        work: Work[Any] = Work(self, name, finish)
        with self._lock:
            self._append(work, task)
        return work

    def _append(self, work: Work[object], task: Callable[[], None]) -> None:
        self._start_thread()  # if this fails, nothing is queued
        self._hold(1)
        self._waiting.append((work, task))
        self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not ended, or its end was not noted yet."""
        return bool(self._works or self._waiting)

    def held(self) -> _Hold:
        """Return a context in which calls that nobody waits for are started but held back."""
        return _Hold(self, 0)

    def held_for_call(self) -> _Hold:
        """Return a context in which this thread makes a blocking call: no other thread runs one."""
        return _Hold(self, threading.get_ident())

    def take_hold(self, hold: _Hold) -> None:
        """Hold calls back until `let_hold_go`."""
        self._holders.add(hold)
        with self._lock:
            self._hold()

    def let_hold_go(self, hold: _Hold) -> None:
        """Let calls run again, unless another context still holds them back."""
        self._holders.discard(hold)  # first, and in one step: an interrupt may come after it
        with self._lock:
            self._hold()
            self._changed.notify_all()

    def _hold(self, n_more: int = 0) -> None:
        """Tell compiled entries whether to leave calls to this queue; repeated at every change."""
        self._group.hold(len(self._holders) + len(self._waiting) + n_more)

    # --- running ----------------------------------------------------------------------------------

    def run_until(self, work: Work[object]) -> None:
        """Run calls until this one has ended, or until another thread has run it.

        It needs no deadline of its own: each call that runs has one, and a call that can never run
        ends with the group.
        """
        number = work.number
        if number and not self._wait(number):  # it has succeeded and was reaped
            if work._finish is None:
                work._keep = None
                work._is_done = True
            else:
                self._end(work)
            self._started.forget(work)
            if work._callbacks is not None:
                self._told(work)
            return
        self._check_process(work)
        while not work._is_done:
            if number:
                self._advance(number)
            else:
                self._run_next_or_sleep(work)

    def _advance(self, number: int) -> None:
        """Run calls until this one has ended or a call has failed; then settle the group."""
        self._wait(number)
        self._settle_ended()
        if number in self._works:
            self._settle_group()
            time.sleep(0)  # another thread runs it, or has just started a call before it

    def _settle_group(self) -> None:
        """After a failed call: agree with other ranks where to continue, or end pending calls."""
        started = self.begin_compiled()
        self._make_room(started)
        if not self._group.needs_settling or not started.settle():
            return
        self._settle_ended()  # note how calls ended before the rest ends with the group
        if (error := self._endings.raised_by(self._group.check_usable)) is None:
            return
        is_broken = self._group.failure is not None or self._group.is_closed
        if not is_broken or not self._fail_all(error):
            raise error  # another thread is in a call

    def _make_room(self, started: StartedCalls) -> None:
        """Let a call that found no memory, and has not begun, reserve more; or end it."""
        with self._lock:
            number = started.without_room()
            if (work := self._works.get(number)) is None:
                return
            try:
                started.make_room(number)
            except GpucollError as error:
                self._end(work, error)
        self._settle_ended()

    def _settle_ended(self) -> None:
        """Note how calls of the compiled queue have ended, and forget their works."""
        with self._lock:
            told = self._started.settle()
        for work in told:
            self._told(work)

    def _end(self, work: Work[object], error: BaseException | None = None) -> None:
        """Note how a call has ended, once; keep its failure for `raise_unseen`."""
        with self._lock:
            self._endings.end(work, error)

    def forget(self) -> None:
        """Release pending calls: the group is closed, and nothing runs them."""
        self._started.let_go()
        _queues.discard(self)  # otherwise a weakref callback might swallow a Ctrl-C

    def _run_next_or_sleep(self, work: Work[object]) -> None:
        if self._turn.locked() or self._is_in_others_call():
            with self._lock:
                if not work._is_done and (self._turn.locked() or self._is_in_others_call()):
                    self._changed.wait(_SLICE_S)
            return
        with self._turn:  # not acquire() and try: an interrupt between them would leave it locked
            if work._is_done:
                return
            ended = self._run_next()
        if ended is not None:
            self._told(ended)

    @property
    def _is_over(self) -> bool:
        """Whether every call raises why it cannot run: nothing is waited for any more."""
        return self._group.failure is not None or self._group.is_closed

    def _is_in_others_call(self) -> bool:
        """Return whether another thread is in a blocking call of Python's, so that none may run.

        That call has waited for all calls appended before it. Whoever runs one of those finds the
        turn taken, or is that thread.
        """
        here = threading.get_ident()
        callers = [hold.caller for hold in list(self._holders)]
        return any(caller not in (0, here) for caller in callers) and not self._is_over

    def _wait_for_entries(self) -> None:
        """Wait until no compiled entry of another thread is in a blocking call.

        While calls wait here, entries begin no other, so this ends.
        """
        pause_s = _SHORTEST_PAUSE_S
        while self._waiting and self._group.is_in_collective and not self._is_over:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _SLICE_S)

    def _run_next(self) -> Work[object] | None:
        """Run the next call that waits here, after all calls of compiled code; holds the turn.

        Returns its Work, for `_told`; None if none can run now. A call that an interrupt stopped
        before its end breaks the communicator and is not run again, because it may have taken
        place.
        """
        while last := max(self._works, default=0):
            self._advance(last)
        self._wait_for_entries()
        with self._lock:
            if not self._waiting or self._is_in_others_call():
                return None
            work, task = self._waiting[0]
            was_begun, self._begun = self._begun is work, work
        error: BaseException | None = self._interruption() if was_begun else None
        try:
            if error is None:
                task()
        except Exception as raised:
            error = raised
        except BaseException as raised:
            if threading.current_thread() is not self._thread:  # Ctrl-C: for the thread that waits
                error, work._was_seen = self._interruption(), True
                raise
            error = raised
        finally:
            del task
            self._end(work, error)
            with self._lock:
                if self._waiting and self._waiting[0][0] is work:
                    self._waiting.popleft()
                    self._hold()
                self._begun = None
                self._changed.notify_all()
        return work

    def _interruption(self) -> GpucollError:
        """Give up the communicator because a call may or may not have run; return the error."""
        give_up(self._group, KeyboardInterrupt())
        error = self._endings.raised_by(self._group.raise_if_aborted)
        return error or self._group.abort_error()

    def _fail_all(self, error: BaseException) -> bool:
        """End all pending calls, because the communicator is broken; return whether this succeeded.

        It fails if a running call does not end: its arrays may not be released.
        """
        if not self._group.end_calls():
            return False
        with self._lock:
            pending = self._pending()  # first: a call that is noted later may have succeeded
            told = self._started.settle()
            for work in pending:
                self._end(work, error)
                self._started.forget(work)
            self._waiting = deque(item for item in self._waiting if not item[0]._is_done)
            self._hold()
            self._changed.notify_all()
        for work in (*told, *pending):
            self._told(work)
        return True

    # --- looking, and waiting for a while ---------------------------------------------------------

    def poll(self, work: Work[object]) -> bool:
        """Return whether a call has ended. Does not wait."""
        if work.number and not work._is_done:
            self._check_process(work)
            if self.begin_compiled().poll(work.number, 0):
                self._settle_ended()
            elif self._group.needs_settling and not self._is_stopping:
                self.watch(work)  # settling may wait for other ranks
            elif self._group.needs_settling:
                self._settle_group()
            elif self._is_asked_in_vain():
                self._poll_wanted(work)
        return work._is_done

    def _is_asked_in_vain(self) -> bool:
        """Return whether the next call has not ended for a while since the first query.

        A query completes calls that need no other rank, but only a thread that runs a call notices
        deadlines and lost ranks. After a while the queue's thread therefore takes over.
        """
        following, now_s = next(iter(self._works), 0), time.monotonic()
        if following != self._asked:
            self._asked, self._asked_at_s = following, now_s
        return now_s - self._asked_at_s > _ASKING_S

    def sleep_until(self, work: Work[object], limit_s: float) -> bool:
        """Wait at most `limit_s` for a call that others run; return whether it has ended."""
        self._check_process(work)
        until = time.monotonic() + limit_s
        while not work._is_done:
            left_s = min(until - time.monotonic(), _SLICE_S)
            if not work.number:
                with self._lock:
                    if not work._is_done and left_s > 0:
                        self._changed.wait(left_s)
            elif self._poll_wanted(work):
                continue
            elif left_s > 0:
                self.begin_compiled().sleep(work.number, int(left_s * 1e9))
            if left_s <= 0:
                return work._is_done
        return True

    def _poll_wanted(self, work: Work[object]) -> bool:
        """Ask the compiled thread to run a call; return whether it has ended."""
        started = self.begin_compiled()
        if not started.begin_serving():
            self._have_run(work)
            return work._is_done
        has_ended = started.poll(work.number, 1)
        self._settle_ended()
        if not has_ended:
            self._settle_group()
        return work._is_done

    def _have_run(self, work: Work[object]) -> None:
        """Run a call in Python's thread: the compiled thread has too many queues."""
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError):  # the process can start no more threads
                self.watch(work)
                return
        self.run_until(work)

    def _check_process(self, work: Work[object]) -> None:
        if os.getpid() != self._process:
            raise StateError(f"{work._name} belongs to the process that this one was forked from")

    # --- the end of a call ------------------------------------------------------------------------

    def _told(self, work: Work[object]) -> None:
        """Run the callbacks of a call that has ended, without any lock; may be repeated."""
        if work in self._watched:
            with self._lock:
                self._watched.discard(work)
        if work._callbacks is not None:
            work.call_back()

    def watch(self, work: Work[object]) -> None:
        """Let Python's thread find the end of a call."""
        with self._lock:
            if not work._is_done:
                self._start_thread()
                self._watched.add(work)
                self._changed.notify_all()

    def raise_unseen(self) -> None:
        """Raise the first failure that was never inspected; forget the others."""
        self._settle_ended()
        with self._lock:
            unseen = self._endings.take_unseen()
        if unseen is not None:
            unseen.wait()

    # --- all of them ------------------------------------------------------------------------------

    def end_unwaited(self, timeout_s: float) -> None:
        """At the program's end, wait for calls that nothing waits for; raise a failure."""
        if self.is_busy:
            self.stop(timeout_s)
        self.raise_unseen()

    def drain(self) -> None:
        """Wait until all calls started earlier have ended, well or not."""
        if self._works or self._waiting:
            self._settle_ended()
            for work in self._pending():
                self.run_until(work)

    def _pending(self) -> list[Work[object]]:
        with self._lock:
            return [*self._works.values(), *(work for work, _ in self._waiting)]

    def stop(self, timeout_s: float) -> None:
        """Wait until every call has ended; otherwise give them up and raise DeadlineError."""
        until = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
        for work in self._pending():
            if not self.sleep_until(work, max(until - time.monotonic(), 0.0)):
                n_left = len(self._pending())
                self._give_up()
                raise DeadlineError(f"{n_left} asynchronous calls had not ended at close")
        if self._started.queue is not None:
            self._started.queue.settle()

    def _give_up(self) -> None:
        """End, on all ranks, the calls that have not ended."""
        self._group.abort()
        error = self._endings.raised_by(self._group.raise_if_aborted)
        self._fail_all(error or self._group.abort_error())

    def end(self) -> None:
        """End the thread and the calls that Python runs: nothing then uses the shared memory.

        Waits for a slice. If a thread is in a call that does not notice the end within `ENDING_S`,
        the memory is kept: see `Group.is_in_use`.
        """
        if os.getpid() != self._process:
            return
        if self._waiting:
            self._give_up()
        with self._lock:
            self._is_stopping = True
            self._watched.clear()
            self._changed.notify_all()
        if self._turn.acquire(timeout=ENDING_S):  # no thread runs a call
            self._turn.release()
        else:
            self._group.is_in_use = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(ENDING_S)

    def let_go(self) -> None:
        """End the thread after every call has ended, without waiting for it."""
        with self._lock:
            self._is_stopping = True
            if self.is_busy and os.getpid() == self._process:
                self._start_thread()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        """Start the thread unless it runs; the lock is held."""
        if not self._is_served:
            thread = threading.Thread(target=self._serve, name="gpucoll", daemon=True)
            thread.start()
            self._thread, self._is_served = thread, True

    def _serve(self) -> None:
        """Run the calls that wait here, and find the end of watched works: Python's thread."""
        while True:
            with self._lock:
                is_needed = self._changed.wait_for(self._has_something_to_do, _LINGER_S)
                work = next(filter(_is_watchable, self._watched), None)
                is_idle = not self._waiting and work is None
                if is_idle and not (is_needed and self._works):
                    self._is_served = False
                    return
                if not is_needed:
                    continue  # the waiting calls are held back
                is_held = bool(self._holders)
            try:
                self._serve_once(work, is_held)
            except GpucollError:  # another thread is in a call
                time.sleep(_SLICE_S)
            del work  # from now on only the user keeps its result

    def _serve_once(self, work: Work[object] | None, is_held: bool) -> None:
        if work is not None:
            if self.sleep_until(work, _SLICE_S):
                self._told(work)  # the thread that found its end may have been interrupted
        elif self._waiting and not is_held:
            with self._turn:
                ended = self._run_next()
            if ended is not None:
                self._told(ended)
        else:
            self.drain()

    def _has_something_to_do(self) -> bool:
        if self._is_stopping or any(map(_is_watchable, self._watched)):
            return True
        return bool(self._waiting) and not self._holders


def _is_watchable(work: Work[object]) -> bool:
    """Return whether a thread must look for a call's end, or has found it."""
    return bool(work.number) or work._is_done


def open_queues() -> list[WorkQueue]:
    """Return the queues of this process whose communicators are not closed."""
    here = os.getpid()
    return [each for each in _queues if each._process == here and not each._group.is_closed]


def _not_yet(_number: int) -> int:
    raise AssertionError("no call has been started")


def _forget_in_child() -> None:
    """Let a forked child drop what it cannot use: a thread of the parent's may hold the lock."""
    for queue in list(_queues):
        queue._lock = threading.RLock()
        queue._changed = threading.Condition(queue._lock)
        queue._turn = threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
