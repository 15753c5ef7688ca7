"""Anonymous shared memory: one rank makes it, passes on its file descriptor, and all map it.

It has no name, so nothing is left behind, however a process dies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from typing import Final

from gpucoll.errors import SharedMemoryError

MAP_NORESERVE: Final = 0x4000
MADV_REMOVE: Final = 9
PAGE_BYTES: Final = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value

# Python's fcntl has F_ADD_SEALS and its seals only if the C library knew them at build time.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4


def create(name: str, size_bytes: int, *, reserve_bytes: int = 0) -> int:
    """Return a file descriptor of new shared memory, all zero.

    Parameters
    ----------
    name : str
        Shown in ``/proc/PID/maps``; need not be unique.
    size_bytes : int
        Its size. If the kernel can, it is sealed, so that no process can shrink it under another.
    reserve_bytes : int
        How much memory to take now, from the beginning, so that a lack of memory is an error here
        and not a SIGBUS later. Memory for the rest is taken when it is touched, or reserved
        (`room`).

    Raises
    ------
    SharedMemoryError
        There is not enough memory.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        sealable = True
    except OSError:  # forbidden (seccomp) or unknown: use a file without a name
        fd = _unlinked_file()
        sealable = False
    try:
        os.ftruncate(fd, size_bytes)
        if reserve_bytes:
            os.posix_fallocate(fd, 0, reserve_bytes)
        if sealable:
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise SharedMemoryError(_no_memory(name, reserve_bytes, error)) from error
    return fd


def cannot_shrink(fd: int) -> bool:
    """Return whether no process can shrink this memory: whoever maps it gets no SIGBUS then."""
    try:
        return bool(fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK)
    except OSError:  # no memory that can be sealed
        return False


def _unlinked_file() -> int:
    import tempfile  # only if the kernel has no memfd

    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    fd, path = tempfile.mkstemp(prefix="gpucoll-", dir=folder)
    os.unlink(path)
    return fd


def _no_memory(name: str, size_bytes: int, error: OSError) -> str:
    return (
        f"no shared memory for {name}: {size_bytes} bytes were refused ({error.strerror}). Free "
        "memory, raise the limit of the process or its cgroup, or use fewer ranks"
    )


def _no_addresses(name: str, size_bytes: int, error: OSError, remedy: str) -> str:
    return (
        f"no address space for {name}: {size_bytes} bytes were refused ({error.strerror}). Raise "
        f"the limit of the process (ulimit -v){remedy}, or use fewer ranks"
    )


def unmap(address: int, size_bytes: int) -> None:
    """Remove a mapping from the address space. Its addresses must not be used afterwards."""
    _libc.munmap(address, size_bytes)


class Mapping:
    """A piece of shared memory in this process's address space.

    Parameters
    ----------
    fd, size_bytes : int
        The memory's descriptor, and the size to map from its beginning.
    name : str
        The memory's name in the error.
    remedy : str
        A further remedy for a lack of address space: the end of a sentence.
    writable : bool
        Whether this process may write to it.

    Raises
    ------
    SharedMemoryError
        The system does not map it.
    """

    def __init__(
        self,
        fd: int,
        size_bytes: int,
        name: str = "shared memory",
        remedy: str = "",
        *,
        writable: bool = True,
    ) -> None:
        address = _libc.mmap(
            None,
            size_bytes,
            mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
            mmap.MAP_SHARED | MAP_NORESERVE,
            fd,
            0,
        )
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            error = OSError(number, os.strerror(number))
            raise SharedMemoryError(_no_addresses(name, size_bytes, error, remedy))
        self.address: int = address
        self.size_bytes = size_bytes
        self._is_mapped = True

    @property
    def is_mapped(self) -> bool:
        """Whether its addresses may still be used."""
        return self._is_mapped

    def unmap(self) -> None:
        """Remove it from the address space. Its addresses must not be used afterwards."""
        if self._is_mapped:
            self._is_mapped = False
            unmap(self.address, self.size_bytes)

    def give_back(self, offset: int, size_bytes: int) -> None:
        """Return whole pages to the system; they read as zeros afterwards, in every process."""
        start = -(-offset // PAGE_BYTES) * PAGE_BYTES
        stop = (offset + size_bytes) // PAGE_BYTES * PAGE_BYTES
        if stop > start and _libc.madvise(self.address + start, stop - start, MADV_REMOVE) != 0:
            number = ctypes.get_errno()
            if number != errno.EOPNOTSUPP:  # a file system without holes keeps the pages: no harm
                raise OSError(number, os.strerror(number))
