"""Memory for a part of the segment, taken when the part is first used: from compiled code.

The segment is as large as it may ever become, and sparse. A page of it that nobody has reserved is
taken by the kernel when it is touched, even by a load, and where it has none left the process dies
of a SIGBUS. So a part is reserved before its first use, by whoever uses it first; the others look
at it only behind a flag that says so, in a part that is reserved from the beginning.

How much may be taken before the host's free memory is looked at again is in the context: the kernel
ends a process rather than refuse (`group.host.segment_room` looks, and grants more).
"""

from __future__ import annotations

import numpy as np
from numba import types

from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import get, load32_acquire, put
from gpucoll.transport.shared.words import Context, Status

__all__ = ["PIECE_BYTES", "reserve", "reserve_part"]

PIECE_BYTES = 1 << 20
"""Reserved at once: a signal makes the kernel give back what it has taken so far of one piece."""
EINTR, EOPNOTSUPP = 4, 95

_SEGMENT_FD, _EVENT_LINE = int(Context.SEGMENT_FD), int(Context.EVENT_LINE)
_ROOM_BYTES = int(Context.ROOM_BYTES)
_REFUSED_BYTES, _REFUSED_ERROR = int(Context.REFUSED_BYTES), int(Context.REFUSED_ERROR)
_OK, _NO_ROOM = int(Status.OK), int(Status.NO_ROOM)

_i64, _i32 = types.int64, types.int32
_fallocate = types.ExternalFunction("fallocate", _i32(_i32, _i32, _i64, _i64))
_errno_location = types.ExternalFunction("__errno_location", _i64())


@inline
def _reserve_piece(fd, offset, size_bytes):
    """Reserve a piece of a file; return 0, or the number of the kernel's error."""
    while True:
        if _fallocate(np.int32(fd), np.int32(0), offset, size_bytes) == 0:
            return 0
        error = np.int64(load32_acquire(_errno_location()))
        if error == EOPNOTSUPP:  # no memfd and a file system without it: pages come as ever
            return 0
        if error != EINTR:
            return error


@inline
def reserve(context, address, size_bytes):
    """Take memory for a part of the segment; return OK, or NO_ROOM and nothing has happened.

    Whole pages. What is reserved already is not touched, so two ranks may do it at once. Why there
    is NO_ROOM is in the context: `group.host.segment_room.make_room` grants more, or raises.
    """
    put(context, _REFUSED_BYTES, size_bytes)
    put(context, _REFUSED_ERROR, 0)
    if size_bytes > get(context, _ROOM_BYTES):
        return _NO_ROOM
    done, offset = 0, address - get(context, _EVENT_LINE)
    while done < size_bytes:
        step = min(PIECE_BYTES, size_bytes - done)
        error = _reserve_piece(get(context, _SEGMENT_FD), offset + done, step)
        if error != 0:
            put(context, _REFUSED_ERROR, error)
            return _NO_ROOM
        done += step
    put(context, _ROOM_BYTES, get(context, _ROOM_BYTES) - size_bytes)
    return _OK


@compiled(_i64(_i64, _i64, _i64))
def reserve_part(context, address, size_bytes):
    """Take memory for a part of the segment; return a status. For Python."""
    return reserve(context, address, size_bytes)
