"""`Message`: a message that a matched probe has taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpucoll.integrations.mpi4py.constants import ANY_SOURCE, ANY_TAG, ERROR_CLASSES
from gpucoll.integrations.mpi4py.errors import MismatchError
from gpucoll.integrations.mpi4py.handles import Handle
from gpucoll.integrations.mpi4py.objects import loaded
from gpucoll.integrations.mpi4py.requests import After, Finished, Request
from gpucoll.integrations.mpi4py.specifications import Simple
from gpucoll.integrations.mpi4py.status import Status

if TYPE_CHECKING:
    from typing_extensions import Self

    from gpucoll.arrays.library import AnyArray
    from gpucoll.calls.given import AnyObject
    from gpucoll.integrations.mpi4py.communicator import Comm
    from gpucoll.integrations.mpi4py.typing import BufSpec


class Core:
    """A message's bytes (None if from PROC_NULL), its source and its tag."""

    def __init__(self, data: AnyArray | None, source: int, tag: int) -> None:
        self.data, self.source, self.tag = data, source, tag


class Message(Handle):
    """A message that was taken from the queue and can be received once."""

    @classmethod
    def holding(cls, data: AnyArray | None, source: int, tag: int) -> Self:
        """Return a message of these bytes."""
        return cls._of(Core(np.asarray(data).reshape(-1).view(np.uint8), source, tag))

    def _fill(self, status: Status | None) -> None:
        if status is not None:
            core = self._live("ERR_REQUEST")
            if core.data is None:
                status.fill_null()
            else:
                status.fill(core.source, core.tag, len(core.data))

    @classmethod
    def Probe(
        cls, comm: Comm, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Self:
        """Wait for a message and take it."""
        return cls(comm.Mprobe(source, tag, status))

    @classmethod
    def Iprobe(
        cls, comm: Comm, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Self | None:
        """Take a message if there is one."""
        found = comm.Improbe(source, tag, status)
        return None if found is None else cls(found)

    probe, iprobe = Probe, Iprobe

    def Recv(self, buf: BufSpec, status: Status | None = None) -> None:
        """Receive the message into an array."""
        core = self._live("ERR_REQUEST")
        self._fill(status)
        self._end()
        if core.data is None:
            return
        into = Simple(buf, True)
        row, finish = into.target()
        room = row.view(np.uint8)
        if len(core.data) > len(room):
            raise MismatchError(
                ERROR_CLASSES["ERR_TRUNCATE"],
                f"the message of {len(core.data)} bytes from rank {core.source} is larger than "
                f"the buffer of {len(room)}; it is lost",
            )
        room[: len(core.data)] = core.data
        if finish is not None:
            finish()

    def Irecv(self, buf: BufSpec) -> Request:
        """Receive the message into an array; the request is complete at once."""
        status = Status()
        is_null = self._live("ERR_REQUEST").data is None
        self.Recv(buf, status)
        return _done(status, None, is_null)

    def recv(self, status: Status | None = None) -> AnyObject:
        """Receive the object in the message."""
        core = self._live("ERR_REQUEST")
        self._fill(status)
        self._end()
        return None if core.data is None else loaded(core.data)

    def irecv(self) -> Request:
        """Receive the object in the message; the request is complete at once."""
        status = Status()
        is_null = self._live("ERR_REQUEST").data is None
        return _done(status, self.recv(status), is_null)

    def _end(self) -> None:
        """Become a null handle; the constant MESSAGE_NO_PROC stays as it is."""
        if self is not MESSAGE_NO_PROC:
            self._core = None

    def free(self) -> None:
        """Free it unless it is null."""
        self._end()

    def __reduce__(self) -> tuple[object, ...]:
        if self._core is None:
            return self._reduced("MESSAGE_NULL")
        if self._core is MESSAGE_NO_PROC._core:
            return self._reduced("MESSAGE_NO_PROC")
        raise ValueError("a message cannot be pickled")


class _Taken(Finished):
    """The work of a receive that is complete."""

    def __init__(self, status: Status) -> None:
        self.source, self.tag, self.size_bytes = status.source, status.tag, status.count

    @property
    def message(self) -> Self:  # type: ignore[override]
        """The received message."""
        return self


def _done(status: Status, value: AnyObject, is_null: bool) -> Request:
    work = Finished() if is_null else _Taken(status)
    return Request._started(work, After(loads=lambda _: value, is_null=is_null))


MESSAGE_NULL = Message()
MESSAGE_NO_PROC = Message._of(Core(None, 0, 0))
