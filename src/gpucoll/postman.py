"""Sends and receives in their turn: at once, together with those that are pending, or as a group.

What is asynchronous runs in the communicator's thread. Messages that are issued one after another
make progress together there, as one batch, which takes up further ones while it runs: so a receive
that waits does not keep a later send from being sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpucoll.backends.protocol import MessageRequest
from gpucoll.errors import ArgumentError
from gpucoll.work import Work, WorkQueue


class _Courier(Protocol):
    def run(
        self,
        requests: Sequence[MessageRequest],
        on_done: Callable[[MessageRequest], None],
        more: Callable[[], Sequence[MessageRequest]] | None,
        timeout_s: float | None,
    ) -> None: ...

    def ring_own_bell(self) -> None: ...


@dataclass(eq=False)
class _Delivery:
    """The requests of one call, and the Work that stands for them."""

    requests: list[MessageRequest]
    work: Work


class _Batch:
    """Deliveries that make progress together."""

    def __init__(self, courier: _Courier, queue: WorkQueue, timeout_s: float | None) -> None:
        self._courier = courier
        self._queue = queue
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self.work: Work | None = None
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
        self._courier.ring_own_bell()
        return True

    def set_work(self, work: Work) -> None:
        """Note the batch's own place in the queue."""
        self.work = work

    def run(self, _timeout_s: float | None = None) -> None:
        """Run until every delivery is done; what fails is told to its Work."""
        try:
            while requests := self._take_new():
                self._courier.run(requests, self._on_done, self._take_new, self._timeout_s)
        except BaseException as error:
            with self._lock:
                self._is_over = True
                left = self._unfinished + self._new
            for delivery in left:
                self._queue.fail(delivery.work, error)

    def _take_new(self) -> list[MessageRequest]:
        with self._lock:
            new, self._new = self._new, []
            if not new and not self._unfinished:
                self._is_over = True
            self._unfinished += new
        return [request for delivery in new for request in delivery.requests]

    def _on_done(self, request: MessageRequest) -> None:
        delivery = next(item for item in self._unfinished if request in item.requests)
        delivery.requests.remove(request)
        if not delivery.requests:
            with self._lock:
                self._unfinished.remove(delivery)
            self._queue.complete(delivery.work)


class Postman:
    """Runs the sends and receives of one communicator.

    Parameters
    ----------
    courier : object
        The backend's: moves messages.
    queue : WorkQueue
        Of the communicator.
    run : callable
        ``Communicator._run``: runs a task in its turn.
    """

    def __init__(self, courier: _Courier, queue: WorkQueue, run: Callable[..., Any]) -> None:
        self._courier = courier
        self._queue = queue
        self._run = run
        self._batch: _Batch | None = None
        self.grouped: list[tuple[list[MessageRequest], Callable[[], Any]]] | None = None
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
        if self.grouped is not None:
            if async_op:
                raise ArgumentError(f"{name}: inside group() nothing is asynchronous by itself")
            self.grouped.append((requests, finish))
            return lasting
        if not async_op and not self._queue.is_busy:

            def task(timeout_s: float | None) -> None:
                self._courier.run(requests, _ignore, None, timeout_s)

            return self._run(name, task, finish, timeout_s=timeout_s)
        delivery = _Delivery(list(requests), Work(finish, name))
        batch = self._batch
        if batch is None or not self._queue.is_last(batch.work) or not batch.add(delivery):
            self._batch = batch = _Batch(self._courier, self._queue, timeout_s)
            batch.add(delivery)
            self._run(name, batch.run, _nothing, async_op=True, on_work=batch.set_work)
        return delivery.work if async_op else delivery.work.wait()

    def run_group(
        self, grouped: list[tuple[list[MessageRequest], Callable[[], Any]]], timeout_s: float | None
    ) -> None:
        """Run all messages of a group at once, then finish them in order."""
        requests = [request for part, _ in grouped for request in part]
        if requests:
            self._courier.run(requests, _ignore, None, timeout_s)
        for _, finish in grouped:
            finish()


def _ignore(request: MessageRequest) -> None:
    """Do nothing when a request is done."""


def _nothing() -> None:
    """Return nothing: a batch has no result of its own."""
