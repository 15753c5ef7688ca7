"""The memory and datatype of the objects that programs pass as buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.integrations.mpi4py.constants import BOTTOM, ERROR_CLASSES
from gpucoll.integrations.mpi4py.datatypes import BYTE, Datatype, datatype_of_code
from gpucoll.integrations.mpi4py.errors import (
    ArgumentTypeError,
    MemoryLayoutError,
    argument_error,
    refused,
)
from gpucoll.integrations.mpi4py.integers import integer
from gpucoll.integrations.mpi4py.type_maps import Bytes

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

    from gpucoll.arrays.library import AnyArray
    from gpucoll.integrations.mpi4py.infos import Info
    from gpucoll.integrations.mpi4py.typing import Buffer
    from gpucoll.types import AnyScalar

AnyBuffer: TypeAlias = Any
"""An object that the program passed as memory: a `typing.Buffer`, if valid, or None or BOTTOM."""
Index: TypeAlias = Any
"""Whatever NumPy takes as an index."""
_HOST_KINDS = (1, 3, 11)
"""DLPack's numbers of the kinds of memory that a CPU can read: its own, and pinned."""


class Memory(NamedTuple):
    """The memory of a buffer."""

    data: Bytes | None
    """All bytes, in order; None for memory on a GPU."""
    datatype: Callable[[], Datatype]
    """Returns the buffer's own datatype."""
    gpu_array: Any = None
    """The array as it was passed, if it is on a GPU."""


def is_buffer(given: AnyBuffer) -> bool:
    """Return whether an object has memory: by the buffer protocol or DLPack, or on a GPU."""
    try:
        memoryview(given)
    except TypeError:
        return hasattr(given, "__dlpack__") or hasattr(given, "__cuda_array_interface__")
    except (ValueError, BufferError):  # NumPy has dtypes that the buffer protocol lacks
        return True
    return True


def memory_of(given: AnyBuffer, writable: bool) -> Memory:
    """Return the memory of a buffer.

    Raises
    ------
    ArgumentTypeError
        The object has no memory.
    MemoryLayoutError
        The memory is not contiguous, or is read-only but will be written.
    """
    if given is None:
        return Memory(np.empty(0, np.uint8), lambda: BYTE)
    if given is BOTTOM:
        refused("BOTTOM", "pass the array itself, with displacements from its start")
    if isinstance(given, np.ndarray):
        return _of_array(given, writable)
    if hasattr(given, "__cuda_array_interface__"):
        return _of_gpu(given, given.__cuda_array_interface__["typestr"][1:])
    try:
        view = memoryview(given)
    except TypeError:
        if not hasattr(given, "__dlpack__"):
            raise ArgumentTypeError(
                ERROR_CLASSES["ERR_BUFFER"],
                f"message: expecting buffer or list/tuple, got {type(given).__name__}",
            ) from None
    else:
        return _of_view(view, given, writable)
    if given.__dlpack_device__()[0] not in _HOST_KINDS:
        return _of_gpu(given, "")
    return _of_dlpack(given, writable)


def _of_array(array: npt.NDArray[np.generic], writable: bool) -> Memory:
    if writable and not array.flags.writeable:
        raise _layout_error("the array is read-only, but the call writes to it")
    if not array.dtype.isnative:
        raise _layout_error(f"{array.dtype.str} has non-native byte order")
    if array.dtype.hasobject:
        datatype_of_code(array.dtype.char)
    if array.flags.c_contiguous:
        row = array.reshape(-1)
    elif array.flags.f_contiguous:
        row = array.T.reshape(-1)
    else:
        raise _layout_error("ndarray is not contiguous")
    data = row.view(np.ndarray).view(np.uint8)
    dtype = array.dtype
    return Memory(data, lambda: datatype_of_dtype(dtype))


def _of_view(view: memoryview, given: object, writable: bool) -> Memory:
    if writable and view.readonly:
        raise _layout_error(f"{type(given).__name__} is read-only, but the call writes to it")
    if not view.contiguous:
        raise _layout_error("memory is not contiguous")
    code = view.format
    if view.nbytes == 0:
        data = np.empty(0, np.uint8)
    elif view.c_contiguous:
        data = np.frombuffer(view, np.uint8)
    else:
        data = np.asarray(view).T.reshape(-1).view(np.uint8)
    return Memory(data, lambda: BYTE if code == "B" else datatype_of_code(code))


def _of_dlpack(given: AnyBuffer, writable: bool) -> Memory:
    capsule = given.__dlpack__()
    array = np.from_dlpack(_Given(given, capsule))
    if not array.size:
        return _of_array(array.copy(), writable)
    if not array.flags.forc:
        raise _layout_error("memory is not contiguous")
    # NumPy before 2.1 treats all of DLPack's memory as read-only. A tuple releases its last item
    # first. That is the array, whose end calls the producer's deleter. The producer itself goes
    # last, because some producers hold what their deleter reads.
    kind = ctypes.c_uint8 * array.nbytes
    row = np.ctypeslib.as_array(kind.from_address(array.ctypes.data)).view(_Keeping)
    row.owner = (given, capsule, array)
    dtype = array.dtype
    return Memory(row, lambda: datatype_of_dtype(dtype))


class _Given:
    """A DLPack producer whose capsule has been taken already."""

    def __init__(self, given: AnyBuffer, capsule: CapsuleType) -> None:
        self._device: tuple[int, int] = given.__dlpack_device__()
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, stream: object = None) -> CapsuleType:
        return self._capsule


class _Keeping(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes that keep the owner of their memory alive."""

    owner: Any = None

    def __array_finalize__(self, source: object) -> None:
        if source is not None:
            self.owner = getattr(source, "owner", None)


def _of_gpu(given: AnyArray, typestr: str) -> Memory:
    dtype = np.dtype(typestr or str(given.dtype).rpartition(".")[2])
    return Memory(None, lambda: datatype_of_dtype(dtype), given)


def datatype_of_dtype(dtype: np.dtype[np.generic]) -> Datatype:
    """Return the datatype of a NumPy dtype."""
    code = dtype.char if dtype.kind not in "SU" else dtype.str[1:]
    return datatype_of_code(code)


def _layout_error(text: str) -> MemoryLayoutError:
    return MemoryLayoutError(ERROR_CLASSES["ERR_BUFFER"], f"message: {text}")


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes with an address, as `Alloc_mem` and windows return them; an array of uint8.

    ``buffer(b)`` is a view of the bytes of `b`. Without an argument it is empty.
    """

    def __new__(cls, buf: Buffer | None = None) -> buffer:
        if buf is None:
            return np.empty(0, np.uint8).view(cls)
        return cls.frombuffer(buf)

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> buffer:
        nbytes = integer(nbytes)
        if nbytes < 0:
            raise argument_error(f"expecting a size of 0 bytes or more, got {nbytes}")
        return (np.zeros if clear else np.empty)(nbytes, np.uint8).view(buffer)

    @staticmethod
    def frombuffer(obj: AnyBuffer, readonly: bool = False) -> buffer:
        data = memory_of(obj, False).data
        if data is None:
            raise TypeError("the array is on a GPU")
        made = data.view(buffer)
        if readonly:
            made.flags.writeable = False
        return made

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> buffer:
        if nbytes < 0:
            raise argument_error(f"expecting a size of 0 bytes or more, got {nbytes}")
        if not nbytes:
            return buffer()
        kind = ctypes.c_uint8 * nbytes
        return buffer.frombuffer(np.ctypeslib.as_array(kind.from_address(address)), readonly)

    def __getitem__(self, item: Index) -> AnyScalar:
        found: AnyScalar = super().__getitem__(item)
        return int(found) if isinstance(found, np.uint8) else found

    def __setitem__(self, item: Index, value: AnyBuffer) -> None:
        """Write a number to each byte, or copy the bytes of a buffer of the same length."""
        if not self.flags.writeable:
            raise TypeError("buffer is read-only")
        if isinstance(item, slice) and not isinstance(value, np.generic) and is_buffer(value):
            value = buffer.frombuffer(value).view(np.ndarray)
            if len(value) != len(range(*item.indices(len(self)))):
                raise ValueError("slice length does not match buffer")
        super().__setitem__(item, value)

    def __iter__(self) -> Iterator[AnyScalar]:
        return iter(self.tobytes())

    def __bool__(self) -> bool:
        return bool(self.size)

    @property
    def address(self) -> int:
        return self.ctypes.data if self.size else 0

    @property
    def obj(self) -> Buffer:
        return self.base if self.size else None

    @property
    def readonly(self) -> bool:
        return not self.flags.writeable

    @property
    def format(self) -> str:
        return "B"

    def cast(self, format: str, shape: Sequence[int] | None = None) -> memoryview:
        view: Any = memoryview(self.view(np.ndarray).data)
        cast: memoryview = view.cast(format) if shape is None else view.cast(format, shape)
        return cast

    def tobytes(self, order: str | None = None) -> bytes:
        return self.view(np.ndarray).tobytes()

    def toreadonly(self) -> buffer:
        return buffer.frombuffer(self, readonly=True)

    def release(self) -> None:
        """Release the memory, as far as NumPy can."""


def Get_address(location: AnyBuffer) -> int:
    """Return the address of a buffer's memory."""
    if location is BOTTOM:
        return 0
    data = memory_of(location, False).data
    if data is None:
        return int(location.__cuda_array_interface__["data"][0])
    return int(data.ctypes.data)


def Alloc_mem(size: int, info: Info | None = None) -> buffer:
    """Allocate `size` bytes of memory."""
    return buffer.allocate(size)


def Free_mem(mem: buffer) -> None:
    """Do nothing: Python's reference counting frees what `Alloc_mem` allocated."""
