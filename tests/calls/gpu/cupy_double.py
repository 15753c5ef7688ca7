"""A small array library over a double of the GPU's driver, which says that it is CuPy.

Only what gpucoll and the tests ask of CuPy, with its manners: work goes on the thread's current
stream, freed memory goes to a pool. `install` puts it where ``import cupy`` finds it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np

from gpucoll import devices

_here = threading.local()
_pool: dict[tuple[int, int, str], list[int]] = {}
_kind = "cuda"


def _device(number: int) -> Any:
    return devices.open_device(_kind, number)


def _current_number() -> int:
    return getattr(_here, "number", 0)


class Device:
    """``cupy.cuda.Device``."""

    def __init__(self, number: int) -> None:
        self.id = number
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(_current_number())
        _here.number = self.id
        return self

    def __exit__(self, *_: object) -> None:
        _here.number = self._before.pop()

    def use(self) -> None:
        _here.number = self.id


class Stream:
    """``cupy.cuda.Stream``."""

    def __init__(
        self, ptr: int | None = None, number: int | None = None, non_blocking: bool = True
    ) -> None:
        self.number = _current_number() if number is None else number
        self.ptr = _new_stream(self.number, non_blocking) if ptr is None else ptr
        self._before: list[Stream] = []

    def __enter__(self) -> Stream:
        self._before.append(get_current_stream(self.number))
        _streams()[self.number] = self
        return self

    def __exit__(self, *_: object) -> None:
        _streams()[self.number] = self._before.pop()

    def synchronize(self) -> None:
        device = _device(self.number)
        with device:
            device.synchronize_stream(self.ptr)


def _new_stream(number: int, is_non_blocking: bool) -> int:
    """Return a new stream; one that blocks is in order with the legacy stream, as CuPy's own is."""
    device = _device(number)
    if is_non_blocking:
        return int(device.create_stream())
    handle = ctypes.c_void_p()
    with device:
        assert device.driver.functions["stream_create"](ctypes.byref(handle), 0, 0) == 0
    return handle.value or 0


def _streams() -> dict[int, Stream]:
    if not hasattr(_here, "streams"):
        _here.streams = {}
    return _here.streams


def get_current_stream(number: int | None = None) -> Stream:
    """``cupy.cuda.get_current_stream``."""
    number = _current_number() if number is None else number
    streams = _streams()
    if number not in streams:
        streams[number] = Stream(0, number)
    return streams[number]


class _Memory:
    """A piece of the pool."""

    def __init__(self, size_bytes: int, number: int) -> None:
        self.key = max(size_bytes, 1), number, _kind
        free = _pool.setdefault(self.key, [])
        self.address = free.pop() if free else _device(number).allocate(self.key[0])

    def __del__(self) -> None:
        _pool[self.key].append(self.address)


class _OwnMemory(_Memory):
    """Memory of no pool: it goes back to the driver, which waits for the GPU."""

    def __init__(self, size_bytes: int, number: int) -> None:
        self.key = max(size_bytes, 1), number, _kind
        self.address = _device(number).allocate(self.key[0])

    def __del__(self) -> None:
        _device(self.key[1]).free(self.address)


_allocator: type[_Memory] = _Memory


def set_allocator(allocator: Any = _Memory) -> None:
    """``cupy.cuda.set_allocator``: the pool's, or None for none."""
    global _allocator
    _allocator = _OwnMemory if allocator is None else allocator


class UnownedMemory:
    """``cupy.cuda.UnownedMemory``."""

    def __init__(self, address: int, size_bytes: int, owner: Any, number: int) -> None:
        self.address, self.owner = address, owner
        self.key = size_bytes, number, _kind


class MemoryPointer:
    """``cupy.cuda.MemoryPointer``."""

    def __init__(self, memory: Any, offset: int) -> None:
        assert offset == 0
        self.memory = memory


class ndarray:  # noqa: N801
    """``cupy.ndarray``: `host` is the same memory, as NumPy sees it."""

    def __init__(self, host: Any, memory: Any, pointer: Any = None) -> None:
        if pointer is not None:  # as CuPy's own: shape, dtype, pointer
            shape, dtype = host, np.dtype(memory)
            memory, size_bytes = pointer.memory, int(np.prod(shape)) * dtype.itemsize
            flat = (ctypes.c_uint8 * size_bytes).from_address(memory.address)
            host = np.frombuffer(flat, np.uint8).view(dtype).reshape(shape)
        self.host: np.ndarray = host
        self._memory = memory
        self.shape, self.dtype, self.strides = host.shape, host.dtype, host.strides
        self.flags = SimpleNamespace(c_contiguous=host.flags.c_contiguous)
        self.device = SimpleNamespace(id=memory.key[1])
        self.data = SimpleNamespace(ptr=host.ctypes.data, device_id=memory.key[1])

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, where: Any) -> ndarray:
        return ndarray(self.host[where], self._memory)

    def __setitem__(self, where: Any, value: Any) -> None:
        if self.dtype.name.startswith("float8"):
            raise TypeError(f"no kernel for {self.dtype}")
        get_current_stream(self.device.id).synchronize()
        self.host[where] = value.host if isinstance(value, ndarray) else value

    def reshape(self, shape: Any) -> ndarray:
        return ndarray(self.host.reshape(shape), self._memory)

    @property
    def T(self) -> ndarray:  # noqa: N802
        return ndarray(self.host.T, self._memory)

    def view(self, dtype: Any) -> ndarray:
        return ndarray(self.host.view(dtype), self._memory)

    def set(self, values: np.ndarray) -> None:
        """Overwrite it, once the current stream is done; as strict as CuPy's own."""
        if values.dtype != self.dtype:
            raise TypeError(f"{values.dtype} array cannot be set to {self.dtype} array")
        if values.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new: {values.shape}")
        if not self.host.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        get_current_stream(self.device.id).synchronize()
        self.host[...] = values

    def get(self) -> np.ndarray:
        """Return it on the host, once the current stream is done."""
        get_current_stream(self.device.id).synchronize()
        return self.host.copy()

    def copy_from(self, other: ndarray) -> None:
        """Enqueue a copy on the current stream: what a kernel would do."""
        device = _device(self.device.id)
        with device:
            stream = get_current_stream(self.device.id).ptr
            device.copy(self.data.ptr, other.data.ptr, self.host.nbytes, stream)


ndarray.__module__ = "cupy._core.core"


def alloc(size_bytes: int) -> MemoryPointer:
    """``cupy.cuda.alloc``."""
    return MemoryPointer(_allocator(size_bytes, _current_number()), 0)


def empty(shape: Any, dtype: Any = "float32") -> ndarray:
    """``cupy.empty``: of what was there before."""
    kind = np.dtype(dtype)
    if kind.name.startswith("float8"):
        raise ValueError(f"Unsupported dtype {kind}")
    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    size_bytes = int(np.prod(lengths)) * kind.itemsize
    memory = _allocator(size_bytes, _current_number())
    flat = (ctypes.c_uint8 * size_bytes).from_address(memory.address)
    return ndarray(np.frombuffer(flat, np.uint8).view(kind).reshape(lengths), memory)


def asarray(values: Any, *, blocking: bool = False) -> ndarray:
    """``cupy.asarray`` of something on the host; always blocking."""
    host = np.asarray(values)
    made = empty(host.shape, host.dtype)
    made.host[...] = host
    return made


def ascontiguousarray(x: ndarray) -> ndarray:
    """``cupy.ascontiguousarray``."""
    get_current_stream(x.device.id).synchronize()
    made = empty(x.shape, x.dtype)
    made.host[...] = x.host
    return made


def install(kind: str) -> ModuleType:
    """Stand for CuPy in this process, on GPUs of this kind."""
    global _kind
    _kind = kind
    made: Any = ModuleType("cupy")
    made.__version__ = "a look-alike"
    made.ndarray, made.empty, made.asarray = ndarray, empty, asarray
    made.ascontiguousarray = ascontiguousarray
    made.cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        set_allocator=set_allocator,
        alloc=alloc,
        get_current_stream=get_current_stream,
        UnownedMemory=UnownedMemory,
        MemoryPointer=MemoryPointer,
        runtime=SimpleNamespace(
            is_hip=kind == "rocm",
            getDevice=_current_number,
            getDeviceCount=lambda: devices.device_count(kind),
            getDeviceProperties=lambda number: {"name": _device(number).identity.name.encode()},
            deviceSynchronize=lambda: _device(_current_number()).synchronize(),
        ),
    )
    sys.modules["cupy"] = made
    if "gpucoll.arrays.cupy_arrays" in sys.modules:
        sys.modules["gpucoll.arrays.cupy_arrays"].cupy = made  # type: ignore[attr-defined]
    return made
