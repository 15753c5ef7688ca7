"""Messages and collectives of Python objects: the lower-case methods."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gpucoll import GpucollError, UsageError
from gpucoll.integrations.mpi4py import objects
from gpucoll.integrations.mpi4py.calls import checked_root
from gpucoll.integrations.mpi4py.constants import ANY_SOURCE, ANY_TAG, PROC_NULL, TAG_UPPER_BOUND
from gpucoll.integrations.mpi4py.errors import Exception, argument_error
from gpucoll.integrations.mpi4py.objects import dumped, loaded
from gpucoll.integrations.mpi4py.operations import SUM, ObjectOp, python_function
from gpucoll.integrations.mpi4py.requests import After, Finished, Request
from gpucoll.integrations.mpi4py.status import Status

if TYPE_CHECKING:
    from gpucoll.calls.given import AnyObject
    from gpucoll.integrations.mpi4py.communicator import Comm
    from gpucoll.integrations.mpi4py.typing import Buffer

_C = TypeVar("_C", bound="Comm")
_NULL = After(loads=lambda _: None, is_null=True)
_LOADS = After(loads=loaded)


class ObjectCalls:
    """The methods of `Comm` on objects. An object travels as an ordinary message of bytes."""

    _state: Any
    _failed: Callable[[GpucollError], Exception]
    _send: Any
    _recv: Any
    _check: Any
    _start_send: Any
    _start_recv: Any
    _send_copy: Any
    rank: Any
    size: Any

    # --- messages ---------------------------------------------------------------------------------

    def send(self, obj: AnyObject, dest: int, tag: int = 0) -> None:
        """Send an object."""
        if dest == PROC_NULL:
            return
        data = dumped(obj)
        try:
            self._send(data, dest, tag)
        except (
            UsageError
        ):  # another thread is in a call, or an argument is wrong: this path reports it
            self._start_send(data, dest, tag).Wait()
        except GpucollError as error:
            raise self._failed(error) from None

    def bsend(self, obj: AnyObject, dest: int, tag: int = 0) -> None:
        """Send an object; return at once."""
        self.ibsend(obj, dest, tag)

    def ssend(self, obj: AnyObject, dest: int, tag: int = 0) -> None:
        """Send an object; return when it has been received."""
        self.issend(obj, dest, tag).Wait()

    def isend(self, obj: AnyObject, dest: int, tag: int = 0) -> Request:
        """Start sending an object."""
        data = None if dest == PROC_NULL else dumped(obj)
        return cast(Request, self._start_send(data, dest, tag))

    def issend(self, obj: AnyObject, dest: int, tag: int = 0) -> Request:
        """Start sending an object; the request is complete when it has been received."""
        data = None if dest == PROC_NULL else dumped(obj)
        return cast(Request, self._start_send(data, dest, tag, synchronous=True))

    def ibsend(self, obj: AnyObject, dest: int, tag: int = 0) -> Request:
        """Start sending an object; the request is complete at once."""
        return cast(Request, self._send_copy(None if dest == PROC_NULL else dumped(obj), dest, tag))

    def recv(
        self,
        buf: Buffer | None = None,
        source: int = ANY_SOURCE,
        tag: int = ANY_TAG,
        status: Status | None = None,
    ) -> AnyObject:
        """Receive an object; `buf` is not needed."""
        if buf is not None:
            warnings.warn("recv: the buffer is not used", UserWarning, stacklevel=2)
        if status is None and source != PROC_NULL:
            try:
                return loaded(self._recv(None, source, tag))
            except UsageError:
                pass  # another thread is in a call, or an argument is wrong
            except GpucollError as error:
                raise self._failed(error) from None
        return self.irecv(buf, source, tag).wait(status)

    def irecv(
        self, buf: Buffer | None = None, source: int = ANY_SOURCE, tag: int = ANY_TAG
    ) -> Request:
        """Start receiving an object; `buf` is not needed."""
        if source == PROC_NULL:
            return Request._started(Finished(), _NULL)
        source, tag = self._check(source, tag, may_be_any=True)
        return cast(Request, self._start_recv(None, source, tag, _LOADS))

    def sendrecv(
        self,
        sendobj: AnyObject,
        dest: int,
        sendtag: int = 0,
        recvbuf: Buffer | None = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> AnyObject:
        """Send an object and receive one."""
        receive = self.irecv(recvbuf, source, recvtag)
        send = self.isend(sendobj, dest, sendtag)
        value = receive.wait(status)
        send.Wait()
        return value

    # --- collectives ------------------------------------------------------------------------------

    def _of_objects(self, function: Callable[..., AnyObject], *given: object) -> AnyObject:
        try:
            return function(self._state.comm, *given)
        except GpucollError as error:
            raise self._failed(error) from None

    def bcast(self, obj: AnyObject, root: int = 0) -> AnyObject:
        """Return the root's object."""
        root = checked_root(self, root)
        return self._of_objects(objects.bcast, obj, root)

    def gather(self, sendobj: AnyObject, root: int = 0) -> list[AnyObject] | None:
        """Return all objects on the root, None elsewhere."""
        root = checked_root(self, root)
        return cast("list[Any] | None", self._of_objects(objects.gather, sendobj, root))

    def scatter(self, sendobj: Sequence[AnyObject] | None, root: int = 0) -> AnyObject:
        """Return this rank's item of the root's list."""
        root = checked_root(self, root)
        return self._of_objects(objects.scatter, sendobj, root)

    def allgather(self, sendobj: AnyObject) -> list[AnyObject]:
        """Return all objects."""
        return cast("list[Any]", self._of_objects(objects.allgather, sendobj))

    def alltoall(self, sendobj: Sequence[AnyObject]) -> list[AnyObject]:
        """Send one object to each rank; return those that arrived."""
        return cast("list[Any]", self._of_objects(objects.alltoall, sendobj))

    def reduce(self, sendobj: AnyObject, op: ObjectOp = SUM, root: int = 0) -> AnyObject:
        """Reduce all objects; return the result on the root, None elsewhere."""
        function = python_function(op)
        values = self.gather(sendobj, root)
        return None if values is None else objects.reduce_all(values, function)

    def allreduce(self, sendobj: AnyObject, op: ObjectOp = SUM) -> AnyObject:
        """Reduce all objects in rank order; return the result."""
        function = python_function(op)
        return objects.reduce_all(self.allgather(sendobj), function)

    def scan(self, sendobj: AnyObject, op: ObjectOp = SUM) -> AnyObject:
        """Reduce the objects of ranks 0 to this one; return the result."""
        function = python_function(op)
        return objects.reduce_all(self.allgather(sendobj)[: self.rank + 1], function)

    def exscan(self, sendobj: AnyObject, op: ObjectOp = SUM) -> AnyObject:
        """Reduce the objects of the ranks before this one; return None on rank 0."""
        function = python_function(op)
        values = self.allgather(sendobj)[: self.rank]
        return objects.reduce_all(values, function) if values else None


def private_of(comm: _C) -> tuple[_C, int]:
    """Return a private duplicate of a communicator, and a new tag.

    The duplicate is made once and freed with its communicator. mpi4py's own Python code uses it for
    the messages of its collectives.
    """
    state = comm._state
    if state.private is None:
        state.private = comm.Dup()
        state.private._state.name = f"a duplicate of {state.name or 'a communicator'}"
    state.n_private = state.n_private % TAG_UPPER_BOUND + 1
    return state.private, state.n_private


def lock_table(comm: Comm) -> dict[Hashable, threading.Lock]:
    """Return a communicator's locks by their keys."""
    if not comm:
        raise argument_error("the communicator is null", "ERR_COMM")
    found: dict[Hashable, threading.Lock] = comm._state.locks
    return found


def lock_of(comm: Comm, key: Hashable | None = None) -> threading.Lock:
    """Return the lock of a communicator for a key."""
    if not comm:
        raise argument_error("the communicator is null", "ERR_COMM")
    found = comm._state.locks.setdefault(key, threading.Lock())
    return cast(threading.Lock, found)
