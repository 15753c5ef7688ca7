"""The memory of a window, and how each rank of the host accesses it."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpucoll.integrations.mpi4py.errors import ArgumentError, argument_error
from gpucoll.integrations.mpi4py.type_maps import Bytes, TypeMap, basic_map

if TYPE_CHECKING:
    from gpucoll.integrations.mpi4py.specifications import Row

_libc = ctypes.CDLL(None, use_errno=True)


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


class Part(Protocol):
    """One rank's memory in a window, `size` bytes."""

    size: int

    def get(self, type_map: TypeMap, offset: int, count: int) -> Row:
        """Return a copy of the elements of items, from a byte offset on."""

    def put(self, row: Row, type_map: TypeMap, offset: int) -> None:
        """Write elements to their places."""


class MappedPart:
    """Memory that is mapped in this process: shared, or its own."""

    def __init__(self, data: Bytes) -> None:
        self.data, self.size = data, len(data)

    def get(self, type_map: TypeMap, offset: int, count: int) -> Row:
        """Return a copy of the elements of items, from a byte offset on."""
        return type_map.pack(self.data, offset, count).copy()

    def put(self, row: Row, type_map: TypeMap, offset: int) -> None:
        """Write elements to their places."""
        if type_map.is_dense:  # copy bytes, since the place may not be aligned
            data = row.view(np.uint8)
            self.data[offset : offset + len(data)] = data
        else:
            type_map.unpack(row, self.data, offset)


class PeerPart:
    """Memory of another process, accessed through the kernel.

    Parameters
    ----------
    pid : int
        The process.
    address, size : int
        The start of its memory, and the size in bytes.
    """

    def __init__(self, pid: int, address: int, size: int) -> None:
        self._pid, self._address, self.size = pid, address, size

    def get(self, type_map: TypeMap, offset: int, count: int) -> Row:
        """Return a copy of the elements of items, from a byte offset on."""
        low, high = type_map.span(count)
        block = np.empty(high - low, np.uint8)
        self._move("process_vm_readv", block, offset + low)
        return type_map.pack(block, -low, count)

    def put(self, row: Row, type_map: TypeMap, offset: int) -> None:
        """Write elements to their places, run by run, so that the gaps stay untouched."""
        data = row.view(np.uint8)
        if type_map.is_dense:
            self._move("process_vm_writev", data, offset)
            return
        done = item = 0
        while done < len(data):
            for start, length in type_map.runs.tolist():
                part = data[done : done + length]
                if len(part):
                    self._move("process_vm_writev", part, offset + item * type_map.extent + start)
                done += length
            item += 1

    def _move(self, function: str, local: Bytes, offset: int) -> None:
        done = 0
        while done < len(local):  # one call moves 2 GiB at most
            size = len(local) - done
            mine = _IoVector(local.ctypes.data + done, size)
            theirs = _IoVector(self._address + offset + done, size)
            one = ctypes.c_ulong(1)
            move = getattr(_libc, function)
            move.restype = ctypes.c_ssize_t
            moved = move(
                self._pid, ctypes.byref(mine), one, ctypes.byref(theirs), one, ctypes.c_ulong(0)
            )
            if moved <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise argument_error(
                    f"the memory of process {self._pid} cannot be accessed: {reason}; make the "
                    "window with Win.Allocate",
                    "ERR_RMA_ATTACH",
                )
            done += moved


def shows(pid: int, address: int, token: bytes) -> bool:
    """Return whether a process can be read and holds the expected token.

    In another PID namespace the same number means another process.
    """
    try:
        found = PeerPart(pid, address, len(token)).get(basic_map(np.dtype(np.uint8)), 0, len(token))
    except ArgumentError:
        return False
    return bool(found.tobytes() == token)
