"""The sends and receives of a communicator: blocking, asynchronous, or in a group.

They are independent of collectives: a pending message delays no call, and no call delays it. All
messages that have started progress whenever any message is started, waited for or queried.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gpucoll.backends.protocol import HostMessages, MessageRequest, Transfers
from gpucoll.calls.collected import Collected, check_in_group
from gpucoll.calls.given import AnyResult
from gpucoll.calls.message_work import MessageWork, Steps
from gpucoll.config import check_timeout_s
from gpucoll.errors import DeadlineError, GpucollError
from gpucoll.group.protocol import ENDING_S, Group
from gpucoll.transport.shared.words import Kind

_WATCH_SLICE_S = 0.02
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_TAKE = int(Kind.TAKE)
_MOST_UNSWEPT = 64
"""Number of kept works from which works that ended unnoticed are released."""


@dataclass
class Grouped:
    """A call whose messages wait for the end of the group."""

    requests: list[MessageRequest]
    steps: Steps
    timeout_s: float | None
    work: MessageWork[Any] | None


class MessageQueue:
    """Runs the sends and receives of one communicator.

    Parameters
    ----------
    group : Group
        The ranks.
    messages : HostMessages
        The backend's messages.
    check_received : callable
        Raises if a Work's request has failed.

    Attributes
    ----------
    process : int
        The process in which works can progress.
    lock : RLock
        Held while the state of a Work changes.
    pending : dict
        Works that were started and have not ended, or whose end was not noticed.
    called : dict
        Pending works that have callbacks.
    sweep_at : int
        Number of pending works at which `look_at_others` releases those that ended unnoticed.
    """

    def __init__(
        self,
        group: Group,
        messages: HostMessages,
        check_received: Callable[[MessageWork[object]], None],
    ) -> None:
        self._group = group
        self.host_messages = messages
        self.wait_begun = messages.wait_begun
        self.check_received = check_received
        self.process = os.getpid()
        self.lock = threading.RLock()
        self.pending: dict[MessageWork[Any], None] = {}
        self.called: dict[MessageWork[Any], None] = {}
        self.sweep_at = _MOST_UNSWEPT
        self._failed: list[MessageWork[Any]] = []
        self._watched: dict[MessageWork[Any], None] = {}
        self._taking: dict[MessageWork[Any], None] = {}
        """Works whose receive fetches its message in a second step, which needs Python."""
        self._pause_s = _SHORTEST_PAUSE_S
        self._serving: threading.Thread | None = None
        """The thread that looks after the watched and the taking works while there are some."""
        self.grouped: Collected[Grouped] | None = None
        """The calls collected while a group is open."""
        _queues.add(self)

    # --- running ----------------------------------------------------------------------------------

    def deliver(
        self,
        name: str,
        steps: Steps,
        async_op: bool,
        timeout_s: float | None,
        lasting: AnyResult = None,
    ) -> AnyResult:
        """Run the steps of a call; return its result, or a Work.

        `lasting` is the return value of a call inside a group. If it is the class `MessageWork`,
        the call returns a new Work.
        """
        check_timeout_s(timeout_s)
        if self.grouped is not None:
            check_in_group(self.grouped, name, async_op, lasting)
            work = MessageWork[Any](self, name, None, None) if lasting is MessageWork else None
            self.grouped.append(Grouped(next(steps), steps, timeout_s, work))
            return lasting if work is None else work
        if async_op:
            return self._begin(name, steps, timeout_s)
        if self.called:
            self.go_on_with_called()
        with self.host_messages.turn():
            self.host_messages.run(next(steps), timeout_s)
            return self.run(steps)

    def run(self, steps: Steps) -> AnyResult:
        """Run the remaining steps of a blocking call; return its result.

        They fetch a message that has come; the call's own deadline was for its coming.
        """
        try:
            while True:
                self.host_messages.run(next(steps), None)
        except StopIteration as stop:
            return stop.value

    def _begin(self, name: str, steps: Steps, timeout_s: float | None) -> MessageWork[object]:
        transfers = self.host_messages.start(next(steps), timeout_s)
        return self.keep(MessageWork(self, name, transfers, steps))

    def keep(self, work: MessageWork[object]) -> MessageWork[object]:
        """Keep a started Work until it ends; return it."""
        self.pending[work] = None
        if not work.go_on() and work.takes:
            self._serve_taking(work)
        self.look_at_others()
        return work

    def look_at_others(self) -> None:
        """Let works end that have callbacks, and release works that ended unnoticed."""
        if self.called:
            self.go_on_with_called()
        if len(self.pending) >= self.sweep_at:
            self.sweep()

    def start(self, requests: list[MessageRequest]) -> Transfers:
        """Start the next requests of a Work."""
        return self.host_messages.start(requests, None)

    def run_group(self, grouped: list[Grouped], timeout_s: float | None) -> None:
        """Run all messages of a group at once, by the shortest deadline; then finish in order."""
        requests = [request for call in grouped for request in call.requests]
        limits = [call.timeout_s for call in grouped if call.timeout_s is not None]
        if timeout_s is not None:
            limits.append(timeout_s)
        limit_s = min(limits, default=None)
        failed: list[Exception] = []
        if any(request.kind == _TAKE for request in requests):
            self._run_works(grouped, limit_s)
            return
        with self.host_messages.turn():
            self.host_messages.run(requests, limit_s)
            for call in grouped:
                result, error = None, None
                try:
                    result = self.run(call.steps)
                except Exception as raised:
                    failed.append(raised)
                    error = raised
                if call.work is not None:
                    call.work.settle(result, error)
        if failed:
            raise failed[0]

    def _run_works(self, grouped: list[Grouped], limit_s: float | None) -> None:
        """Run a group that has a receive which fetches its message only after it has come.

        A send of the group may wait until the other rank has fetched its message, and vice versa.
        """
        failed: list[Exception] = []
        works = []
        for call in grouped:
            work = call.work or MessageWork[Any](self, "group", None, None)
            work.begin(self.host_messages.start(call.requests, limit_s), call.steps)
            works.append(self.keep(work))
        for work in works:
            try:
                work.wait()
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    # --- works ------------------------------------------------------------------------------------

    def forget(self, work: MessageWork[object]) -> None:
        """Note that a Work has ended. The Work, or `raise_unseen`, raises its error."""
        self.pending.pop(work, None)
        self._taking.pop(work, None)
        self.called.pop(work, None)
        if work._error is not None and work._error is not self._group.failure:
            self._failed = [*(failed for failed in self._failed if not failed._was_seen), work]

    def call_back(
        self,
        work: MessageWork[object],
        functions: Sequence[Callable[[MessageWork[object]], object]],
    ) -> None:
        """Call a Work's callbacks."""
        for function in functions:
            try:
                function(work)
            except Exception as error:
                sys.unraisablehook(
                    SimpleNamespace(
                        exc_type=type(error),
                        exc_value=error,
                        exc_traceback=error.__traceback__,
                        err_msg="Exception ignored in a callback of a Work",
                        object=function,
                    )
                )

    def go_on_with_called(self) -> None:
        """Let works end whose messages are complete and that have callbacks."""
        for work in list(self.called):
            work.go_on()

    def watch(self, work: MessageWork[object]) -> None:
        """Let the thread of this queue find the end of a Work."""
        with self.lock:
            self._watched[work] = None
            self._start_serving()

    def _serve_taking(self, work: MessageWork[object]) -> None:
        """Let that thread take the second step if this one is in another call by then.

        The sender waits for the step, and the other call may wait for that sender.
        """
        with self.lock:
            self._taking[work] = None
            self._pause_s = _SHORTEST_PAUSE_S
            self._start_serving()

    def _start_serving(self) -> None:
        """Start the thread unless it runs; the lock is held."""
        if self._serving is None:
            serving = threading.Thread(target=self._serve, daemon=True, name="gpucoll-messages")
            serving.start()
            self._serving = serving

    def end(self) -> None:
        """Release everything: the communicator is closed."""
        self.stop_watching()
        self.host_messages.end()
        for work in list(self.pending):
            work.abandon()
        self.pending.clear()
        _queues.discard(self)

    def stop_watching(self) -> None:
        """End the thread; return when it neither looks at a Work nor runs a callback."""
        with self.lock:
            self._watched.clear()
            self._taking.clear()
            serving, self._serving = self._serving, None
        if serving is not None and serving is not threading.current_thread():
            serving.join(ENDING_S)  # it ends within a slice, or after a user's callback

    def _serve(self) -> None:
        while True:
            with self.lock:
                work = next(iter(self._watched), None)
                taking = list(self._taking)
                if work is None and not taking:
                    if self._serving is threading.current_thread():
                        self._serving = None
                    return
            if work is not None:
                self._wait_for_watched(work)
            else:
                time.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            for each in taking:
                each.go_on()

    def _wait_for_watched(self, work: MessageWork[object]) -> None:
        with contextlib.suppress(GpucollError):  # the Work keeps its error for its owner
            work._wait(_WATCH_SLICE_S)
        with self.lock:
            was_watched = self._watched.pop(work, work) is None
            if was_watched and not work._is_done:
                self._watched[work] = None  # at the end of the queue

    def sweep(self) -> None:
        """Let works end whose messages are complete."""
        with self.lock:
            pending = list(self.pending)
        for work in pending:
            work.go_on()
        with self.lock:
            self.sweep_at = 2 * len(self.pending) + _MOST_UNSWEPT

    def raise_unseen(self) -> None:
        """Raise the first failure that was never inspected; forget the others."""
        self.sweep()
        with self.lock:
            failed = [work for work in self._failed if not work._was_seen]
            self._failed = []
        if failed:
            failed[0].wait()

    @property
    def n_pending(self) -> int:
        """The number of works that have not ended."""
        return len(self.pending)

    def finish(self, timeout_s: float) -> None:
        """Wait until every Work has ended; raise DeadlineError if one has not."""
        if self._group.failure is not None:
            return  # the error that broke the communicator was raised
        until_s = time.monotonic() + timeout_s
        while pending := list(self.pending):  # other threads may end some meanwhile
            work = pending[0]
            left_s = until_s - time.monotonic()
            try:
                work._wait(max(left_s, 0.0))
                if left_s < -ENDING_S:  # callbacks start new messages without end
                    raise DeadlineError
            except DeadlineError:
                count = len(self.pending)
                raise DeadlineError(
                    f"{count} asynchronous messages had not ended at close, first {work._name}"
                ) from None
            if work._error is not None and work._error is self._group.failure:
                raise work._error

    def hold(self, is_held: bool) -> None:
        """Stop the compiled entries from running calls at once, or allow it again: see `group`."""
        self.host_messages.hold(is_held)


_queues: weakref.WeakSet[MessageQueue] = weakref.WeakSet()


def _renew_in_child() -> None:
    for queue in list(_queues):
        queue.lock = threading.RLock()
        queue._serving = None


os.register_at_fork(after_in_child=_renew_in_child)
