"""Requests: what calls that return at once return, and waits for one, any, some or all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import gpucoll
from gpucoll import GpucollError
from gpucoll.integrations.mpi4py.constants import ERROR_CLASSES, UNDEFINED
from gpucoll.integrations.mpi4py.errors import Exception, MismatchError, as_mpis, refused
from gpucoll.integrations.mpi4py.handles import Handle
from gpucoll.integrations.mpi4py.status import Status

if TYPE_CHECKING:
    from typing_extensions import Self

    from gpucoll.calls.given import AnyObject

Requests: TypeAlias = "Sequence[Request]"
AnyWork: TypeAlias = Any
"""gpucoll's Work, or an object that stands for one: `Finished`, or the works of two messages."""


class Finished:
    """The work of a call that has nothing to do."""

    message = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class Withdrawn(Finished):
    """The work of a message that was cancelled."""


class After:
    """What to do when a work has ended.

    Parameters
    ----------
    finish : function, optional
        Called if it succeeded; unpacks the data.
    loads : function, optional
        Builds the object that `wait` returns from the work's result.
    is_null : bool
        Whether the peer was PROC_NULL.
    certifies : bool
        Whether the arrays are on a GPU, so that success must be queried.
    """

    __slots__ = ("certifies", "finish", "is_null", "loads")

    def __init__(
        self,
        finish: Callable[[], None] | None = None,
        loads: Callable[[AnyObject], AnyObject] | None = None,
        is_null: bool = False,
        certifies: bool = False,
    ) -> None:
        self.finish, self.loads, self.is_null = finish, loads, is_null
        self.certifies = certifies


class Request(Handle):
    """A call that was started; its `_core` is gpucoll's Work."""

    _after: After | None = None
    _takes: tuple[Callable[..., AnyWork], int, int] | None = None
    """The method, source and tag of a receive, with which a message that was too large is
    removed."""

    def __new__(cls, request: Request | None = None) -> Self:
        self = super().__new__(cls, request)
        if request is not None:
            self._after, self._takes = request._after, request._takes
        return self

    @classmethod
    def _started(cls, work: AnyWork, after: After | None = None) -> Self:
        self = object.__new__(cls)
        self._core, self._after = work, after
        return self

    # --- what waiting is made of ------------------------------------------------------------------

    def _waitable(self) -> AnyWork:
        """Return the work to wait for; None if there is none."""
        return self._core

    def _conclude(self, status: Status | None) -> AnyObject:
        """Wait, finish, fill the status; return the object of a lower-case receive."""
        work, after = self._core, self._after
        if work is None:
            if status is not None:
                status.clear()
            return None
        try:
            result = work.wait()
            if after is not None and after.certifies:
                work.synchronize()
        except GpucollError as error:
            self._core = None
            raise self._failed(error, status) from None
        self._core = None
        self._fill(status, work)
        if after is None:
            return None
        if after.finish is not None:
            after.finish()
        return None if after.loads is None else after.loads(result)

    def _fill(self, status: Status | None, work: AnyWork) -> None:
        if status is None:
            return
        message = getattr(work, "message", None)
        if message is not None:
            status.fill(message.source, message.tag, message.size_bytes)
        elif self._after is not None and self._after.is_null:
            status.fill_null()
        else:
            status.clear()
            status.cancelled = isinstance(work, Withdrawn)

    def _failed(self, error: GpucollError, status: Status | None) -> Exception:
        if isinstance(error, gpucoll.MismatchError) and self._takes is not None:
            return truncated(error, *self._takes, status)
        return as_mpis(error)

    # --- one --------------------------------------------------------------------------------------

    def Wait(self, status: Status | None = None) -> bool:
        """Wait until the request is complete."""
        work = self._core
        if status is None and self._after is None and work is not None:
            try:
                work.wait()
            except GpucollError as error:
                self._core = None
                raise self._failed(error, None) from None
            self._core = None
            return True
        self._conclude(status)
        return True

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the request is complete."""
        return self._test(status)[0]

    def wait(self, status: Status | None = None) -> AnyObject:
        """Wait until the request is complete; return what an `irecv` received."""
        return self._conclude(status)

    def test(self, status: Status | None = None) -> tuple[bool, AnyObject]:
        """Return whether the request is complete, and what an `irecv` received."""
        return self._test(status)

    def _test(self, status: Status | None) -> tuple[bool, AnyObject]:
        work = self._waitable()
        if work is not None and not work.done():
            return False, None
        return True, self._conclude(status)

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether the request is complete, and keep it."""
        work = self._waitable()
        if work is None:
            if status is not None:
                status.clear()
            return True
        if not work.done():
            return False
        self._fill(status, work)
        return True

    get_status = Get_status

    def Cancel(self) -> None:
        """Withdraw a message; if it is too late, the message continues (see `Status.cancelled`).

        A receive can be withdrawn as long as no message has arrived for it, a send as long as none
        of it is in the receiver's mailbox.
        """
        self._live("ERR_REQUEST")
        work = self._waitable()
        if work is None or work.done():
            return
        withdraw = getattr(work, "withdraw", None)
        if withdraw is None:
            refused("Request.Cancel of a call that is not a message", "wait for it")
        if withdraw():
            self._core, self._after, self._takes = Withdrawn(), None, None

    cancel = Cancel

    def Free(self) -> None:
        """Release the handle; the call continues."""
        self._live("ERR_REQUEST")
        self._core = None

    def free(self) -> None:
        """Release the handle unless it is null."""
        self._core = None

    def __reduce__(self) -> tuple[object, ...]:
        if self._core is None:
            return self._reduced("REQUEST_NULL")
        raise ValueError("a request cannot be pickled")

    # --- several ----------------------------------------------------------------------------------

    @classmethod
    def Waitall(cls, requests: Requests, statuses: list[Status] | None = None) -> bool:
        """Wait until all are complete."""
        if statuses is not None:
            Request.waitall(requests, statuses)
            return True
        failure = None
        for request in requests:
            try:
                request.Wait()
            except GpucollError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return True

    @classmethod
    def waitall(cls, requests: Requests, statuses: list[Status] | None = None) -> list[AnyObject]:
        """Wait until all are complete; return what each has received."""
        _resize(statuses, len(requests))
        results, failure = [], None
        for place, request in enumerate(requests):
            try:
                results.append(request._conclude(_at(statuses, place)))
            except GpucollError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return results

    @classmethod
    def Waitany(cls, requests: Requests, status: Status | None = None) -> int:
        """Wait until one is complete; return its index, or UNDEFINED if there is none."""
        return Request.waitany(requests, status)[0]

    @classmethod
    def waitany(cls, requests: Requests, status: Status | None = None) -> tuple[int, AnyObject]:
        """Wait until one is complete; return its index, and what it has received."""
        places = _active(requests)
        if not places:
            _clear(status)
            return UNDEFINED, None
        first = gpucoll.wait_any([requests[place]._waitable() for place in places])
        return places[first], requests[places[first]]._conclude(status)

    @classmethod
    def Waitsome(cls, requests: Requests, statuses: list[Status] | None = None) -> list[int] | None:
        """Wait until one or more are complete; return their indices, or None if there are none."""
        return Request.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(
        cls, requests: Requests, statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[AnyObject] | None]:
        """Wait until one or more are complete; return their indices, and what they received."""
        places = _active(requests)
        if places:
            gpucoll.wait_any([requests[place]._waitable() for place in places])
        return Request.testsome(requests, statuses)

    @classmethod
    def Testall(cls, requests: Requests, statuses: list[Status] | None = None) -> bool:
        """Return whether all are complete."""
        return bool(Request.testall(requests, statuses)[0])

    @classmethod
    def testall(
        cls, requests: Requests, statuses: list[Status] | None = None
    ) -> tuple[bool, list[AnyObject] | None]:
        """Return whether all are complete, and if so what each has received."""
        if not all([requests[place]._waitable().done() for place in _active(requests)]):  # noqa: C419  # each is asked
            return False, None
        return True, Request.waitall(requests, statuses)

    @classmethod
    def Testany(cls, requests: Requests, status: Status | None = None) -> tuple[int, bool]:
        """Return the index of a complete one, and whether there is one."""
        return Request.testany(requests, status)[:2]

    @classmethod
    def testany(
        cls, requests: Requests, status: Status | None = None
    ) -> tuple[int, bool, AnyObject]:
        """Return the index of a complete one, whether there is one, and what it has received."""
        places = _active(requests)
        if not places:
            _clear(status)
            return UNDEFINED, True, None
        for place in places:
            if requests[place]._waitable().done():
                return place, True, requests[place]._conclude(status)
        _clear(status)
        return UNDEFINED, False, None

    @classmethod
    def Testsome(cls, requests: Requests, statuses: list[Status] | None = None) -> list[int] | None:
        """Return the indices of those that are complete; None if there is nothing to wait for."""
        return Request.testsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Requests, statuses: list[Status] | None = None
    ) -> tuple[list[int] | None, list[AnyObject] | None]:
        """Return the indices of those that are complete, and what they have received."""
        places = _active(requests)
        if not places:
            return None, None
        done = [place for place in places if requests[place]._waitable().done()]
        _resize(statuses, len(done))
        results = [requests[place]._conclude(_at(statuses, n)) for n, place in enumerate(done)]
        return done, results

    @classmethod
    def Get_status_all(cls, requests: Requests, statuses: list[Status] | None = None) -> bool:
        """Return whether all are complete, and keep them."""
        _resize(statuses, len(requests))
        if not all([request.Get_status() for request in requests]):  # noqa: C419  # each is asked
            return False
        for place, request in enumerate(requests):
            request.Get_status(_at(statuses, place))
        return True

    @classmethod
    def Get_status_any(cls, requests: Requests, status: Status | None = None) -> tuple[int, bool]:
        """Return the index of a complete one, and whether there is one; keep it."""
        places = _active(requests)
        if not places:
            _clear(status)
            return UNDEFINED, True
        for place in places:
            if requests[place].Get_status(status):
                return place, True
        return UNDEFINED, False

    @classmethod
    def Get_status_some(
        cls, requests: Requests, statuses: list[Status] | None = None
    ) -> list[int] | None:
        """Return the indices of those that are complete, and keep them."""
        places = _active(requests)
        if not places:
            return None
        done = [place for place in places if requests[place].Get_status()]
        _resize(statuses, len(done))
        for n, place in enumerate(done):
            requests[place].Get_status(_at(statuses, n))
        return done

    get_status_all = Get_status_all
    get_status_any = Get_status_any
    get_status_some = Get_status_some


class Prequest(Request):
    """A persistent request. Its `_core` starts the call."""

    _running: Request | None = None

    def __new__(cls, request: Request | None = None) -> Self:
        self = super().__new__(cls, request)
        self._running = getattr(request, "_running", None)
        return self

    def Start(self) -> None:
        """Start the call."""
        start = self._live("ERR_REQUEST")
        if self._running is not None and self._running._core is not None:
            raise as_mpis(gpucoll.StateError("Start: the request is active; wait for it first"))
        self._running = start()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Start several calls."""
        for request in requests:
            request.Start()

    def _waitable(self) -> AnyWork:
        return None if self._running is None else self._running._core

    def Cancel(self) -> None:
        """Cancel the call that was started last, as `Request.Cancel` does."""
        self._live("ERR_REQUEST")
        if self._running is not None and self._running._core is not None:
            self._running.Cancel()

    cancel = Cancel

    def _conclude(self, status: Status | None) -> AnyObject:
        running, self._running = self._running, None
        if running is not None:
            return running._conclude(status)
        _clear(status)
        return None

    def _fill(self, status: Status | None, work: AnyWork) -> None:
        if self._running is not None:
            self._running._fill(status, work)

    def Wait(self, status: Status | None = None) -> bool:
        """Wait until the call that was started last is complete."""
        self._conclude(status)
        return True

    def Pready(self, *_: object) -> None:
        """Refuse, as `Psend_init` does."""
        refused("partitioned communication", "send each part with its own Send_init")

    Pready_range = Pready_list = Parrived = Pready


def truncated(
    error: GpucollError,
    receive: Callable[..., AnyWork],
    source: int,
    tag: int,
    status: Status | None = None,
) -> Exception:
    """Remove a message that was too large for its receive; return the error to raise."""
    if "shape" not in str(error):
        return as_mpis(error)
    work = receive(source=source, tag=tag, async_op=True)  # another thread may be in a call
    work.wait()
    message = work.message
    if status is not None:
        status.fill(message.source, message.tag, message.size_bytes)
        status.error = ERROR_CLASSES["ERR_TRUNCATE"]
    return MismatchError(
        ERROR_CLASSES["ERR_TRUNCATE"],
        f"the message of {message.size_bytes} bytes from rank {message.source} with tag "
        f"{message.tag} is larger than the buffer; it is lost ({error})",
    )


def _active(requests: Requests) -> list[int]:
    return [place for place, request in enumerate(requests) if request._waitable() is not None]


def _clear(status: Status | None) -> None:
    if status is not None:
        status.clear()


def _resize(statuses: list[Status] | None, length: int) -> None:
    """Make a list of statuses long enough, as mpi4py does."""
    if statuses is not None:
        missing = [Status() for _ in range(length - len(statuses))]
        if missing and hasattr(statuses, "extend"):
            statuses.extend(missing)


def _at(statuses: list[Status] | None, place: int) -> Status | None:
    """Return the status to fill; a tuple may have fewer entries than there are requests."""
    return statuses[place] if statuses is not None and place < len(statuses) else None


REQUEST_NULL = Request()
