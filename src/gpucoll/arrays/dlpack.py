"""Reads an object's description through DLPack, without consuming it.

NumPy's own reader supports neither GPU memory nor bfloat16 and float8. The capsule is kept as long
as the memory is used; a capsule that is dropped unconsumed releases the memory itself.
Source: include/dlpack/dlpack.h, version 1.1.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpucoll.arrays.dlpack_codes import KINDS, NAMES
from gpucoll.errors import ArgumentTypeError

if TYPE_CHECKING:
    from gpucoll.arrays.library import AnyArray

DEVICES = {
    1: "cpu", 2: "cuda", 3: "cpu", 8: "metal", 9: "vpi", 10: "rocm", 11: "cpu", 13: "cuda",
    14: "sycl",
}  # fmt: skip
"""DLDeviceType -> device name. Pinned host memory (3, 11) is "cpu", managed memory is "cuda";
kDLOneAPI is "sycl"."""

_READ_ONLY, _IS_COPIED = 1, 2


class _Tensor(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class ManagedTensor(ctypes.Structure):
    """DLManagedTensor."""

    _fields_: ClassVar = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class VersionedTensor(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_: ClassVar = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


@dataclass(slots=True)
class Tensor:
    """The description of an array, as DLPack gives it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In bytes; None if it is C-contiguous."""
    dtype: str
    item_bytes: int
    device: str
    is_read_only: bool
    is_copied: bool
    """Whether the memory is a copy that no other array shares."""
    owner: Any


def device_of(x: AnyArray) -> str:
    """Return the name of the device that x is on."""
    kind, number = x.__dlpack_device__()
    return _device_name(int(kind), int(number))


def _device_name(kind: int, number: int) -> str:
    name = DEVICES.get(kind, f"dlpack{kind}")
    return name if name == "cpu" else f"{name}:{number}"


def read(x: AnyArray, what: str) -> Tensor:
    """Return x's description. A GPU's default stream waits until the data is there."""
    try:
        try:
            capsule = x.__dlpack__(max_version=(1, 1))
        except TypeError:  # an implementation older than version 1
            capsule = x.__dlpack__()
    except (AttributeError, BufferError, RuntimeError, ValueError) as error:
        raise ArgumentTypeError(f"{what} cannot be read through DLPack: {error}") from None
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    if "dltensor_versioned" in repr(capsule):
        versioned = VersionedTensor.from_address(pointer_of(capsule, b"dltensor_versioned"))
        tensor, flags = versioned.tensor, int(versioned.flags)
    else:
        tensor, flags = _Tensor.from_address(pointer_of(capsule, b"dltensor")), 0
    return _described(tensor, flags, (x, capsule), what)


def _described(tensor: _Tensor, flags: int, owner: object, what: str) -> Tensor:
    name = NAMES.get(tensor.code) or f"{KINDS.get(tensor.code, '?')}{tensor.bits}"
    if "?" in name or tensor.lanes != 1 or tensor.bits % 8:
        raise ArgumentTypeError(
            f"{what} has DLPack's dtype (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} "
            "lanes), which has no name here: convert it first"
        )
    item_bytes = tensor.bits // 8
    shape = tuple(tensor.shape[: tensor.dimensions])
    strides = None
    if tensor.strides:
        strides = tuple(step * item_bytes for step in tensor.strides[: tensor.dimensions])
    return Tensor(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        None if is_contiguous(shape, strides, item_bytes) else strides,
        name,
        item_bytes,
        _device_name(tensor.device_type, tensor.device_id),
        bool(flags & _READ_ONLY),
        bool(flags & _IS_COPIED),
        owner,
    )


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, item_bytes: int) -> bool:
    """Return whether elements are in C order without gaps."""
    if strides is None or 0 in shape:
        return True
    expected = item_bytes
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
