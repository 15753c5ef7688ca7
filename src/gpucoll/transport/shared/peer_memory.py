"""Read a peer's private memory in one copy, made by the kernel (``process_vm_readv``).

The kernel allows it between processes of one user, unless a security policy forbids it. So every
rank tries it on a token in every other rank. This also shows that both processes mean the same by a
process number, which is not so in different PID namespaces.
"""

from __future__ import annotations

import ctypes
import os

TOKEN_BYTES = 16


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_probe: tuple[int, ctypes.Array[ctypes.c_char]] | None = None


def own_probe() -> tuple[int, str]:
    """Return the address of this process's token, and the token in hexadecimal."""
    global _probe
    if _probe is None or _probe[0] != os.getpid():
        _probe = os.getpid(), ctypes.create_string_buffer(os.urandom(TOKEN_BYTES))
    buffer = _probe[1]
    return ctypes.addressof(buffer), buffer.raw[:TOKEN_BYTES].hex()


def is_readable(pid: int, address: int, token: str) -> bool:
    """Return whether this process can read the token at this address of the other process."""
    read = getattr(_libc, "process_vm_readv", None)
    if read is None:
        return False
    found = ctypes.create_string_buffer(TOKEN_BYTES)
    local = _IoVector(ctypes.addressof(found), TOKEN_BYTES)
    remote = _IoVector(address, TOKEN_BYTES)
    read.restype = ctypes.c_ssize_t
    count = read(
        ctypes.c_int(pid),
        ctypes.byref(local),
        ctypes.c_ulong(1),
        ctypes.byref(remote),
        ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )
    return bool(count == TOKEN_BYTES and found.raw == bytes.fromhex(token))
