"""Functions of the C library that compiled code calls, each declared once, and their constants."""

from __future__ import annotations

from gpucoll.kernels.cpu.jit import inline, types
from gpucoll.kernels.cpu.memory import load32, signed32

EINTR, EAGAIN = 4, 11
POLLIN, POLLOUT = 1, 4
MSG_DONTWAIT, MSG_NOSIGNAL, MSG_MORE = 0x40, 0x4000, 0x8000
CLOCK_MONOTONIC = 1

_i64, _i32 = types.int64, types.int32
malloc = types.ExternalFunction("malloc", _i64(_i64))
free = types.ExternalFunction("free", types.void(_i64))
strdup = types.ExternalFunction("strdup", _i64(_i64))
memmove = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))
memset = types.ExternalFunction("memset", _i64(_i64, _i32, _i64))
syscall = types.ExternalFunction("syscall", _i64(_i64, _i64, _i64, _i64, _i64, _i64, _i64))
sched_yield = types.ExternalFunction("sched_yield", _i32())
clock_gettime = types.ExternalFunction("clock_gettime", _i32(_i32, _i64))
poll = types.ExternalFunction("poll", _i32(_i64, _i64, _i32))
send = types.ExternalFunction("send", _i64(_i32, _i64, _i64, _i32))
sendmsg = types.ExternalFunction("sendmsg", _i64(_i32, _i64, _i32))
recv = types.ExternalFunction("recv", _i64(_i32, _i64, _i64, _i32))
recvmsg = types.ExternalFunction("recvmsg", _i64(_i32, _i64, _i32))
write = types.ExternalFunction("write", _i64(_i32, _i64, _i64))
_errno_location = types.ExternalFunction("__errno_location", _i64())


@inline
def errno() -> int:
    """Return the errno of this thread's last system call."""
    return signed32(load32(_errno_location()))
