"""The asynchronous calls of one communicator, in the order in which they were started.

Most are in the group's compiled queue (`StartedCalls`): whoever waits runs them, or the process's
compiled thread does. A call that needs Python in its middle (exchanged counts, compression,
objects), and what comes behind one, waits here, and is run by whoever waits or by a thread of
Python's, which exists from the first such call on.
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
from gpucoll.calls.in_one_piece import give_up
from gpucoll.calls.started_works import Endings, StartedWorks
from gpucoll.calls.work import Work
from gpucoll.errors import DeadlineError, GpucollError, StateError
from gpucoll.group.protocol import ENDING_S, Group, StartedCalls
from gpucoll.wording import rank_of

_SLICE_S = 0.02
_ASKING_S = 0.05
_LINGER_S = 1.0
"""So long the thread waits for more. It keeps the queue, and with the frames of a failure all else:
a communicator that was dropped is collected when it has ended."""
_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


class _Hold:
    """A context in which what is started waits. No generator: each call of Python's has one."""

    __slots__ = ("_queue",)

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue

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
        """Whether a failure that nobody asks about makes the program's exit code 1."""
        self._group = group
        self._process = os.getpid()
        self._endings = Endings(group)
        self._started = StartedWorks(group, self._endings)
        self._works = self._started.by_number
        """Of the compiled queue."""
        self._wait: Callable[[int], int] = _not_yet
        self._waiting: deque[tuple[Work[Any], Callable[[], None]]] = deque()
        """Behind those; the first may be running."""
        self._begun: Work[Any] | None = None
        """The one that runs, or that an interrupt has kept from being run to its end."""
        self._asked, self._asked_at_s = 0, 0.0
        """Which call was the next one when somebody asked whether one had ended, and when first."""
        self._watched: set[Work[Any]] = set()
        self._lock = threading.RLock()
        """Guards all of these, but for what compiled code starts by itself.

        A condition is not entered: that is Python code, which an interrupt can leave locked.
        """
        self._changed = threading.Condition(self._lock)
        self._turn = threading.Lock()
        """Held by whoever runs what waits here."""
        self._holders: set[_Hold] = set()
        self._thread: threading.Thread | None = None
        self._is_served = False
        """Whether that thread goes on."""
        self._is_stopping = False
        _queues.add(self)

    @property
    def who(self) -> str:
        """This rank, as errors name it."""
        return rank_of(self._group.rank, self._group.world_size)

    # --- starting ---------------------------------------------------------------------------------

    def begin_compiled(self) -> StartedCalls:
        """Return the group's queue, made when it is first needed."""
        if (queue := self._started.queue) is None:
            with self._lock:
                queue = self._group.started_calls()
                self._wait = queue.wait
                self._started.queue = queue
        return queue

    def note_started(self, number: int, name: str, result: Any, keep: object) -> Work[Any]:
        """Return the Work of a call that a compiled entry has started."""
        work: Work[Any] = Work(self, name, None, result, keep)
        self._started.note(number, work)
        return work

    def start(
        self,
        call: PreparedCall,
        name: str,
        finish: Callable[[], Any] | None,
        timeout_s: float | None,
    ) -> Work[Any]:
        """Start a prepared call."""
        work: Work[Any] = Work(self, name, finish, keep=call)
        try:
            self._settle_ended()  # makes room
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

    def note_lost(self, name: str, result: Any, keep: object, error: BaseException) -> None:
        """Keep what was started where `error`, an interrupt, came before it was noted.

        Nobody has its Work, and its arrays would be let go of while compiled code still writes to
        them. Where nothing was started the other ranks start it: the communicator is given up.
        """
        lost = self._started.lost()
        for number in lost:
            self.note_started(number, name, result, keep)
        if not lost and not isinstance(error, Exception):
            give_up(self._group, error)

    def submit(
        self, task: Callable[[], None], name: str, finish: Callable[[], Any] | None = None
    ) -> Work[Any]:
        """Queue what Python has to run; return its Work."""
        work: Work[Any] = Work(self, name, finish)
        with self._lock:
            self._append(work, task)
        return work

    def _append(self, work: Work[Any], task: Callable[[], None]) -> None:
        self._start_thread()  # may fail: nothing is queued then
        self._hold(1)
        self._waiting.append((work, task))
        self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not ended, or its end was not noted yet."""
        return bool(self._works or self._waiting)

    def held(self) -> _Hold:
        """Return a context in which what other threads start waits here."""
        return _Hold(self)

    def take_hold(self, hold: _Hold) -> None:
        """Let what is started wait here until `let_hold_go`."""
        self._holders.add(hold)
        with self._lock:
            self._hold()

    def let_hold_go(self, hold: _Hold) -> None:
        """Let what is started begin again, unless somebody else holds it."""
        self._holders.discard(hold)  # first, and at once: an interrupt may come after it
        with self._lock:
            self._hold()
            self._changed.notify_all()

    def _hold(self, n_more: int = 0) -> None:
        """Tell compiled entries whether calls have to come here; said anew with every change."""
        self._group.hold(len(self._holders) + len(self._waiting) + n_more)

    # --- running ----------------------------------------------------------------------------------

    def run_until(self, work: Work[Any]) -> None:
        """Run calls until this one has ended, or return when another thread has run it.

        Without a deadline of its own: each call that is run has one, and a call that can never run
        ends with the group.
        """
        number = work.number
        if number and not self._wait(number):  # well, and it was reaped
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
        """Run calls until this one has ended, or one has failed; settle the group then."""
        self._wait(number)
        self._settle_ended()
        if number in self._works:
            self._settle_group()
            time.sleep(0)  # another thread runs it, or has just started one before it

    def _settle_group(self) -> None:
        """After a failed call: agree with the others on where to go on, or end what is pending."""
        started = self.begin_compiled()
        self._make_room(started)
        if not self._group.needs_settling or not started.settle():
            return
        self._settle_ended()  # how they did, before what is left ends with the group
        if (error := self._endings.raised_by(self._group.check_usable)) is None:
            return
        is_broken = self._group.failure is not None or self._group.is_closed
        if not is_broken or not self._fail_all(error):
            raise error  # another thread is in a call

    def _make_room(self, started: StartedCalls) -> None:
        """Let a call that has found no memory take more, or end it: it has not begun."""
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
        """Note how calls of the compiled queue have ended, and forget their Works."""
        with self._lock:
            told = self._started.settle()
        for work in told:
            self._told(work)

    def _end(self, work: Work[Any], error: BaseException | None = None) -> None:
        """Note how a call has ended, once; keep a failure for `raise_unseen`."""
        with self._lock:
            self._endings.end(work, error)

    def forget(self) -> None:
        """Keep what is pending no longer: the group is closed, and nobody runs it."""
        self._started.let_go()
        _queues.discard(self)  # or a callback at its end might swallow a Ctrl-C

    def _run_next_or_sleep(self, work: Work[Any]) -> None:
        if self._turn.locked():
            with self._lock:
                if not work._is_done and self._turn.locked():
                    self._changed.wait(_SLICE_S)
            return
        with self._turn:  # not acquire and try: an interrupt in between would leave it locked
            if work._is_done:
                return
            ended = self._run_next()
        if ended is not None:
            self._told(ended)

    def _run_next(self) -> Work[Any] | None:
        """Run the next call that waits here, behind all that compiled code runs; has the turn.

        Returns its Work, for `_told`. What an interrupt has kept from being run to its end breaks
        the communicator, and is not run again: it may have taken place.
        """
        while last := max(self._works, default=0):
            self._advance(last)
        with self._lock:
            if not self._waiting:
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
            if threading.current_thread() is not self._thread:  # Ctrl-C: for whoever runs this
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
        """Give the communicator up where a call may have taken place or not; return the error."""
        give_up(self._group, KeyboardInterrupt())
        error = self._endings.raised_by(self._group.raise_if_aborted)
        return error or self._group.abort_error()

    def _fail_all(self, error: BaseException) -> bool:
        """End everything that is pending: the communicator is broken; return whether that can be.

        It cannot where a call that runs does not end: its arrays may not be let go of.
        """
        if not self._group.end_calls():
            return False
        with self._lock:
            pending = self._pending()  # before the look: what is noted after it may have ended well
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

    def poll(self, work: Work[Any]) -> bool:
        """Return whether a call has ended. Does not wait."""
        if work.number and not work._is_done:
            self._check_process(work)
            if self.begin_compiled().poll(work.number, 0):
                self._settle_ended()
            elif self._group.needs_settling and not self._is_stopping:
                self.watch(work)  # to settle may be to wait for other ranks
            elif self._group.needs_settling:
                self._settle_group()
            elif self._is_asked_in_vain():
                self._poll_wanted(work)
        return work._is_done

    def _is_asked_in_vain(self) -> bool:
        """Return whether the next call has not ended since somebody first asked, a while ago.

        Who only asks finishes what needs nobody else. Deadlines and lost ranks are found by who
        runs a call: from then on the thread does.
        """
        following, now_s = next(iter(self._works), 0), time.monotonic()
        if following != self._asked:
            self._asked, self._asked_at_s = following, now_s
        return now_s - self._asked_at_s > _ASKING_S

    def sleep_until(self, work: Work[Any], limit_s: float) -> bool:
        """Wait for a call that others run, for so long at most; return whether it has ended."""
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

    def _poll_wanted(self, work: Work[Any]) -> bool:
        """Ask the thread to run a call; return whether it has ended."""
        started = self.begin_compiled()
        if not started.begin_serving():
            self._have_run(work)
            return work._is_done
        has_ended = started.poll(work.number, 1)
        self._settle_ended()
        if not has_ended:
            self._settle_group()
        return work._is_done

    def _have_run(self, work: Work[Any]) -> None:
        """Have Python's thread run what the compiled one cannot: there are too many queues."""
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError):  # of a process that can have no more threads
                self.watch(work)
                return
        self.run_until(work)

    def _check_process(self, work: Work[Any]) -> None:
        if os.getpid() != self._process:
            raise StateError(f"{work._name} belongs to the process that this one was forked from")

    # --- the end of a call ------------------------------------------------------------------------

    def _told(self, work: Work[Any]) -> None:
        """Call back when a call has ended, without any lock; may be repeated."""
        if work in self._watched:
            with self._lock:
                self._watched.discard(work)
        if work._callbacks is not None:
            work.call_back()

    def watch(self, work: Work[Any]) -> None:
        """Have the end of a call found by the thread of Python's."""
        with self._lock:
            if not work._is_done:
                self._start_thread()
                self._watched.add(work)
                self._changed.notify_all()

    def raise_unseen(self) -> None:
        """Raise the first failure that nobody has asked for; forget the others."""
        self._settle_ended()
        with self._lock:
            unseen = self._endings.take_unseen()
        if unseen is not None:
            unseen.wait()

    # --- all of them ------------------------------------------------------------------------------

    def end_unwaited(self, timeout_s: float) -> None:
        """Wait for what nobody waits for, as the program ends; raise the failure of a call."""
        if self.is_busy:
            self.stop(timeout_s)
        self.raise_unseen()

    def drain(self) -> None:
        """Wait until all that was started before has ended, well or not."""
        if self._works or self._waiting:
            self._settle_ended()
            for work in self._pending():
                self.run_until(work)

    def _pending(self) -> list[Work[Any]]:
        with self._lock:
            return [*self._works.values(), *(work for work, _ in self._waiting)]

    def stop(self, timeout_s: float) -> None:
        """Wait until every call has ended; DeadlineError, and they are given up, where not all."""
        until = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
        for work in self._pending():
            if not self.sleep_until(work, max(until - time.monotonic(), 0.0)):
                n_left = len(self._pending())
                self._give_up()
                raise DeadlineError(f"{n_left} asynchronous calls had not ended at close")
        if self._started.queue is not None:
            self._started.queue.settle()

    def _give_up(self) -> None:
        """End, on all ranks, what has not ended."""
        self._group.abort()
        error = self._endings.raised_by(self._group.raise_if_aborted)
        self._fail_all(error or self._group.abort_error())

    def end(self) -> None:
        """End the thread, and what Python runs: soon nothing of it looks at what is shared.

        Waits for a slice of waiting. Who is in a call that does not notice the end within
        `ENDING_S` keeps the memory: see `Group.is_in_use`.
        """
        if os.getpid() != self._process:
            return
        if self._waiting:
            self._give_up()
        with self._lock:
            self._is_stopping = True
            self._watched.clear()
            self._changed.notify_all()
        if self._turn.acquire(timeout=ENDING_S):  # nobody runs anything, in whichever thread
            self._turn.release()
        else:
            self._group.is_in_use = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(ENDING_S)

    def let_go(self) -> None:
        """End the thread when every call has ended, without waiting for it."""
        with self._lock:
            self._is_stopping = True
            if self.is_busy and os.getpid() == self._process:
                self._start_thread()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        """Start the thread unless there is one; the lock is held."""
        if not self._is_served:
            thread = threading.Thread(target=self._serve, name="gpucoll", daemon=True)
            thread.start()
            self._thread, self._is_served = thread, True

    def _serve(self) -> None:
        """Run what waits here, and find the end of what is watched: the thread of Python's."""
        while True:
            with self._lock:
                is_needed = self._changed.wait_for(self._has_something_to_do, _LINGER_S)
                work = next(filter(_is_watchable, self._watched), None)
                is_idle = not self._waiting and work is None
                if is_idle and not (is_needed and self._works):
                    self._is_served = False
                    return
                if not is_needed:
                    continue  # what waits is held
                is_held = bool(self._holders)
            try:
                self._serve_once(work, is_held)
            except GpucollError:  # another thread is in a call
                time.sleep(_SLICE_S)
            del work  # its result belongs to the user alone now

    def _serve_once(self, work: Work[Any] | None, is_held: bool) -> None:
        if work is not None:
            if self.sleep_until(work, _SLICE_S):
                self._told(work)  # whoever has found that may have been interrupted
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


def _is_watchable(work: Work[Any]) -> bool:
    """Return whether somebody has to look for a call's end, or has found it."""
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
