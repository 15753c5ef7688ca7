"""A communicator of NCCL's or RCCL's: made, split and ended without ever blocking for ever.

It is made with ``blocking=0``: every call returns at once, and one that is still in progress is
polled under the communicator's deadline, while looking at the other ranks and for Ctrl-C.
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
"""So long a call that is in progress is polled without a pause: most take less."""
_KEPT_OPERATIONS = 64
"""How many premultiplied sums a communicator keeps."""
_GRAPHS_S = 1.0
"""How long an abort is waited for where graphs may keep it from ending."""
_ABORT_S = 20.0
"""And otherwise: it waits for the GPU, which may hang for reasons of its own."""

Watch = Callable[[], None]
"""Called while something is in progress; raises what makes waiting vain."""


class NcclCommunicator:
    """One rank's handle of a communicator.

    Parameters
    ----------
    library : Library
        Whose it is.
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
        """Whether calls were captured: the library lets nobody go before such graphs are gone."""
        self._aborting: threading.Thread | None = None
        self._operations: dict[tuple[bytes, int], int] = {}
        self._children: list[ctypes.c_void_p] = []
        """Of splits that this rank has not waited for to the end."""

    @staticmethod
    def join(
        library: Library,
        device: Device,
        unique_id: bytes,
        world_size: int,
        rank: int,
        watch: Watch,
    ) -> NcclCommunicator:
        """Meet the other ranks.

        Raises
        ------
        BackendUnavailableError
            The library cannot: in its own words.
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
        """Wait until this new communicator is there; give it up where it will not be."""
        try:
            if code in (0, IN_PROGRESS) and self.handle:
                code = self.settle(IN_PROGRESS, watch)
            if code or not self.handle:
                raise self.library.unavailable(code, what, self.handle)
        except BaseException:
            self.abort()
            raise

    def split(self, color: int | None, key: int, watch: Watch) -> NcclCommunicator | None:
        """Divide it: every rank calls this; ranks of one color (0 or more) come together.

        Ranks are numbered by key. None takes part in none and gets None.
        """
        handle = ctypes.c_void_p()
        self._children.append(handle)  # the library may still make it where the wait fails
        with self.device:
            code = self.library.functions.ncclCommSplit(
                self.handle,
                NCCL_SPLIT_NOCOLOR if color is None else color,
                key,
                ctypes.byref(handle),
                ctypes.byref(configuration(is_blocking=False)),
            )
            # The new handle is filled in once the old one has got that far.
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
        """Wait while something is in progress; return 0, or the code of what went wrong.

        0 is not believed: ncclCommSplit, and ncclCommWindowRegister from NCCL 2.28 on, return it
        where they have only begun, and fill in what they give when they are done.
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
        """Return what has gone wrong since, as an error; None: nothing."""
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

        Not before everything that was asked for is enqueued: the library gives the number of a
        destroyed op to the next one. What has been enqueued keeps its own copy.
        """
        while len(self._operations) > _KEPT_OPERATIONS:
            self._forget_operation(next(iter(self._operations)))

    def _forget_operation(self, key: tuple[bytes, int]) -> None:
        self.library.functions.ncclRedOpDestroy(self._operations.pop(key), self.handle)

    def close(self, watch: Watch) -> None:
        """Let go of it; everything on it must be done. Ends it by force where `watch` raises."""
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
        """End it and what runs on it, whatever others do; return False where the GPU hangs.

        ncclCommAbort waits without an end: for the last graph that its calls were captured in, and
        for the GPU, on which other work may hang. So it is waited for in a thread.
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
        """End what has come, after all, of splits that this rank did not wait for."""
        while self._children:
            if address := self._children.pop().value:
                NcclCommunicator(self.library, self.device, address).abort()

    def _abort(self, handle: int) -> None:
        with contextlib.suppress(GpucollError), self.device, self.device.relaxed_capture():
            self.library.functions.ncclCommAbort(handle)
