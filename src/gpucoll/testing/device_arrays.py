"""Arrays on Host devices, for tests without a GPU (docs/host_device.md).

::

    from gpucoll.testing import device_arrays as da

    x = da.asarray(np.arange(4.0), device=0)
    stream = da.Stream()
    with stream:
        comm.all_reduce(x)
    stream.synchronize()
    x.get()

Operations on an array are enqueued on the thread's current stream and run later, as on a GPU.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from gpucoll import devices
from gpucoll.devices.host.device import HostDevice
from gpucoll.devices.host.strided import copy_elements
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.finalizers import leave

if TYPE_CHECKING:
    from gpucoll.calls.given import Unchecked

__all__ = [
    "Array",
    "Stream",
    "asarray",
    "current_device",
    "current_stream",
    "empty",
    "synchronize",
    "use",
    "zeros",
]


def device_of(number: int) -> HostDevice:
    """Return a Host device, with its functions for tests: `HostDevice.faults`, `counts`."""
    return cast(HostDevice, devices.open_device("host", number))


# --- current device and stream --------------------------------------------------------------------


class _Current(threading.local):
    """Streams that this thread has made current, with their devices; the last one counts."""

    def __init__(self) -> None:
        self.streams: dict[int, list[int]] = {}


_current = _Current()


def use(device: int) -> None:
    """Make a device the thread's current one, on which new arrays and streams are made."""
    device_of(device).use()


def current_device() -> int:
    """Return the number of the thread's current device; 0 at first."""
    return device_of(0).current_number()


def current_stream(device: int | None = None) -> int:
    """Return the handle of the thread's current stream; 0 for the device's default stream."""
    number = current_device() if device is None else device
    streams = _current.streams.get(number)
    return streams[-1] if streams else 0


def synchronize(device: int | None = None) -> None:
    """Wait for everything on a device; this frees the memory of arrays that are gone."""
    number = current_device() if device is None else device
    device_of(number).synchronize()
    _pool(number).collect()


class Stream:
    """A stream of a device. In a ``with`` block it is the thread's current stream.

    Attributes
    ----------
    ptr : int
        The stream's handle.
    device : int
        The device's number.
    """

    def __init__(self, device: int | None = None) -> None:
        self.device = current_device() if device is None else device
        made = device_of(self.device)
        self.ptr = made.create_stream()
        self._finalizer = weakref.finalize(self, leave, _destroy, made, self.ptr)
        self._finalizer.atexit = False

    def __enter__(self) -> Stream:
        _current.streams.setdefault(self.device, []).append(self.ptr)
        return self

    def __exit__(self, *exception: object) -> None:
        _current.streams[self.device].pop()

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        device_of(self.device).synchronize_stream(self.ptr)

    @property
    def done(self) -> bool:
        """Whether everything on the stream is done."""
        return device_of(self.device).is_stream_done(self.ptr)

    def close(self) -> None:
        """Destroy the stream; work that is on it still runs."""
        if self._finalizer.detach():
            _destroy(device_of(self.device), self.ptr)


def _destroy(device: HostDevice, stream: int) -> None:
    if not device.is_forked:
        device.destroy_stream(stream)


# --- memory ---------------------------------------------------------------------------------------


class _Pool:
    """Memory of arrays that are gone, kept until the work on their device's streams is done."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        self.left: deque[int] = deque()
        """Memory that the garbage collector returns, at any time: appending takes no lock."""
        self._waiting: deque[tuple[int, list[tuple[int, int]]]] = deque()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> int:
        """Return memory; if there is none, wait for memory of arrays that are gone."""
        self.collect()
        try:
            return self._device.allocate(size_bytes)
        except MemoryError:
            self._device.synchronize()
            self.collect()
            return self._device.allocate(size_bytes)

    def collect(self) -> None:
        """Free memory that is no longer in use."""
        with self._lock:
            if self.left:
                marks = self._device.marks()
                while self.left:
                    self._waiting.append((self.left.popleft(), marks))
            while self._waiting and self._device.are_reached(self._waiting[0][1]):
                self._device.free_unused(self._waiting.popleft()[0])


_pools: dict[int, _Pool] = {}
_pools_lock = threading.Lock()


def _pool(number: int) -> _Pool:
    with _pools_lock:
        if number not in _pools:
            _pools[number] = _Pool(device_of(number))
        return _pools[number]


class _Memory:
    """The memory of an array and its views."""

    def __init__(self, number: int, size_bytes: int) -> None:
        pool = _pool(number)
        self.address = pool.take(size_bytes)
        weakref.finalize(self, pool.left.append, self.address).atexit = False


# --- arrays ---------------------------------------------------------------------------------------


class Array:
    """An array on a Host device, made by `asarray`, `empty` or `zeros`.

    Attributes
    ----------
    device : int
        The device's number.
    """

    def __init__(self, where: npt.NDArray[np.generic], device: int, owner: object) -> None:
        self._where = where
        """The memory as a NumPy array, used for shapes and addresses but never read."""
        self._owner = owner
        self.device = device

    @classmethod
    def over(
        cls, address: int, shape: Sequence[int], dtype: npt.DTypeLike, device: int, owner: object
    ) -> Array:
        """Return an array over memory that `owner` keeps alive."""
        kind, wanted = np.dtype(dtype), tuple(shape)
        count = int(np.prod(wanted, dtype=np.int64))
        memory = (ctypes.c_uint8 * max(count * kind.itemsize, 1)).from_address(address)
        return cls(np.ndarray(wanted, kind, cast(Any, memory)), device, owner)

    @classmethod
    def empty(
        cls, shape: Sequence[int] | int, dtype: npt.DTypeLike = float, device: int | None = None
    ) -> Array:
        """Return a new array with undefined values."""
        number = current_device() if device is None else device
        wanted = (shape,) if isinstance(shape, int) else tuple(shape)
        size_bytes = int(np.prod(wanted, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = _Memory(number, size_bytes)
        return cls.over(memory.address, wanted, dtype, number, memory)

    @staticmethod
    def current_stream(device: int) -> int:
        """Return the handle of the thread's current stream."""
        return current_stream(device)

    def __repr__(self) -> str:
        return f"<Array {self.dtype}{list(self.shape)} on host:{self.device}>"

    @property
    def __host_device_array_interface__(self) -> dict[str, object]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "dtype": self.dtype,
            "data": self.address,
            "device": self.device,
            "stream": current_stream(self.device),
        }

    @property
    def address(self) -> int:
        """Address of the first element."""
        return int(self._where.ctypes.data)

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self._where.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distances between elements, in bytes."""
        return self._where.strides

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The array's dtype, as in NumPy."""
        return self._where.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._where.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._where.size

    @property
    def nbytes(self) -> int:
        """Size of the elements, in bytes."""
        return self._where.nbytes

    def __len__(self) -> int:
        return len(self._where)

    # --- views ------------------------------------------------------------------------------------

    def _view(self, where: npt.NDArray[np.generic]) -> Array:
        if where.size and self._where.size and not np.may_share_memory(where, self._where):
            raise ArgumentError(
                f"{self} cannot be viewed in this way without a copy: copy() it first"
            )
        return type(self)(where, self.device, self._owner)

    def __getitem__(self, place: Unchecked) -> Array:
        parts = place if isinstance(place, tuple) else (place,)
        if not all(part is None or part is ... or isinstance(part, int | slice) for part in parts):
            raise ArgumentTypeError(
                f"an array on a Host device supports only slices and ints as indices; got {place!r}"
            )
        if ... not in parts:
            parts = (*parts, ...)  # the view of a single element is an array, too
        return self._view(self._where[parts])

    def reshape(self, *shape: SupportsIndex) -> Array:
        """Return a view with another shape; raise ArgumentError if that needs a copy."""
        return self._view(self._where.reshape(*shape))

    def view(self, dtype: npt.DTypeLike) -> Array:
        """Return a view of the same bytes."""
        return self._view(self._where.view(np.dtype(dtype)))

    @property
    def T(self) -> Array:  # noqa: N802 (NumPy's name)
        """The transposed array, a view."""
        return self._view(self._where.T)

    # --- work on the current stream ---------------------------------------------------------------

    def copy(self) -> Array:
        """Return a C-contiguous copy."""
        made = type(self).empty(self.shape, self.dtype, self.device)
        made[...] = self
        return made

    def __setitem__(self, place: Unchecked, values: npt.ArrayLike | Array) -> None:
        target = self[place]
        if isinstance(values, Array):
            if values.dtype != target.dtype:
                raise ArgumentTypeError(f"{values} cannot be copied into {target}: cast it first")
            source = np.broadcast_to(values._where, target.shape)
            owners: tuple[object, ...] = (values._owner, target._owner)
        else:
            # A copy, because the caller may change the values as soon as this returns.
            source = np.broadcast_to(np.array(values, target.dtype), target.shape)
            owners = (source, target._owner)
        device = device_of(self.device)
        with device:
            copy_elements(device, target._where, source, current_stream(self.device), owners)

    def set(self, values: npt.ArrayLike | Array) -> None:
        """Overwrite the array."""
        self[...] = values

    def get(self) -> npt.NDArray[np.generic]:
        """Return a NumPy array of the values, when all work on the current stream is done."""
        device = device_of(self.device)
        with device:  # stream 0 belongs to the current device
            device.synchronize_stream(current_stream(self.device))
        return self._where.copy()

    numpy = get


def empty(
    shape: Sequence[int] | int, dtype: npt.DTypeLike = float, device: int | None = None
) -> Array:
    """Return a new array with undefined values, by default on the current device."""
    return Array.empty(shape, dtype, device)


def zeros(
    shape: Sequence[int] | int, dtype: npt.DTypeLike = float, device: int | None = None
) -> Array:
    """Return a new array of zeros."""
    made = Array.empty(shape, dtype, device)
    owner = device_of(made.device)
    with owner:
        owner.fill(made.address, b"\0", made.nbytes, current_stream(made.device))
    return made


def asarray(values: npt.ArrayLike, device: int | None = None) -> Array:
    """Return a copy of a NumPy array, or of anything that NumPy converts to one, on a device."""
    host = np.asarray(values)
    made = Array.empty(host.shape, host.dtype, device)
    if host.size:
        made[...] = host
    return made
