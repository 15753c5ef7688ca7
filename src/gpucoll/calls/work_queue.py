"""The asynchronous calls of one communicator, in the order in which they were started.

Most are in the group's compiled queue (`StartedCalls`): whoever waits runs them, or the process's
compiled thread does. A call that needs Python in its middle (exchanged counts, compression,
objects), and what comes behind one, waits here, and is run by whoever waits or by a thread of
Python's, which exists from the first such call on.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from gpucoll.backends.protocol import PreparedCall
from gpucoll.calls.in_one_piece import give_up
from gpucoll.calls.work import Work
from gpucoll.errors import DeadlineError, GpucollError, StateError
from gpucoll.group.protocol import Group, StartedCalls
from gpucoll.wording import rank_of

_SLICE_S = 0.02
_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()
_busy: set[WorkQueue] = set()
"""Those with calls that the compiled thread may run: nothing else may keep their arrays alive."""


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
        self._started: StartedCalls | None = None
        self._wait: Callable[[int], int] = _not_yet
        self._works: dict[int, Work[Any]] = {}
        """Of the compiled queue, by number: what is in it keeps its arrays alive."""
        self._waiting: deque[tuple[Work[Any], Callable[[], None]]] = deque()
        """Behind those; the first may be running."""
        self._failed: list[Work[Any]] = []
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
        self._is_stopping = False
        _queues.add(self)

    @property
    def who(self) -> str:
        """This rank, as errors name it."""
        return rank_of(self._group.rank, self._group.world_size)

    # --- starting ---------------------------------------------------------------------------------

    def begin_compiled(self) -> StartedCalls:
        """Return the group's queue, made when it is first needed."""
        if self._started is None:
            with self._lock:
                if self._started is None:
                    started = self._group.started_calls()
                    self._wait = started.wait
                    self._started = started
        return self._started

    def note_started(self, number: int, name: str, result: Any, keep: object) -> Work[Any]:
        """Return the Work of a call that a compiled entry has started."""
        work: Work[Any] = Work(self, name, None, result, keep)
        work.number = number
        self._works[number] = work
        if len(self._works) == 1:
            _busy.add(self)
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
                    work.number = number
                    self._works[number] = work
                    _busy.add(self)
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
        lost = []
        if self._started is not None:
            lost = [number for number in self._started.started() if number not in self._works]
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

    @property
    def runs_python(self) -> bool:
        """Whether a thread of Python's may be in one of these calls."""
        return bool(self._waiting)

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
        """Run calls until this one has ended, or return when another thread has run it."""
        number = work.number
        if number and not self._wait(number):  # well, and as the next that was to be noted
            del self._works[number]
            if not self._works:
                self._note_idle()
            if work._finish is None:
                work._keep = None
                work._is_done = True
            else:
                work.end()
            if work._callbacks is not None or work._error is not None:
                self._told(work)
            return
        self._check_process(work)
        while not work._is_done:
            if number:
                self._advance(number)
            else:
                self._run_next_or_sleep(work)

    def _advance(self, number: int) -> None:
        """Run calls until one has ended, and settle what has become of the group."""
        if not self._wait(number):
            work = self._works.pop(number)
            self._note_idle()
            work.end()
            self._told(work)
            return
        self._settle_ended()
        if number in self._works:
            self._settle_group()
            time.sleep(0)

    def _settle_group(self) -> None:
        """After a failed call: agree with the others on where to go on, or end what is pending."""
        started = self.begin_compiled()
        self._make_room(started)
        if not self._group.needs_settling:
            return
        started.settle()  # or memory that a call still writes to might be let go of
        self._settle_ended()  # the call that failed is answered before all go on
        try:
            self._group.check_usable()
        except BaseException as error:
            group = self._group
            if isinstance(error, GpucollError) and (group.failure is not None or group.is_closed):
                self._fail_all(error)
                return
            raise

    def _make_room(self, started: StartedCalls) -> None:
        """Let a call that has found no memory take more, or end it: it has not begun."""
        with self._lock:
            if not (number := started.without_room()):
                return
            try:
                started.make_room(number)
            except GpucollError as error:
                self._works[number].end(error)
        self._settle_ended()

    def _settle_ended(self) -> None:
        """Note how the calls of the compiled queue that have ended did so, in order."""
        if self._started is None:
            return
        ended = []
        with self._lock:
            for number in self._started.ended():
                status = self._started.status_of(number)
                if not self._started.reap(number):
                    continue  # another thread does
                while (work := self._works.pop(number, None)) is None:
                    time.sleep(0)  # another thread has just started it, and notes it now
                if not work._is_done:
                    work.end(self._error_of(status))
                ended.append(work)
        if ended:
            self._note_idle()
        for work in ended:
            self._told(work)

    def _note_idle(self) -> None:
        """Let this go with the communicator, if compiled code has nothing to do."""
        if not self._works:
            _busy.discard(self)
            if self._works:  # another thread has started one just now
                _busy.add(self)

    def forget(self) -> None:
        """Keep what is pending no longer: the group is closed, and nobody runs it."""
        _busy.discard(self)
        _queues.discard(self)  # or a callback at its end might swallow a Ctrl-C

    def _error_of(self, status: int) -> BaseException | None:
        if not status:
            return None
        try:
            self._group.raise_for(status)
        except GpucollError as error:
            return error
        return None

    def _run_next_or_sleep(self, work: Work[Any]) -> None:
        if not self._turn.acquire(blocking=False):
            with self._lock:
                if not work._is_done and self._turn.locked():
                    self._changed.wait(_SLICE_S)
            return
        try:
            if not work._is_done:
                self._run_next()
        finally:
            self._turn.release()

    def _run_next(self) -> None:
        """Run the next call that waits here, behind all that compiled code runs; has the turn."""
        while self._works:
            last = max(self._works)
            self._advance(last)
        with self._lock:
            if not self._waiting:
                return
            work, task = self._waiting[0]
        error = None
        try:
            task()
        except BaseException as raised:
            error = raised
        work.end(error)
        del task
        with self._lock:
            if self._waiting and self._waiting[0][0] is work:
                self._waiting.popleft()
                self._hold()
            self._changed.notify_all()
        self._told(work)
        if error is not None and not isinstance(error, Exception):
            give_up(self._group, error)
            raise error  # Ctrl-C is for whoever runs this, too

    def _fail_all(self, error: BaseException) -> None:
        """End everything that is pending: the communicator is broken."""
        with self._lock:
            works = self._pending()
            self._works.clear()
            self._waiting.clear()
            self._hold()
            self._note_idle()
            for work in works:
                if not work._is_done:
                    work.end(error)
            self._changed.notify_all()
        for work in works:
            self._told(work)

    # --- looking, and waiting for a while ---------------------------------------------------------

    def poll(self, work: Work[Any]) -> bool:
        """Return whether a call has ended. Does not wait."""
        if self._started is not None and work.number and not work._is_done:
            self._check_process(work)
            if self._started.poll(work.number, 0):
                self._settle_ended()
        return work._is_done

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
        if not self.begin_compiled().begin_serving():
            self.run_until(work)  # there is no thread: it can only be run here
        elif self.begin_compiled().poll(work.number, 1):
            self._settle_ended()
        else:
            self._settle_ended()
            self._settle_group()
        return work._is_done

    def _check_process(self, work: Work[Any]) -> None:
        if os.getpid() != self._process:
            raise StateError(f"{work._name} belongs to the process that this one was forked from")

    def is_last(self, work: Work[Any] | None) -> bool:
        """Return whether nothing was queued after this work, which has not ended."""
        with self._lock:
            return bool(self._waiting) and self._waiting[-1][0] is work

    def end(self, work: Work[Any], error: BaseException | None = None) -> None:
        """End a Work that was not queued itself."""
        work.end(error)
        with self._lock:
            self._changed.notify_all()
        self._told(work)

    # --- the end of a call ------------------------------------------------------------------------

    def _told(self, work: Work[Any]) -> None:
        """Do what is to be done when a call has ended, without any lock."""
        if work._error is not None:
            with self._lock:
                self._failed.append(work)
        if work._callbacks is not None:
            with self._lock:
                self._watched.discard(work)
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
            failed = [work for work in self._failed if not work._was_seen]
            self._failed = []
        if failed:
            failed[0].wait()

    # --- all of them ------------------------------------------------------------------------------

    def end_unwaited(self, timeout_s: float) -> None:
        """Wait for what nobody waits for, as the program ends; raise the failure of a call."""
        if self.is_busy:
            self.stop(timeout_s)
        self.raise_unseen()

    def drain(self) -> None:
        """Wait until all that was started before has ended, well or not."""
        if self._works or self._waiting:
            for work in self._pending():
                self.run_until(work)

    def _pending(self) -> list[Work[Any]]:
        with self._lock:
            return [*self._works.values(), *(work for work, _ in self._waiting)]

    def stop(self, timeout_s: float) -> None:
        """Wait until every call has ended, and end the thread; DeadlineError where one has not."""
        until = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
        for work in self._pending():
            if not self.sleep_until(work, max(until - time.monotonic(), 0.0)):
                n_left = len(self._pending())
                self._give_up()
                self.let_go()
                raise DeadlineError(f"{n_left} asynchronous calls had not ended at close")
        if self._started is not None:
            self._started.settle()
        self.let_go()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _give_up(self) -> None:
        """End what compiled code has not, on all ranks; what Python runs goes on or notices."""
        if self._started is not None and self._works:
            self._group.abort()
            self._started.close()
            self._started.settle()
            self._fail_all(self._group.abort_error())

    def let_go(self) -> None:
        """End the thread when every call has ended, without waiting for it."""
        with self._lock:
            self._is_stopping = True
            if self.is_busy and os.getpid() == self._process:
                self._start_thread()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="gpucoll", daemon=True)
            thread.start()
            self._thread = thread

    def _serve(self) -> None:
        """Run what waits here, and find the end of what is watched: the thread of Python's."""
        while True:
            with self._lock:
                self._changed.wait_for(self._has_something_to_do)
                work = next((work for work in self._watched if work.number), None)
                if not self._waiting and work is None and not self._works:
                    return
                is_held = bool(self._holders)
            if work is not None:
                self.sleep_until(work, _SLICE_S)
            elif self._waiting and not is_held:
                with self._turn:
                    self._run_next()
            else:
                self.drain()
            del work  # its result belongs to the user alone now

    def _has_something_to_do(self) -> bool:
        if self._is_stopping or any(work.number for work in self._watched):
            return True
        return bool(self._waiting) and not self._holders


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
