"""Memory that the library can use without a copy: allocated by it, or registered with it.

Registered buffers let NCCL move data straight between GPUs (NVLink, NVLink SHARP, GPUDirect RDMA)
where it otherwise goes through buffers of its own. Memory of ncclMemAlloc has the properties that
every such way needs.

Who dies first does not matter. An array that dies hands its memory to `Registrations`, which gives
it back when `collect` is called: garbage may be collected anywhere, inside a group or while a graph
is captured, where the library may not be called. When the communicator goes first, its
registrations end with it, and memory whose last array dies after that is left to the process's
other communicators (`gpucoll.backends.gpu.abandoned`): giving it back waits for the whole GPU,
which would end any capture that is under way on it, in whichever thread and mode. At the
interpreter's end nothing is called any more: the driver takes everything back with the process.
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
from gpucoll.backends.nccl.allocation import give_back, take, whole_pages
from gpucoll.backends.nccl.library import Library
from gpucoll.backends.nccl.prototypes import NCCL_WIN_COLL_SYMMETRIC
from gpucoll.devices import Device
from gpucoll.errors import GpucollError, StateError

__all__ = ["Memory", "Registration", "Registrations"]


UNGUARDED = contextlib.nullcontext()
_IDLE_S = 2.0
"""How long the GPU has for what is on it, before somebody else goes on."""


class Memory:
    """A piece of GPU memory of ncclMemAlloc; whatever stands on it must hold it.

    Attributes
    ----------
    address, size_bytes : int
        Where it lies; at least as large as asked for.
    held : list of Registration
        With the communicator that it was made for; none where the library has no registration.
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
    """A piece of memory that a communicator knows."""

    def __init__(self, registrations: Registrations, handle: int, window: int) -> None:
        self._registrations = registrations
        self.handle = handle
        self.window = window
        """Its number among the communicator's symmetric windows, from 1; 0: none of them."""

    @property
    def is_open(self) -> bool:
        """Whether the communicator still knows the memory."""
        return self in self._registrations.open

    def close(self) -> None:
        """End it; nothing where it has ended already. The memory stays."""
        self._registrations.deregister(self)


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
        self._dead: deque[tuple[int, list[Registration]]] = deque()
        self._is_closed = False
        self._window: ctypes.c_void_p | None = None
        self._n_windows = 0
        self.open: set[Registration] = set()

    # --- memory of the library --------------------------------------------------------------------

    def allocate(self, size_bytes: int, *, is_registered: bool = True) -> Memory:
        """Return new memory, registered with the communicator where the library can.

        Parameters
        ----------
        size_bytes : int
            At least as much is taken, in whole pages of the GPU (2 MiB on most).
        is_registered : bool
            Whether to register it; `register_window` does so for a window.

        Raises
        ------
        MemoryError
            The GPU has no more.
        StateError
            The communicator is closed.
        """
        self._check_open("allocate memory")
        size_bytes = whole_pages(size_bytes)
        address = take(self.library, self.device, size_bytes)
        memory = Memory(self.device, address, size_bytes)
        # A reference to `memory` itself would keep it alive.
        finalizer = weakref.finalize(memory, self._bury, address, memory.held, os.getpid())
        finalizer.atexit = False
        if is_registered:
            self.register_memory(memory)
        return memory

    def _bury(self, address: int, held: list[Registration], process: int) -> None:
        """Take over memory whose last user is gone; called by the garbage collector, anywhere."""
        if process != os.getpid():  # a forked child: the GPU's memory is the parent's
            return
        self._dead.append((address, held))
        if self._is_closed:  # it collects nothing any more
            abandoned.leave(self)

    def end(self) -> None:
        """Give back what died after the communicator, for `abandoned`.

        In a thread, for which nobody waits for long: what the GPU is busy with may go on only when
        this rank does.
        """
        if not self._dead:
            return
        thread = threading.Thread(target=self._collect_all, name="gpucoll-memory", daemon=True)
        thread.start()
        thread.join(_IDLE_S)

    def _collect_all(self) -> None:
        with contextlib.suppress(GpucollError):  # a GPU that has failed gives nothing back
            self.collect()

    def collect(
        self, lock: AbstractContextManager[Any] = UNGUARDED, windows: Container[int] = ()
    ) -> None:
        """Give back the memory whose arrays are gone; of open windows, only those named.

        Where there is such memory, it waits for everything on the GPU first, as cudaFree does: the
        library unmaps memory at once, and kernels of the user's may still be on their way to it.

        Parameters
        ----------
        lock : context manager
            Held around calls of the library, and not while waiting: what the GPU is busy with may
            end only when another thread gives the communicator up, for which it needs the lock.
        windows : container of int
            Symmetric windows that all ranks end now.
        """
        dead = self._take_dead(windows)  # what dies from here on has not been waited for
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
                give_back(self.library, self.device, address)

    def _take_dead(self, windows: Container[int]) -> list[tuple[int, list[Registration]]]:
        """Return what nobody uses any more; another thread may be taking some of it, too."""
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
        """Numbers of the windows that this rank has no more use for."""
        return [window for _, held in tuple(self._dead) for window in _open_windows(held)]

    # --- registering ------------------------------------------------------------------------------

    def register(self, address: int, size_bytes: int) -> Registration | None:
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
        """Register memory of `allocate`; nothing where the library cannot."""
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
            Waits, under a deadline, while the library says that it is in progress; returns the code
            in the end.
        """
        made = self._window = ctypes.c_void_p()  # filled in when it has settled, so it is kept
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
        if not handle.value:  # NCCL declines quietly where registration is of no use to it
            return None
        registration = Registration(self, handle.value, window)
        self.open.add(registration)
        return registration

    def deregister(self, registration: Registration) -> None:
        """End a registration; nothing where it has ended already."""
        if registration not in self.open:
            return
        self.open.remove(registration)
        kind = "Window" if registration.window else ""
        name = f"ncclComm{kind}Deregister"
        with self.device:
            code = getattr(self.library.functions, name)(self._communicator, registration.handle)
        self.library.check(code, name, self._communicator)

    def close(self, *, is_aborting: bool = False) -> None:
        """End every registration. What the communicator makes of it no longer matters.

        Memory is not given back here: that would wait for kernels that may hang until the
        communicator is aborted. `collect` does so afterwards.

        Parameters
        ----------
        is_aborting : bool
            The communicator is about to be aborted, and may hang in any other call; it lets go of
            what it knows by itself.
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
