"""Sends and receives in their turn: at once, together with those that are pending, or as a group.

What is asynchronous runs in the communicator's thread. Messages that are issued one after another
make progress together there, as one batch, which takes up further ones while it runs: so a receive
that waits does not keep a later send from being sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpucoll.backends.protocol import HostMessages, MessageRequest
from gpucoll.calls.collected import Collected, check_in_group
from gpucoll.calls.work import Work
from gpucoll.calls.work_queue import WorkQueue
from gpucoll.config import check_timeout_s


@dataclass
class Grouped:
    """A call whose messages wait for the end of the group."""

    requests: list[MessageRequest]
    finish: Callable[[], Any]
    timeout_s: float | None


@dataclass(eq=False)
class _Delivery:
    """The requests of one call, and the Work that stands for them."""

    requests: list[MessageRequest]
    work: Work[Any]
    timeout_s: float
    begun_ns: int = 0
    """When it was taken up: its deadline counts from there."""

    @property
    def deadline_ns(self) -> float:
        return self.begun_ns + self.timeout_s * 1e9


class _Batch:
    """Deliveries that make progress together."""

    def __init__(self, messages: HostMessages, queue: WorkQueue) -> None:
        self._host_messages = messages
        self._queue = queue
        self._lock = threading.Lock()
        self.work: Work[Any] | None = None
        """The batch's own place in the queue."""
        self._new: list[_Delivery] = []
        self._unfinished: list[_Delivery] = []
        self._is_over = False

    def add(self, delivery: _Delivery) -> bool:
        """Take a delivery up; return False where it comes too late."""
        with self._lock:
            if self._is_over:
                return False
            self._new.append(delivery)
        self._host_messages.ring_own_bell()
        return True

    def run(self) -> None:
        """Run until every delivery is done; what fails is told to its Work."""
        try:
            while requests := self._take_new():
                self._host_messages.run(requests, self._on_done, self._take_new, self._due)
        except BaseException as error:
            with self._lock:
                self._is_over = True
                left = self._unfinished + self._new
                self._unfinished, self._new = [], []
            for delivery in left:
                self._queue.end(delivery.work, error)

    def _take_new(self) -> list[MessageRequest]:
        with self._lock:
            new, self._new = self._new, []
            if not new and not self._unfinished:
                self._is_over = True
            for delivery in new:
                delivery.begun_ns = time.monotonic_ns()
            self._unfinished += new
        return [request for delivery in new for request in delivery.requests]

    def _due(self) -> tuple[int, float]:
        """Return the begin and the length of the deadline that comes first."""
        first = min(self._unfinished, key=lambda delivery: delivery.deadline_ns, default=None)
        if first is None:  # only what was begun to be taken is still put aside
            return time.monotonic_ns(), self._host_messages.timeout_s
        return first.begun_ns, first.timeout_s

    def _on_done(self, request: MessageRequest) -> None:
        delivery = next(item for item in self._unfinished if request in item.requests)
        delivery.requests.remove(request)
        if not delivery.requests:
            with self._lock:
                self._unfinished.remove(delivery)
            self._queue.end(delivery.work)


class MessageQueue:
    """Runs the sends and receives of one communicator.

    Parameters
    ----------
    messages : HostMessages
        The backend's: moves messages.
    queue : WorkQueue
        Of the communicator.
    run : callable
        ``Runner.run``: runs a task in its turn.
    check_open : callable
        Raises where the communicator can never run a call again.
    """

    def __init__(
        self,
        messages: HostMessages,
        queue: WorkQueue,
        run: Callable[..., Any],
        check_open: Callable[[], None],
    ) -> None:
        self._host_messages = messages
        self._queue = queue
        self._run = run
        self._check_open = check_open
        self._batch: _Batch | None = None
        self.grouped: Collected[Grouped] | None = None
        """What is collected while a group is open."""

    def deliver(
        self,
        name: str,
        requests: list[MessageRequest],
        finish: Callable[[], Any],
        async_op: bool,
        timeout_s: float | None,
        lasting: Any = None,
    ) -> Any:
        """Run requests; return what `finish` does, or a Work."""
        check_timeout_s(timeout_s)
        if self.grouped is not None:
            check_in_group(self.grouped, name, async_op, lasting)
            self.grouped.append(Grouped(requests, finish, timeout_s))
            return lasting
        if not async_op and not self._queue.is_busy:

            def task(timeout_s: float | None) -> None:
                self._host_messages.run(requests, _ignore, None, _from_now(timeout_s))

            return self._run(name, task, finish, timeout_s=timeout_s)
        self._check_open()  # a forked child has a queue, but not the thread that serves it
        limit_s = self._host_messages.timeout_s if timeout_s is None else timeout_s
        delivery = _Delivery(list(requests), Work(self._queue, name, finish), limit_s)
        batch = self._batch
        if batch is None or not self._queue.is_last(batch.work) or not batch.add(delivery):
            self._batch = batch = _Batch(self._host_messages, self._queue)
            batch.add(delivery)
            batch.work = self._queue.submit(batch.run, name)
        return delivery.work if async_op else delivery.work.wait()

    def run_group(self, grouped: list[Grouped], timeout_s: float | None) -> None:
        """Run all messages of a group at once, by the shortest deadline; then finish in order."""
        requests = [request for call in grouped for request in call.requests]
        limits = [call.timeout_s for call in grouped if call.timeout_s is not None]
        if timeout_s is not None:
            limits.append(timeout_s)
        if requests:
            self._host_messages.run(requests, _ignore, None, _from_now(min(limits, default=None)))
        for call in grouped:
            call.finish()


def _from_now(timeout_s: float | None) -> Callable[[], tuple[int, float | None]]:
    """Return the deadline of `HostMessages.run` that counts from now."""
    now_ns = time.monotonic_ns()
    return lambda: (now_ns, timeout_s)


def _ignore(request: MessageRequest) -> None:
    """Do nothing when a request is done."""
