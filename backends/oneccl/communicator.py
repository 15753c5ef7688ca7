"""A communicator of oneCCL: made and closed by a thread of its own, given up instead of aborted."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

from gpucoll.backends.choice import HOST_DEVICE
from gpucoll.backends.nccl.communicator import NcclCommunicator
from gpucoll.backends.nccl.library import Library
from gpucoll.backends.oneccl.library import spelled
from gpucoll.backends.oneccl.thread import LibraryThread, Watch
from gpucoll.devices import Device
from gpucoll.errors import GpucollError

_ENDING_S = 1.0
_left: list[object] = []
"""What calls that hang may still write."""


class OneCclCommunicator(NcclCommunicator):
    """One rank's handle of a communicator, and the thread that makes its calls.

    Parameters
    ----------
    library, device, handle
        As for `NcclCommunicator`.
    thread : LibraryThread
        The thread that made it.
    """

    def __init__(
        self, library: Library, device: Device, handle: int, thread: LibraryThread
    ) -> None:
        super().__init__(library, device, handle)
        self.thread = thread
        self.held: Callable[[], Sequence[object]] = tuple
        """Returns the arrays of calls under way."""
        self._goes_on = False

    @staticmethod
    def join(
        library: Library, device: Device, unique_id: bytes, world_size: int, rank: int, watch: Watch
    ) -> OneCclCommunicator:
        """Make a communicator together with the other ranks.

        Raises
        ------
        BackendUnavailableError
            The library cannot make it; the text is the library's own.
        """
        thread, handle = LibraryThread(), ctypes.c_void_p()
        failed = "onecclCommInitRank"

        def make() -> int:
            nonlocal failed
            functions = library.functions
            # Host memory has no device to set: the CPU plug-in lacks the function.
            if device.kind != HOST_DEVICE and (code := functions.onecclSetDevice(device.number)):
                failed = "onecclSetDevice"
                return int(code)
            id_ = library.vendor.unique_id.from_buffer_copy(unique_id)
            return int(functions.ncclCommInitRank(ctypes.byref(handle), world_size, id_, rank))

        code = thread.call(make, watch)
        if code or not handle.value:
            thread.give_up()
            raise library.unavailable(code, failed)
        return OneCclCommunicator(library, device, handle.value, thread)

    def settle(self, code: int, watch: Watch) -> int:
        """Return the code: no call of this library goes on after it has returned."""
        return code

    def failure(self) -> GpucollError | None:
        """Return the failure of an earlier call on a stream as an error, or None."""
        if (job := self.thread.failed) is None:
            return None
        return self.library.error(job.code, spelled(job.what), self.handle)

    def close(self, watch: Watch) -> None:
        """Close it; all its work must be done. Give it up instead if `watch` raises."""
        if not self.handle:
            return
        functions, (handle, self.handle) = self.library.functions, (self.handle, 0)
        for operation in self._operations.values():
            functions.ncclRedOpDestroy(operation, handle)
        self._operations.clear()
        if not self.thread.call(partial(functions.ncclCommFinalize, handle), watch):
            self.thread.call(partial(functions.ncclCommDestroy, handle), watch)
        self.thread.stop(_ENDING_S)

    def abort(self) -> bool:
        """Give it up; return False if calls go on, which nothing can end.

        A call may hang in the library; on a GPU, work may be left on a queue. The arrays that they
        may still write are kept until the process ends.
        """
        handle, self.handle = self.handle, 0
        self.thread.give_up()
        if handle:
            held = self.held()
            is_on_queue = bool(held) and self.device.kind != HOST_DEVICE
            self._goes_on = self.thread.is_calling or is_on_queue
            if self._goes_on:
                _left.append(held)
        return not self._goes_on
