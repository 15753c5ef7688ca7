"""Raw communicators of a double, for tests that run in ranks: no gpucoll but its table."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpucoll import devices
from gpucoll.backends.nccl import library
from gpucoll.backends.nccl.prototypes import configuration, ncclUniqueId
from tests.doubles import Control, Double
from tests.ranks import Seat

POISON = 0xA5


def view(address: int, size_bytes: int) -> Any:
    """Return a piece of memory as a buffer."""
    return (ctypes.c_char * size_bytes).from_address(address)


class Memory:
    """Memory of a device, seen as a NumPy array: the double's lies on the host."""

    def __init__(self, device: Any, array: np.ndarray) -> None:
        self._device = device
        self.address = device.allocate(array.nbytes)
        flat = np.frombuffer(view(self.address, array.nbytes), dtype=array.dtype)
        self.array = flat.reshape(array.shape)
        self.array[...] = array

    def free(self) -> None:
        """Give it back; the array must not be touched afterwards."""
        self._device.free(self.address)


class Communicator:
    """One rank of a communicator of the double, with a device and a stream of its own."""

    def __init__(
        self, seat: Seat, control: Control, *, is_blocking: bool = True, number: int | None = None
    ) -> None:
        self.rank, self.world_size, self.control = seat.rank, seat.world_size, control
        self.library = library.load(control.double.vendor)
        self.functions = self.library.functions
        number = seat.rank if number is None else number
        self.device = devices.open_device(control.double.kind, number)
        self.stream = self.device.create_stream()
        with seat.init() as host:
            unique_id = host.broadcast_object(self.library.unique_id() if not seat.rank else None)
            handle = ctypes.c_void_p()
            with self.device:
                self.init_code = self.functions.ncclCommInitRankConfig(
                    ctypes.byref(handle),
                    self.world_size,
                    ncclUniqueId.from_buffer_copy(unique_id),
                    self.rank,
                    ctypes.byref(configuration(is_blocking=is_blocking)),
                )
            self.handle = handle.value or 0
            if is_blocking:
                assert self.init_code == 0, self.library.error(self.init_code, "init")

    def memory(self, array: np.ndarray) -> Memory:
        """Return device memory with the values of an array."""
        return Memory(self.device, array)

    @staticmethod
    def view(address: int, size_bytes: int) -> Any:
        """Return a piece of memory as a buffer."""
        return view(address, size_bytes)

    def call(self, name: str, *arguments: Any) -> int:
        """Enqueue a call on the stream; return its code."""
        with self.device:
            return int(getattr(self.functions, name)(*arguments, self.handle, self.stream))

    def synchronize(self) -> None:
        """Wait until the stream is done."""
        with self.device:
            self.device.synchronize_stream(self.stream)


@contextmanager
def communicator(seat: Seat, double: Double, **options: Any) -> Iterator[Communicator]:
    """Give a communicator, and destroy it in the end; after an error, abort it."""
    made = Communicator(seat, double.load(), **options)
    try:
        yield made
    except BaseException:
        made.functions.ncclCommAbort(made.handle)
        raise
    made.library.check(made.functions.ncclCommDestroy(made.handle), "ncclCommDestroy")
    assert made.control.communicators == 0
