"""Read a peer's private memory in one copy, made by the kernel (``process_vm_readv``).

The kernel allows it between processes of one user, unless a security policy forbids it. So every
rank tries it on a token in every other rank. This also shows that both processes mean the same by a
process number, which is not so in different PID namespaces.

Ranks only read: a peer that was given up could still write into memory that its owner has reused.
"""

from __future__ import annotations

import ctypes
import os

from gpucoll.kernels.cpu.jit import inline
from gpucoll.kernels.cpu.memory import load64_acquire
from gpucoll.transport.shared import layout
from gpucoll.transport.shared.flags import copy_from_process, event_pending_since, give_up
from gpucoll.transport.shared.layout import Abort
from gpucoll.transport.shared.steps import LINE
from gpucoll.transport.shared.words import Context, Status

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


# --- in compiled code -----------------------------------------------------------------------------


SLICE_BYTES = 16 << 20
"""After copying this much, check whether the call has been given up."""

_STATUS_COPIES = layout.STATUS_COPIES
_YES, _NO = 1, 2


@inline
def can_read(context: Context, rank: int) -> bool:
    """Return whether a rank can read the memory of all others."""
    return load64_acquire(context.status_lines + rank * LINE + _STATUS_COPIES) == 1


@inline
def can_copy_once(context: Context) -> bool:
    """Return whether all ranks can read each other's memory, once all have arrived; same on all."""
    if context.single_copy == 0:
        answer = _YES
        for rank in range(context.world_size):
            if not can_read(context, rank):
                answer = _NO
        context.single_copy = answer
    return context.single_copy == _YES


@inline
def read_from(context: Context, rank: int, destination: int, source: int, size_bytes: int) -> int:
    """Copy from an address in the process of `rank`; return a status."""
    done = 0
    while done < size_bytes:
        step = min(SLICE_BYTES, size_bytes - done)
        pid = context.pids[rank]
        if copy_from_process(context, pid, destination + done, source + done, step) != step:
            give_up(context, Abort.UNREADABLE, rank)
            return Status.LOST
        if event_pending_since(context):
            return Status.EVENT  # the data read may be invalid by now
        done += step
    return Status.OK
