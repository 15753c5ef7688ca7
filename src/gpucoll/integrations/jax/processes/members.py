"""The devices of a communicator that XLA makes, which MPI's interface does not tell.

XLA makes a communicator by ``MPI_Comm_split`` with the first device as color and this device's
place as key. By MPI's rules every process would have to join that call. XLA's threads do not: only
the devices of the communicator call it. Which these are stands in an object of XLA, the clique's
key, that a function further up the stack refers to. It is found by its C++ type and read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection

__all__ = ["find"]

_TYPE_NAME = b"N3xla3cpu12CpuCliqueKeyE\0"
_STACK_BYTES = 8192
"""How far up the stack to look. It was found 72 to 656 bytes up (jaxlib 0.10.2)."""
_MOST_DEVICES = 1 << 16


def find(stack: int, first: int, place: int, known: Collection[int]) -> list[int] | None:
    """Return the devices of the clique of which a function up the stack has the key.

    Parameters
    ----------
    stack : int
        The address of a variable of XLA's function that makes the communicator.
    first, place : int
        The clique's first device, and the calling device's place in the clique.
    known : collection of int
        The numbers of all devices.

    Returns
    -------
    list of int or None
        None: there is no such object, as with versions of jaxlib before 0.5.
    """
    with _Memory() as memory:
        for pointer in memory.words(stack & ~7, _STACK_BYTES):
            if memory.type_name(pointer) != _TYPE_NAME:
                continue
            for code in "iq":  # how XLA's versions store a device's number
                devices = memory.vector(pointer + 8, code)
                is_plausible = place < len(devices) == len(set(devices))
                if is_plausible and devices[0] == first and set(devices).issubset(known):
                    return devices
    return None


class _Memory:
    """This process's memory, of which any address may be asked for."""

    def __enter__(self) -> _Memory:
        self._file = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, address: int, n_bytes: int) -> bytes:
        """Return what is there; fewer bytes, or none, if there is no memory."""
        if not 0 < address < 1 << 47:
            return b""
        try:
            return os.pread(self._file, n_bytes, address)
        except OSError:
            return b""

    def words(self, address: int, n_bytes: int) -> tuple[int, ...]:
        found = self.read(address, n_bytes)
        return struct.unpack_from(f"<{len(found) // 8}Q", found)

    def word(self, address: int) -> int:
        return next(iter(self.words(address, 8)), 0)

    def type_name(self, pointer: int) -> bytes:
        """Return the name of an object's C++ type, by its table of virtual functions."""
        if pointer & 7 or not (table := self.word(pointer)):
            return b""
        about = self.word(table - 8)
        return self.read(self.word(about + 8), len(_TYPE_NAME)) if about else b""

    def vector(self, address: int, code: str) -> list[int]:
        """Return the numbers in a std::vector."""
        size = struct.calcsize(code)
        begin, end = (*self.words(address, 16), 0, 0)[:2]
        if not 0 < end - begin <= _MOST_DEVICES * size or (end - begin) % size:
            return []
        found = self.read(begin, end - begin)
        return list(struct.unpack(f"<{len(found) // size}{code}", found))
