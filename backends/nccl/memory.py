"""Memory that the library can use without a copy: allocated by it, or registered with it.

Registered buffers let NCCL move data straight between GPUs (NVLink, NVLink SHARP, GPUDirect RDMA)
where it otherwise goes through buffers of its own. Memory of ncclMemAlloc has the properties that
every such way needs.

Who dies first does not matter. An array that dies hands its memory to `Registrations`, which gives
it back at its next call: garbage may be collected anywhere, inside a group or while a graph is
captured, where the library may not be called. When the communicator goes first, its registrations
end with it, and memory is given back when the last array on it dies. At the interpreter's end
nothing is called any more: the driver takes everything back with the process.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from typing import Any

from gpucoll.arrays.device_array import DeviceArray
from gpucoll.backends.nccl.library import Library
from gpucoll.backends.nccl.prototypes import (
    NCCL_WIN_COLL_SYMMETRIC,
    NCCL_WIN_REQUIRED_ALIGNMENT,
)
from gpucoll.devices import Device
from gpucoll.errors import GpucollError, StateError

__all__ = ["Memory", "Registration", "Registrations"]


class Memory:
    """A piece of GPU memory of ncclMemAlloc; whatever stands on it must hold it.

    Attributes
    ----------
    address, size_bytes : int
        Where it lies; at least as large as asked for.
    registration : Registration, optional
        With the communicator that it was made for; None where the library has no registration.
    """

    def __init__(self, device: Device, address: int, size_bytes: int) -> None:
        self.device = device
        self.address = address
        self.size_bytes = size_bytes
        self.registration: Registration | None = None

    def array(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Return an array over the beginning of this memory; it keeps the memory alive."""
        return DeviceArray(self.address, shape, dtype, self.device.label, self)


class Registration:
    """A piece of memory that a communicator knows."""

    def __init__(self, registrations: Registrations, handle: int, is_symmetric: bool) -> None:
        self._registrations = registrations
        self.handle = handle
        self.is_symmetric = is_symmetric

    @property
    def is_open(self) -> bool:
        """Whether the communicator still knows the memory."""
        return self in self._registrations.open

    def close(self) -> None:
        """End it; nothing where it has ended already. The memory stays."""
        self._registrations.end(self)


class Registrations:
    """What a communicator knows of memory, and the memory that was allocated for it.

    Every method belongs to the communicator's thread, outside of groups and captures.

    Parameters
    ----------
    library : Library
        The communicator's library.
    device : Device
        The communicator's device.
    communicator : int
        The communicator's handle. `close` must come before it is destroyed or aborted, and
        `collect` after that.
    """

    def __init__(self, library: Library, device: Device, communicator: int) -> None:
        self.library = library
        self.device = device
        self._communicator = communicator
        self._dead: deque[tuple[int, Registration | None]] = deque()
        self._is_closed = False
        self.open: set[Registration] = set()

    # --- memory of the library --------------------------------------------------------------------

    def allocate(self, size_bytes: int, *, is_symmetric: bool = False) -> Memory:
        """Return new memory, registered with the communicator where the library can.

        Parameters
        ----------
        size_bytes : int
            At least as much is taken, in whole pages of the GPU (2 MiB on most).
        is_symmetric : bool
            Whether it becomes a part of a symmetric window (NCCL 2.27 and newer). That call is
            collective: every rank makes it, in the same order and of the same size.

        Raises
        ------
        MemoryError
            The GPU has no more.
        StateError
            The communicator is closed.
        """
        self._check_open("allocate memory")
        self.collect()
        size_bytes = _whole_pages(size_bytes)
        address = self._allocate(size_bytes)
        memory = Memory(self.device, address, size_bytes)
        try:
            memory.registration = self._register(address, size_bytes, is_symmetric)
        except BaseException:
            self._free(address)
            raise
        # A reference to `memory` itself would keep it alive.
        finalizer = weakref.finalize(memory, self._bury, address, memory.registration, os.getpid())
        finalizer.atexit = False
        return memory

    def _allocate(self, size_bytes: int) -> int:
        if not self.library.has("ncclMemFree"):
            return self.device.allocate(size_bytes)
        made = ctypes.c_void_p()
        with self.device:
            code = self.library.functions.ncclMemAlloc(ctypes.byref(made), size_bytes)
        if code:
            free, total = self.device.memory_bytes()
            error = self.library.error(code, f"ncclMemAlloc of {size_bytes} bytes")
            if free < size_bytes:
                text = f"{self.device.label}: {error}; {free} of {total} bytes are free"
                raise MemoryError(text) from None
            raise error
        return made.value or 0

    def _free(self, address: int) -> None:
        if not self.library.has("ncclMemFree"):
            self.device.free(address)
            return
        with self.device:
            self.library.check(self.library.functions.ncclMemFree(address), "ncclMemFree")

    def _bury(self, address: int, registration: Registration | None, process: int) -> None:
        """Take over memory whose last user is gone; called by the garbage collector, anywhere."""
        if process != os.getpid():  # a forked child: the GPU's memory is the parent's
            return
        self._dead.append((address, registration))
        if self._is_closed:
            self.collect()

    def collect(self) -> None:
        """Give back the memory whose arrays are gone.

        Where there is such memory, it waits for everything on the GPU first, as cudaFree does: the
        library unmaps memory at once, and kernels of the user's may still be on their way to it.
        """
        if self._dead:
            self.device.synchronize()
        while self._dead:
            address, registration = self._dead.popleft()
            if registration is not None:
                self.end(registration)
            self._free(address)

    # --- registering ------------------------------------------------------------------------------

    def register(
        self, address: int, size_bytes: int, *, is_symmetric: bool = False
    ) -> Registration | None:
        """Register memory of the user's; None where the library cannot.

        The caller keeps the memory alive until the registration is closed.

        Raises
        ------
        StateError
            The communicator is closed.
        BackendError
            The library refuses this memory, in its own words.
        """
        self._check_open("register memory")
        self.collect()
        return self._register(address, size_bytes, is_symmetric)

    def _register(self, address: int, size_bytes: int, is_symmetric: bool) -> Registration | None:
        is_symmetric = is_symmetric and self.library.has("ncclCommWindowRegister")
        name = "ncclCommWindowRegister" if is_symmetric else "ncclCommRegister"
        if not self.library.has(name):
            return None
        made = ctypes.c_void_p()
        arguments: list[Any] = [self._communicator, address, size_bytes, ctypes.byref(made)]
        if is_symmetric:
            arguments.append(NCCL_WIN_COLL_SYMMETRIC)
        with self.device:
            code = getattr(self.library.functions, name)(*arguments)
        self.library.check(code, f"{name} of {size_bytes} bytes", self._communicator)
        if not made.value:  # NCCL declines quietly where registration is of no use to it
            return None
        registration = Registration(self, made.value, is_symmetric)
        self.open.add(registration)
        return registration

    def end(self, registration: Registration) -> None:
        """End a registration; nothing where it has ended already."""
        if registration not in self.open:
            return
        self.open.remove(registration)
        kind = "Window" if registration.is_symmetric else ""
        name = f"ncclComm{kind}Deregister"
        with self.device:
            code = getattr(self.library.functions, name)(self._communicator, registration.handle)
        self.library.check(code, name, self._communicator)

    def close(self) -> None:
        """End every registration. What the communicator makes of it no longer matters.

        Memory is not given back here: that would wait for kernels that may hang until the
        communicator is aborted. `collect` does so afterwards.
        """
        self._is_closed = True
        for registration in tuple(self.open):
            try:
                self.end(registration)
            except GpucollError:
                pass

    def _check_open(self, what: str) -> None:
        if self._is_closed:
            raise StateError(f"cannot {what}: the communicator is closed")


def _whole_pages(size_bytes: int) -> int:
    """Return the size as windows need it: their beginning and their size are whole pages."""
    page = NCCL_WIN_REQUIRED_ALIGNMENT
    return max(-(-size_bytes // page), 1) * page
