"""A communicator of NCCL or RCCL: made, split and closed without ever blocking for ever.

It is made with ``blocking=0``: every call returns immediately. A call in progress is polled under
the communicator's deadline, while the other ranks are watched and Ctrl-C works.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable

from gpucoll.backends.nccl.library import IN_PROGRESS, Library
from gpucoll.backends.nccl.prototypes import (
    NCCL_SPLIT_NOCOLOR,
    configuration,
    ncclScalarResidence_t,
    ncclUniqueId,
)
from gpucoll.devices import Device
from gpucoll.errors import GpucollError

_PAUSES_S = (20e-6, 2e-3)
"""First and longest pause between two looks."""
_SHORT_S = 1e-3
"""How long a call in progress is polled without a pause: most calls take less."""
_KEPT_OPERATIONS = 64
"""How many premultiplied sums a communicator keeps."""
_GRAPHS_S = 1.0
"""How long to wait for an abort if graphs may keep it from ending."""
_ABORT_S = 20.0
"""How long to wait otherwise: the abort waits for the GPU, which other work may block."""

Watch = Callable[[], None]
"""Called while something is in progress; raises an error that makes waiting pointless."""


class NcclCommunicator:
    """One rank's handle of a communicator.

    Parameters
    ----------
    library : Library
        The library that made it.
    device : Device
        This rank's GPU.
    handle : int
        ``ncclComm_t``.
    """

    def __init__(self, library: Library, device: Device, handle: int) -> None:
        self.library = library
        self.device = device
        self.handle = handle
        self.is_in_graphs = False
        """Whether calls were captured: the library does not close before such graphs are gone."""
        self._aborting: threading.Thread | None = None
        self._operations: dict[tuple[bytes, int], int] = {}
        self._children: list[ctypes.c_void_p] = []
        """Handles of splits that this rank did not wait for to the end."""

    @staticmethod
    def join(
        library: Library, device: Device, unique_id: bytes, world_size: int, rank: int, watch: Watch
    ) -> NcclCommunicator:
        """Make a communicator together with the other ranks.

        Raises
        ------
        BackendUnavailableError
            The library cannot make it; the text is the library's own.
        """
        handle = ctypes.c_void_p()
        with device:
            code = library.functions.ncclCommInitRankConfig(
                ctypes.byref(handle),
                world_size,
                ncclUniqueId.from_buffer_copy(unique_id),
                rank,
                ctypes.byref(configuration(is_blocking=False)),
            )
            made = NcclCommunicator(library, device, handle.value or 0)
            made._finish_making(code, "ncclCommInitRankConfig", watch)
        return made

    def _finish_making(self, code: int, what: str, watch: Watch) -> None:
        """Wait until this new communicator is ready; abort it if that fails."""
        try:
            if code in (0, IN_PROGRESS) and self.handle:
                code = self.settle(IN_PROGRESS, watch)
            if code or not self.handle:
                raise self.library.unavailable(code, what, self.handle)
        except BaseException:
            self.abort()
            raise

    def split(self, color: int | None, key: int, watch: Watch) -> NcclCommunicator | None:
        """Divide the communicator by color, 0 or more; every rank calls this.

        Ranks of one color come together and are numbered by key. A rank with the color None joins
        no communicator and gets None.
        """
        handle = ctypes.c_void_p()
        self._children.append(handle)  # the library may still make it after the wait has failed
        with self.device:
            code = self.library.functions.ncclCommSplit(
                self.handle,
                NCCL_SPLIT_NOCOLOR if color is None else color,
                key,
                ctypes.byref(handle),
                ctypes.byref(configuration(is_blocking=False)),
            )
            # The library fills in the new handle once the old communicator has got that far.
            code = self.settle(code, watch)
            if color is None:
                if code:
                    raise self.library.unavailable(code, "ncclCommSplit", self.handle)
                return None
            made = NcclCommunicator(self.library, self.device, handle.value or 0)
            if made.handle:
                self._children.pop()
            made._finish_making(code, "ncclCommSplit", watch)
        return made

    def settle(self, code: int, watch: Watch) -> int:
        """Wait while something is in progress; return 0, or the code of the error.

        The code 0 alone does not mean success: ncclCommSplit, and ncclCommWindowRegister from NCCL
        2.28 on, return it when they have only begun. They fill in their results when they are done.
        """
        pause_s, longest_s = _PAUSES_S
        begun_s = time.monotonic()
        while code in (0, IN_PROGRESS):
            code = self.library.async_error(self.handle)
            if code != IN_PROGRESS:
                break
            if time.monotonic() - begun_s < _SHORT_S:
                os.sched_yield()
                continue
            watch()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return code

    def failure(self) -> GpucollError | None:
        """Return a failure of earlier work as an error, or None."""
        code = self.library.async_error(self.handle)
        if code in (0, IN_PROGRESS):
            return None
        return self.library.error(code, "an asynchronous error", self.handle)

    def premultiplied_sum(self, factor: bytes, element_type: int) -> int:
        """Return the op that multiplies by one element's bytes before it sums."""
        key = factor, element_type
        if key not in self._operations:
            made = ctypes.c_int()
            code = self.library.functions.ncclRedOpCreatePreMulSum(
                ctypes.byref(made),
                ctypes.create_string_buffer(factor, len(factor)),
                element_type,
                int(ncclScalarResidence_t.ncclScalarHostImmediate),
                self.handle,
            )
            self.library.check(code, "ncclRedOpCreatePreMulSum", self.handle)
            self._operations[key] = made.value
        return self._operations[key]

    def forget_old_operations(self) -> None:
        """Destroy the oldest ops of `premultiplied_sum` beyond those that are kept.

        Call it only after everything is enqueued: the library reuses the number of a destroyed op
        for the next one. Enqueued work has its own copy of the op.
        """
        while len(self._operations) > _KEPT_OPERATIONS:
            self._forget_operation(next(iter(self._operations)))

    def _forget_operation(self, key: tuple[bytes, int]) -> None:
        self.library.functions.ncclRedOpDestroy(self._operations.pop(key), self.handle)

    def close(self, watch: Watch) -> None:
        """Close it; all its work must be done. Abort it instead if `watch` raises."""
        if not self.handle:
            return
        functions = self.library.functions
        with self.device:
            try:
                for key in list(self._operations):
                    self._forget_operation(key)
                code = self.settle(functions.ncclCommFinalize(self.handle), watch)
            except BaseException:
                self.abort()
                raise
            if code:  # one that is not ready (a split that failed) can only be aborted
                self.abort()
                return
            handle, self.handle = self.handle, 0
            functions.ncclCommDestroy(handle)
        self._abort_children()

    def abort(self) -> bool:
        """End it and its work whatever others do; return False if the GPU hangs.

        ncclCommAbort may wait for ever: for the last graph in which its calls were captured, and
        for the GPU, on which other work may hang. So a thread makes the call.
        """
        handle, self.handle = self.handle, 0
        if handle:
            self._aborting = threading.Thread(
                target=self._abort, args=(handle,), name="gpucoll-abort", daemon=True
            )
            self._aborting.start()
            self._aborting.join(_GRAPHS_S if self.is_in_graphs else _ABORT_S)
            self._abort_children()
        return self._aborting is None or self.is_in_graphs or not self._aborting.is_alive()

    def _abort_children(self) -> None:
        """End communicators of splits that were made although this rank did not wait for them."""
        while self._children:
            if address := self._children.pop().value:
                NcclCommunicator(self.library, self.device, address).abort()

    def _abort(self, handle: int) -> None:
        with contextlib.suppress(GpucollError), self.device, self.device.relaxed_capture():
            self.library.functions.ncclCommAbort(handle)
