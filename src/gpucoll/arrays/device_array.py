"""An array over device memory that belongs to no library, for every library to adopt.

Libraries adopt it without a copy, through ``__cuda_array_interface__`` (CuPy, Numba, PyTorch) or
DLPack (all of them; the only way for bfloat16 and float8). The adopting array keeps it alive, and
it keeps the memory's owner alive.
Source: include/dlpack/dlpack.h, version 1.1; the CUDA Array Interface, version 3.
"""

from __future__ import annotations

import atexit
import ctypes
import math
from ctypes import c_char_p, c_int, c_size_t, c_void_p, py_object, pythonapi
from typing import TYPE_CHECKING

import numpy as np

from gpucoll.arrays.dlpack import DEVICES, ManagedTensor, VersionedTensor
from gpucoll.arrays.dlpack_codes import CODES

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

__all__ = ["DeviceArray"]

_WITHOUT_TYPESTR = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_DEVICE_TYPES = {name: number for number, name in reversed(DEVICES.items())} | {"host": 12}
"""For a Host device, DLPack's kind for devices outside of its list (kDLExtDev)."""


class DeviceArray:
    """A C-contiguous array on a GPU, with undefined values.

    Parameters
    ----------
    address : int
        Address of the first element, aligned to the elements' size.
    shape : tuple of int
        The array's shape.
    dtype : str
        Name of the dtype, as in `gpucoll.types.DTYPES`.
    device : str
        Kind and number of the GPU: ``"cuda:0"``.
    owner : object
        Keeps the memory alive.
    """

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: str, device: str, owner: object
    ) -> None:
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.owner = owner
        kind, _, number = device.partition(":")
        self._dlpack_device = (_DEVICE_TYPES[kind], int(number or 0))

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype}{list(self.shape)} on {self.device}>"

    @property
    def size_bytes(self) -> int:
        """Size of the data, in bytes."""
        return math.prod(self.shape) * (CODES[self.dtype][1] // 8)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The description that CUDA libraries read; missing for dtypes that NumPy lacks."""
        if self.device.startswith("sycl"):
            raise AttributeError("the memory belongs to an Intel GPU: use DLPack")
        if self.dtype in _WITHOUT_TYPESTR:
            raise AttributeError(f"the array interface has no {self.dtype}: use DLPack")
        address = self.address if self.size_bytes else 0  # the interface's value without elements
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (address, False),
            "strides": None,
            "stream": None,  # no work on it is pending
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._dlpack_device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Return a capsule that hands the memory over. `stream` need not wait for anything."""
        if copy:
            raise BufferError("the memory is handed over, never copied")
        if dl_device is not None and tuple(map(int, dl_device)) != self._dlpack_device:
            raise BufferError(f"the memory is on {self.device}, and is handed over there only")
        return _capsule(self, is_versioned=max_version is not None and max_version[0] >= 1)


# --- DLPack: structures that the consumer releases by a call, from any thread --------------------

_NAMES = {False: b"dltensor", True: b"dltensor_versioned"}  # must outlive every capsule
_KINDS: dict[bool, type[ManagedTensor | VersionedTensor]] = {
    False: ManagedTensor,
    True: VersionedTensor,
}


def _function(
    name: str, result: type[ctypes._CData] | None, *arguments: type[ctypes._CData]
) -> ctypes._CFunctionType:
    """Return a C function of Python, independent of the types others set through pythonapi."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, pythonapi))


_allocate = _function("PyMem_RawCalloc", c_void_p, c_size_t, c_size_t)
_free = _function("PyMem_RawFree", None, c_void_p)
_new_capsule = _function("PyCapsule_New", py_object, c_void_p, c_char_p, c_void_p)
# By address: a capsule that is being destroyed must not be touched as an object.
_is_valid = _function("PyCapsule_IsValid", c_int, c_void_p, c_char_p)
_pointer_of = _function("PyCapsule_GetPointer", c_void_p, c_void_p, c_char_p)

_handed_over: dict[int, tuple[bool, DeviceArray]] = {}
"""Structure that a consumer has -> whether it is versioned, and the array that it keeps alive."""


def _take_back(structure: int) -> None:
    """Release a structure that its consumer no longer needs."""
    if _handed_over.pop(structure, None) is not None:
        _free(structure)


_deleter = ctypes.CFUNCTYPE(None, c_void_p)(_take_back)


def _drop_capsule(capsule: int) -> None:
    """Release a structure that was never consumed; a consumer has renamed its capsule."""
    for name in _NAMES.values():
        if _is_valid(capsule, name):
            _take_back(_pointer_of(capsule, name))


_destructor = ctypes.PYFUNCTYPE(None, c_void_p)(_drop_capsule)


def _capsule(array: DeviceArray, is_versioned: bool) -> CapsuleType:
    kind = _KINDS[is_versioned]
    dimensions = len(array.shape)
    structure = _allocate(1, ctypes.sizeof(kind) + 16 * max(dimensions, 1))
    if not structure:
        raise MemoryError
    _fill(kind.from_address(structure), array, structure + ctypes.sizeof(kind))
    _handed_over[structure] = is_versioned, array
    destructor = ctypes.cast(_destructor, c_void_p)
    capsule: CapsuleType = _new_capsule(structure, _NAMES[is_versioned], destructor)
    return capsule


def _fill(managed: ManagedTensor | VersionedTensor, array: DeviceArray, sizes: int) -> None:
    """Describe an array in a structure; shape and strides are written behind it."""
    dimensions = len(array.shape)
    shape, strides = (
        (ctypes.c_int64 * dimensions).from_address(sizes + offset * 8) for offset in (0, dimensions)
    )
    shape[:] = list(array.shape)
    step = 1
    for axis in reversed(range(dimensions)):
        strides[axis] = step
        step *= max(array.shape[axis], 1)
    tensor = managed.tensor
    tensor.data = array.address
    tensor.device_type, tensor.device_id = array.__dlpack_device__()
    tensor.dimensions = dimensions
    tensor.code, tensor.bits = CODES[array.dtype]
    tensor.lanes = 1
    tensor.shape = ctypes.cast(ctypes.byref(shape), type(tensor.shape))
    tensor.strides = ctypes.cast(ctypes.byref(strides), type(tensor.strides))
    managed.deleter = ctypes.cast(_deleter, c_void_p)
    if isinstance(managed, VersionedTensor):
        managed.version[:] = 1, 1


@atexit.register
def _outlive_the_interpreter() -> None:
    """Make later releases of handed-over structures harmless, at the interpreter's end.

    A consumer may outlive the interpreter (PyTorch's own statics), and calling into Python would
    then crash. The memory is released with the process.
    """
    harmless = ctypes.cast(pythonapi.Py_IsInitialized, c_void_p)  # ignores its arguments
    for structure, (is_versioned, _) in _handed_over.items():
        _KINDS[is_versioned].from_address(structure).deleter = harmless
