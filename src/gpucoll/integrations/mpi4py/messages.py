"""Messages of arrays between two ranks.

All messages travel as bytes, since MPI lets a receiver use another datatype, and a probe reports
bytes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import gpucoll
from gpucoll import GpucollError
from gpucoll.integrations.mpi4py.constants import ANY_SOURCE, ANY_TAG, PROC_NULL, TAG_UPPER_BOUND
from gpucoll.integrations.mpi4py.errors import Exception, argument_error, refused
from gpucoll.integrations.mpi4py.integers import integer
from gpucoll.integrations.mpi4py.job import waiting_s
from gpucoll.integrations.mpi4py.matched import MESSAGE_NO_PROC, Message
from gpucoll.integrations.mpi4py.requests import After, Finished, Prequest, Request, truncated
from gpucoll.integrations.mpi4py.specifications import AnySpec, Finish, Simple
from gpucoll.integrations.mpi4py.status import Status

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyArray
    from gpucoll.calls.given import Unchecked
    from gpucoll.integrations.mpi4py.state import AnyComm
    from gpucoll.integrations.mpi4py.typing import Buffer, BufSpec

_array = np.ndarray
_bytes = np.dtype(np.uint8)
_NULL = After(is_null=True)
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


def sent_bytes(buf: AnySpec) -> AnyArray:
    """Return the data to send for a buffer: bytes, or an array on a GPU."""
    row = Simple(buf, False).row()
    return row.view(np.uint8) if isinstance(row, np.ndarray) else row


def received_bytes(buf: AnySpec) -> tuple[AnyArray, Finish | None]:
    """Return where to receive a message, and the function to call afterwards."""
    row, finish = Simple(buf, True).target()
    return (row.view(np.uint8) if isinstance(row, np.ndarray) else row), finish


class Messages:
    """The messages of `Comm` with arrays."""

    _state: Any
    _failed: Callable[[GpucollError], Exception]
    _send: Any
    _recv: Any
    _send_recv: Any

    # --- blocking ---------------------------------------------------------------------------------

    def Send(self, buf: BufSpec, dest: int, tag: int = 0) -> None:
        """Send; return when `buf` may be reused."""
        if type(buf) is _array and buf.flags.c_contiguous and buf.ndim and buf.dtype.isnative:
            try:
                self._send(buf.view(_bytes), dest, tag)
                return
            except (TypeError, gpucoll.UsageError):  # the general path below explains what is wrong
                pass
            except GpucollError as error:
                raise self._failed(error) from None
        self._start_send(buf, dest, tag)._conclude(None)

    Rsend = Send

    def Ssend(self, buf: BufSpec, dest: int, tag: int = 0) -> None:
        """Send; return when the message has been received."""
        self.Issend(buf, dest, tag).Wait()

    def Bsend(self, buf: BufSpec, dest: int, tag: int = 0) -> None:
        """Send a copy; return at once."""
        self.Ibsend(buf, dest, tag)

    def Recv(
        self,
        buf: BufSpec,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Receive."""
        if (
            type(buf) is _array
            and buf.flags.c_contiguous
            and buf.ndim
            and buf.dtype.isnative
            and source != PROC_NULL
        ):
            try:
                if status is None:
                    self._recv(buf.view(_bytes), source, tag)
                else:
                    _, message = self._recv(buf.view(_bytes), source, tag, info=True)
                    status.fill(message.source, message.tag, message.size_bytes)
                return
            except (TypeError, gpucoll.UsageError):
                pass
            except gpucoll.MismatchError as error:
                raise truncated(error, self._recv, source, tag, status) from None
            except GpucollError as error:
                raise self._failed(error) from None
        self.Irecv(buf, source, tag)._conclude(status)

    def Sendrecv(
        self,
        sendbuf: BufSpec,
        dest: int,
        sendtag: int = 0,
        recvbuf: BufSpec | None = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send one message and receive another."""
        receive = self.Irecv(recvbuf, source, recvtag)
        send = self._start_send(sendbuf, dest, sendtag)
        receive._conclude(status)
        send._conclude(None)

    def Sendrecv_replace(
        self,
        buf: BufSpec,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:
        """Send one message and receive another in the same buffer."""
        self.Isendrecv_replace(buf, dest, sendtag, source, recvtag)._conclude(status)

    # --- started ----------------------------------------------------------------------------------

    def Isend(self, buf: BufSpec, dest: int, tag: int = 0) -> Request:
        """Start a send."""
        if type(buf) is _array and buf.flags.c_contiguous and buf.ndim and buf.dtype.isnative:
            try:
                work = self._send(buf.view(_bytes), dest, tag, async_op=True)
            except (TypeError, gpucoll.UsageError):
                pass
            except GpucollError as error:
                raise self._failed(error) from None
            else:
                request = object.__new__(Request)
                request._core = work
                return request
        return self._start_send(buf, dest, tag)

    Irsend = Isend

    def Issend(self, buf: BufSpec, dest: int, tag: int = 0) -> Request:
        """Start a send that is complete when the message has been received."""
        return self._start_send(buf, dest, tag, synchronous=True)

    def Ibsend(self, buf: BufSpec, dest: int, tag: int = 0) -> Request:
        """Start sending a copy; the request is complete at once."""
        data = None if dest == PROC_NULL else sent_bytes(buf)
        return self._send_copy(data if data is None else data.copy(), dest, tag)

    def Irecv(self, buf: BufSpec, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start a receive."""
        if (
            type(buf) is _array
            and buf.flags.c_contiguous
            and buf.ndim
            and buf.dtype.isnative
            and source != PROC_NULL
        ):
            try:
                work = self._recv(buf.view(_bytes), source, tag, async_op=True)
            except (TypeError, gpucoll.UsageError):
                pass
            except GpucollError as error:
                raise self._failed(error) from None
            else:
                request = object.__new__(Request)
                request._core = work
                request._takes = self._recv, source, tag
                return request
        if source == PROC_NULL:
            return Request._started(Finished(), _NULL)
        source, tag = self._check(source, tag, may_be_any=True)
        row, finish = received_bytes(buf)
        certifies = not isinstance(row, np.ndarray)
        return self._start_recv(row, source, tag, After(finish, certifies=certifies))

    def Isendrecv(
        self,
        sendbuf: BufSpec,
        dest: int,
        sendtag: int = 0,
        recvbuf: BufSpec | None = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:
        """Start a send and a receive; the request is complete when both are."""
        receive = self.Irecv(recvbuf, source, recvtag)
        return _Both.of(receive, self._start_send(sendbuf, dest, sendtag))

    def Isendrecv_replace(
        self,
        buf: BufSpec,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:
        """Start a send and a receive in the same buffer."""
        data = None if dest == PROC_NULL else sent_bytes(buf).copy()
        receive = self.Irecv(buf, source, recvtag)
        return _Both.of(receive, self._start_send(data, dest, sendtag))

    def _start_send(self, buf: AnySpec, dest: int, tag: int, synchronous: bool = False) -> Request:
        if dest == PROC_NULL:
            return Request._started(Finished(), _NULL)
        dest, tag = self._check(dest, tag)
        row = sent_bytes(buf)
        is_on_gpu = not isinstance(row, np.ndarray)
        named = {"synchronous": True} if synchronous and not is_on_gpu else {}
        try:
            work = self._send(row, dest, tag, async_op=True, **named)
        except GpucollError as error:
            raise self._failed(error) from None
        return Request._started(work, After(certifies=True) if is_on_gpu else None)

    def _start_recv(self, row: AnyArray | None, source: int, tag: int, after: After) -> Request:
        try:
            work = self._recv(row, source, tag, async_op=True)
        except GpucollError as error:
            raise self._failed(error) from None
        request: Request = Request._started(work, after)
        request._takes = self._recv, source, tag
        return request

    def _send_copy(self, data: AnyArray | None, dest: int, tag: int) -> Request:
        """Send bytes that the caller does not reuse, and keep them until they are sent."""
        request = self._start_send(data, dest, tag)
        kept = self._state.buffered
        for work in [work for work in kept if work.done()]:
            with contextlib.suppress(ValueError):  # another thread has just removed it
                kept.remove(work)
        kept.append(request._core)
        return Request._started(Finished(), _NULL if dest == PROC_NULL else None)

    def _check(self, peer: Unchecked, tag: Unchecked, may_be_any: bool = False) -> tuple[int, int]:
        """Return rank and tag as ints; raise if either is out of range."""
        peer, tag = integer(peer), integer(tag)
        size = self._state.comm.world_size
        if not 0 <= peer < size and not (may_be_any and peer == ANY_SOURCE):
            raise argument_error(f"rank must be 0 to {size - 1}; got {peer}", "ERR_RANK")
        if not 0 <= tag <= TAG_UPPER_BOUND and not (may_be_any and tag == ANY_TAG):
            raise argument_error(f"tag must be 0 to {TAG_UPPER_BOUND}; got {tag}", "ERR_TAG")
        return peer, tag

    # --- buffered sends ---------------------------------------------------------------------------

    def Attach_buffer(self, buf: Buffer | None) -> None:
        """Keep a buffer until it is detached. Buffered sends do not use it: they make copies."""
        self._state.attached = buf

    def Detach_buffer(self) -> Buffer | None:
        """Wait until all buffered sends are done; return the attached buffer."""
        self.Flush_buffer()
        found: Buffer | None = self._state.attached
        self._state.attached = None
        return found

    def Flush_buffer(self) -> None:
        """Wait until all buffered sends are done."""
        try:
            self._state.flush()
        except GpucollError as error:
            raise self._failed(error) from None

    def Iflush_buffer(self) -> Request:
        """Return a request that is complete when all buffered sends are."""
        works = [Request._started(work) for work in list(self._state.buffered)]
        return _Both.of(*works) if works else Request._started(Finished())

    # --- persistent requests ----------------------------------------------------------------------

    def Send_init(self, buf: BufSpec, dest: int, tag: int = 0) -> Prequest:
        """Prepare a send."""
        return self._prepared(self.Isend, buf, dest, tag)

    def Ssend_init(self, buf: BufSpec, dest: int, tag: int = 0) -> Prequest:
        """Prepare a synchronous send."""
        return self._prepared(self.Issend, buf, dest, tag)

    def Bsend_init(self, buf: BufSpec, dest: int, tag: int = 0) -> Prequest:
        """Prepare a buffered send."""
        return self._prepared(self.Ibsend, buf, dest, tag)

    Rsend_init = Send_init

    def Recv_init(self, buf: BufSpec, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Prepare a receive."""
        return self._prepared(self.Irecv, buf, source, tag)

    def _prepared(self, start: Callable[..., Request], *given: object) -> Prequest:
        return Prequest._of(lambda: start(*given))

    def Psend_init(self, *_: object, **__: object) -> Prequest:
        """Refuse partitioned communication."""
        refused("partitioned communication", "send each part with its own Send_init")

    Precv_init = Psend_init

    # --- probing ----------------------------------------------------------------------------------

    def Probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> bool:
        """Wait for a message, and leave it in the queue."""
        return self._probe(source, tag, status, True)

    def Iprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> bool:
        """Return whether there is a message, and leave it in the queue."""
        return self._probe(source, tag, status, False)

    probe, iprobe = Probe, Iprobe

    def _probe(self, source: int, tag: int, status: Status | None, waits: bool) -> bool:
        if source == PROC_NULL:
            if status is not None:
                status.fill_null()
            return True
        source, tag = self._check(source, tag, may_be_any=True)
        try:
            message = _found(self._state.comm, source, tag, waits)
        except GpucollError as error:
            raise self._failed(error) from None
        if message is None:
            return False
        if status is not None:
            status.fill(message.source, message.tag, message.size_bytes)
        return True

    def Mprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message:
        """Wait for a message and take it, so that no other receive can get it."""
        return cast(Message, self._taken(source, tag, status, True))

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Take a message if there is one."""
        return self._taken(source, tag, status, False)

    mprobe, improbe = Mprobe, Improbe

    def _taken(self, source: int, tag: int, status: Status | None, waits: bool) -> Message | None:
        if source == PROC_NULL:
            if status is not None:
                status.fill_null()
            return Message(MESSAGE_NO_PROC)
        source, tag = self._check(source, tag, may_be_any=True)
        try:
            found = _received(self._state.comm, source, tag, waits)
        except GpucollError as error:
            raise self._failed(error) from None
        if found is None:
            return None
        made = Message.holding(*found)
        made._fill(status)
        return made


def _found(comm: AnyComm, source: int, tag: int, waits: bool) -> gpucoll.Message | None:
    """Return the message that a receive would get; None if there is none and `waits` is False.

    While another thread is in a call, this one cannot wait in gpucoll, so it polls.
    """
    message: gpucoll.Message | None
    if waits:
        try:
            message = comm.probe(source, tag)
            return message
        except gpucoll.StateError:
            if comm.is_closed:
                raise
    until_s, pause_s = time.monotonic() + waiting_s(), _SHORTEST_PAUSE_S
    while (message := comm.probe(source, tag, wait=False)) is None and waits:
        if time.monotonic() > until_s:
            raise gpucoll.DeadlineError(
                f"probe(source={source}, tag={tag}): no such message arrived within "
                f"{waiting_s():g} s, during which other threads were in calls on this communicator"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return message


def _received(
    comm: AnyComm, source: int, tag: int, waits: bool
) -> tuple[AnyArray, int, int] | None:
    """Receive the message that a probe finds; return its data, source and tag."""
    while (message := _found(comm, source, tag, waits)) is not None:
        try:
            return message.recv(async_op=True).wait(), message.source, message.tag
        except gpucoll.StateError:  # another thread has received the message meanwhile
            if comm.is_closed:
                raise
    return None


class _Both:
    """The work of several requests; it is complete when all are."""

    def __init__(self, requests: tuple[Request, ...]) -> None:
        self._requests = requests
        self._works = [request._core for request in requests]

    @staticmethod
    def of(*requests: Request) -> Request:
        """Return a request for several; its status is that of the first."""
        return Request._started(_Both(requests))

    @property
    def message(self) -> gpucoll.Message | None:
        """The message that the first request received."""
        return getattr(self._works[0], "message", None)

    def done(self) -> bool:
        """Return whether all are done."""
        return all([work.done() for work in self._works])  # noqa: C419  # each is asked

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all."""
        for request in self._requests:
            request._conclude(None)

    def synchronize(self) -> None:
        """Wait for all."""
        self.wait()
