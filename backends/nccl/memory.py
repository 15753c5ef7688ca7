"""Memory that the library can use without a copy: allocated by it, or registered with it.

With registered buffers NCCL can move data directly between GPUs (NVLink, NVLink SHARP, GPUDirect
RDMA); otherwise it goes through NCCL's own buffers. Memory of ncclMemAlloc has the properties that
all of these paths need.

Arrays and communicator may die in any order. An array that dies hands its memory to
`Registrations`, which frees it when `collect` is called. Garbage may be collected anywhere, inside
a group or while a graph is captured, and the library may not be called there. If the communicator
dies first, its registrations end with it. Memory whose last array dies after that is left to the
process's other communicators (`gpucoll.backends.gpu.abandoned`), because freeing it waits for the
whole GPU and would end any capture under way on it, in every thread and mode. At the interpreter's
end nothing is called any more: the driver frees everything with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any

from gpucoll.arrays.device_array import DeviceArray
from gpucoll.backends.gpu import abandoned
from gpucoll.backends.nccl.library import Library
from gpucoll.backends.nccl.prototypes import NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_REQUIRED_ALIGNMENT
from gpucoll.devices import Device
from gpucoll.errors import GpucollError, StateError

UNGUARDED = contextlib.nullcontext()
_IDLE_S = 2.0
"""How long the GPU has to finish its present work before other work is done."""


def _take(library: Library, device: Device, size_bytes: int) -> int:
    """Return the address of new memory.

    Raises
    ------
    MemoryError
        The GPU has too little free memory.
    BackendError
        The library fails for another reason.
    """
    if not library.has("ncclMemFree"):
        return device.allocate(size_bytes)
    made = ctypes.c_void_p()
    with device:
        code = library.functions.ncclMemAlloc(ctypes.byref(made), size_bytes)
    if code:
        free, total = device.memory_bytes()
        error = library.error(code, f"ncclMemAlloc of {size_bytes} bytes")
        if free < size_bytes:
            text = f"{device.label}: {error}; {free} of {total} bytes are free"
            raise MemoryError(text) from None
        raise error
    return made.value or 0


def _give_back(library: Library, device: Device, address: int) -> None:
    """Free memory of `take` that nothing on the GPU uses any more."""
    if not library.has("ncclMemFree"):
        device.free(address)
        return
    with device:
        library.check(library.functions.ncclMemFree(address), "ncclMemFree")


def _whole_pages(size_bytes: int) -> int:
    """Return the size rounded up to whole pages: windows must begin and end at page boundaries."""
    page = NCCL_WIN_REQUIRED_ALIGNMENT
    return max(-(-size_bytes // page), 1) * page


class Memory:
    """A piece of GPU memory of ncclMemAlloc; everything that uses it must hold this object.

    Attributes
    ----------
    address, size_bytes : int
        Its address, and its size, which is at least the requested one.
    held : list of Registration
        Its registrations with the communicator for which it was made; empty if the library has no
        registration.
    """

    def __init__(self, device: Device, address: int, size_bytes: int) -> None:
        self.device = device
        self.address = address
        self.size_bytes = size_bytes
        self.held: list[Registration] = []

    def array(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Return an array over the beginning of this memory; it keeps the memory alive."""
        return DeviceArray(self.address, shape, dtype, self.device.label, self)


class Registration:
    """A piece of memory that is registered with a communicator."""

    def __init__(self, registrations: Registrations, handle: int, window: int) -> None:
        self._registrations = registrations
        self.handle = handle
        self.window = window
        """Its number among the communicator's symmetric windows, from 1; 0: it is none."""

    @property
    def is_open(self) -> bool:
        """Whether the memory is still registered with the communicator."""
        return self in self._registrations.open

    def close(self) -> None:
        """End the registration if it has not ended yet. The memory stays."""
        self._registrations.deregister(self)


class Registrations:
    """The memory registered with a communicator, and the memory allocated for it.

    Call every method from the communicator's thread, outside of groups and captures.

    Parameters
    ----------
    library : Library
        The communicator's library.
    device : Device
        The communicator's device.
    communicator : int
        The communicator's handle. Call `close` before it is destroyed or aborted, and `collect`
        after that.
    """

    def __init__(self, library: Library, device: Device, communicator: int) -> None:
        self.library = library
        self.device = device
        self._communicator = communicator
        self._dead: deque[tuple[int, list[Registration]]] = deque()
        self._is_closed = False
        self._window: ctypes.c_void_p | None = None
        self._n_windows = 0
        self.open: set[Registration] = set()

    # --- memory of the library --------------------------------------------------------------------

    def allocate(self, size_bytes: int, *, is_registered: bool = True) -> Memory:
        """Return new memory, registered with the communicator if the library can do that.

        Parameters
        ----------
        size_bytes : int
            The size; it is rounded up to whole pages of the GPU (2 MiB on most).
        is_registered : bool
            Whether to register it; `register_window` does so for a window.

        Raises
        ------
        MemoryError
            The GPU has too little free memory.
        StateError
            The communicator is closed.
        """
        self._check_open("allocate memory")
        size_bytes = _whole_pages(size_bytes)
        address = _take(self.library, self.device, size_bytes)
        memory = Memory(self.device, address, size_bytes)
        # A reference to `memory` itself would keep it alive.
        finalizer = weakref.finalize(memory, self._bury, address, memory.held, os.getpid())
        finalizer.atexit = False
        if is_registered:
            self.register_memory(memory)
        return memory

    def _bury(self, address: int, held: list[Registration], process: int) -> None:
        """Take over memory whose last user is gone; the garbage collector calls this anywhere."""
        if process != os.getpid():  # a forked child: the GPU's memory is the parent's
            return
        self._dead.append((address, held))
        if self._is_closed:  # it will not collect by itself any more
            abandoned.leave(self)

    def end(self) -> None:
        """Free memory that died after the communicator, for `abandoned`.

        A thread does it, for which nothing waits long: the GPU's present work may depend on this
        rank going on.
        """
        if not self._dead:
            return
        thread = threading.Thread(target=self._collect_all, name="gpucoll-memory", daemon=True)
        thread.start()
        thread.join(_IDLE_S)

    def _collect_all(self) -> None:
        with contextlib.suppress(GpucollError):  # a GPU that has failed frees nothing
            self.collect()

    def collect(
        self, lock: AbstractContextManager[Any] = UNGUARDED, windows: Container[int] = ()
    ) -> None:
        """Free the memory whose arrays are gone; of open windows, only those in `windows`.

        If there is such memory, this first waits for all work on the GPU, as cudaFree does. The
        library unmaps memory immediately, but kernels of the user may be about to use it.

        Parameters
        ----------
        lock : context manager
            Held around calls of the library, but not while waiting. The GPU's work may end only
            when another thread gives the communicator up, and that thread needs the lock.
        windows : container of int
            Symmetric windows that all ranks end now.
        """
        dead = self._take_dead(windows)  # the wait below does not cover memory that dies later
        if not dead:
            return
        try:
            self.device.synchronize()
        except BaseException:
            self._dead.extend(dead)
            raise
        with lock:
            for address, held in dead:
                for registration in held:
                    self.deregister(registration)
                _give_back(self.library, self.device, address)

    def _take_dead(self, windows: Container[int]) -> list[tuple[int, list[Registration]]]:
        """Return memory that nothing uses any more; another thread may take part of it, too."""
        taken: list[tuple[int, list[Registration]]] = []
        kept: list[tuple[int, list[Registration]]] = []
        with contextlib.suppress(IndexError):
            while True:
                _, held = piece = self._dead.popleft()
                may_go = all(window in windows for window in _open_windows(held))
                (taken if may_go else kept).append(piece)
        self._dead.extend(kept)
        return taken

    @property
    def dead_windows(self) -> list[int]:
        """Return the numbers of the windows that this rank no longer uses."""
        return [window for _, held in tuple(self._dead) for window in _open_windows(held)]

    # --- registering ------------------------------------------------------------------------------

    def register(self, address: int, size_bytes: int) -> Registration | None:
        """Register memory of the user; return None if the library cannot do that.

        The caller keeps the memory alive until the registration is closed.

        Raises
        ------
        StateError
            The communicator is closed.
        BackendError
            The library refuses this memory; the text is the library's own.
        """
        self._check_open("register memory")
        if not self.library.has("ncclCommRegister"):
            return None
        made = ctypes.c_void_p()
        with self.device:
            code = self.library.functions.ncclCommRegister(
                self._communicator, address, size_bytes, ctypes.byref(made)
            )
        self.library.check(code, f"ncclCommRegister of {size_bytes} bytes", self._communicator)
        return self._opened(made)

    def register_memory(self, memory: Memory) -> None:
        """Register memory of `allocate`, if the library can do that."""
        registration = self.register(memory.address, memory.size_bytes)
        if registration is not None:
            memory.held.append(registration)

    def register_window(self, memory: Memory, settle: Callable[[int], int]) -> None:
        """Make memory of `allocate` a part of a symmetric window (NCCL 2.27 and newer).

        Collective: every rank calls it, in the same order and with memory of the same size.

        Parameters
        ----------
        memory : Memory
            Not registered yet.
        settle : callable
            Waits, under a deadline, while the library reports that it is in progress; returns the
            final code.
        """
        made = self._window = ctypes.c_void_p()  # kept, because it is filled in when it has settled
        with self.device:
            code = self.library.functions.ncclCommWindowRegister(
                self._communicator,
                memory.address,
                memory.size_bytes,
                ctypes.byref(made),
                NCCL_WIN_COLL_SYMMETRIC,
            )
            code = settle(code)
        what = f"ncclCommWindowRegister of {memory.size_bytes} bytes"
        self.library.check(code, what, self._communicator)
        self._n_windows += 1
        registration = self._opened(made, self._n_windows)
        if registration is not None:
            memory.held.append(registration)

    def _opened(self, handle: ctypes.c_void_p, window: int = 0) -> Registration | None:
        if not handle.value:  # NCCL returns no handle if registration is of no use to it
            return None
        registration = Registration(self, handle.value, window)
        self.open.add(registration)
        return registration

    def deregister(self, registration: Registration) -> None:
        """End a registration if it has not ended yet."""
        if registration not in self.open:
            return
        self.open.remove(registration)
        kind = "Window" if registration.window else ""
        name = f"ncclComm{kind}Deregister"
        with self.device:
            code = getattr(self.library.functions, name)(self._communicator, registration.handle)
        self.library.check(code, name, self._communicator)

    def close(self, *, is_aborting: bool = False) -> None:
        """End every registration; errors of the communicator no longer matter.

        Memory is not freed here: that would wait for kernels that may hang until the communicator
        is aborted. `collect` frees it afterwards.

        Parameters
        ----------
        is_aborting : bool
            The communicator is about to be aborted. Any other call on it may hang, and the abort
            ends its registrations anyway.
        """
        self._is_closed = True
        if is_aborting:
            self.open.clear()
        for registration in tuple(self.open):
            try:
                self.deregister(registration)
            except GpucollError:
                pass

    def _check_open(self, what: str) -> None:
        if self._is_closed:
            raise StateError(f"cannot {what}: the communicator is closed")


def _open_windows(held: list[Registration]) -> list[int]:
    return [
        registration.window for registration in held if registration.window and registration.is_open
    ]
