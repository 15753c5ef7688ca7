"""The C interface of NCCL and RCCL: types named as in ``nccl.h``, and one row per function.

Source: ``nccl.h`` of NCCL 2.32.3, and the versions that introduced each function. RCCL has the same
enumerations and prototypes, and CUDA streams and HIP streams are both opaque pointers, so one table
serves both. RCCL's different names are in `gpucoll.backends.nccl.library`.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_byte, c_char_p, c_int, c_size_t, c_uint, c_void_p, sizeof
from enum import IntEnum
from typing import Final

from gpucoll.devices.foreign_library import Prototype

# The names of the types below are nccl.h's own.


class ncclResult_t(IntEnum):
    """How a call ended."""

    ncclSuccess = 0
    ncclUnhandledCudaError = 1
    ncclSystemError = 2
    ncclInternalError = 3
    ncclInvalidArgument = 4
    ncclInvalidUsage = 5
    ncclRemoteError = 6
    ncclInProgress = 7
    ncclTimeout = 8


class ncclDataType_t(IntEnum):
    """The type of elements."""

    ncclInt8 = 0
    ncclUint8 = 1
    ncclInt32 = 2
    ncclUint32 = 3
    ncclInt64 = 4
    ncclUint64 = 5
    ncclFloat16 = 6
    ncclFloat32 = 7
    ncclFloat64 = 8
    ncclBfloat16 = 9
    ncclFloat8e4m3 = 10
    ncclFloat8e5m2 = 11


class ncclRedOp_t(IntEnum):
    """How values are reduced; ncclRedOpCreatePreMulSum creates larger numbers."""

    ncclSum = 0
    ncclProd = 1
    ncclMax = 2
    ncclMin = 3
    ncclAvg = 4


class ncclScalarResidence_t(IntEnum):
    """When the factor of a premultiplied sum is read."""

    ncclScalarDevice = 0
    ncclScalarHostImmediate = 1


NCCL_UNIQUE_ID_BYTES: Final = 128
NCCL_CONFIG_UNDEF_INT: Final = -(2**31)
NCCL_API_MAGIC: Final = 0xCAFEBEEF
NCCL_SPLIT_NOCOLOR: Final = -1
NCCL_WIN_COLL_SYMMETRIC: Final = 1
NCCL_WIN_REQUIRED_ALIGNMENT: Final = 4096


class ncclUniqueId(Structure):
    """The id that rank 0 makes and every rank joins with; passed by value."""

    _fields_ = (("internal", c_byte * NCCL_UNIQUE_ID_BYTES),)


class ncclConfig_t(Structure):
    """How a communicator is made: the prefix of the structure that is the same in every version.

    The library copies `size` bytes, and uses its own defaults for members newer than `version`.
    Later versions append members; RCCL appends other members than NCCL. So nothing beyond this
    prefix may be passed to a library whose own layout is not known.
    """

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cgaClusterSize", c_int),
        ("minCTAs", c_int),
        ("maxCTAs", c_int),
        ("netName", c_char_p),
        ("splitShare", c_int),
    )


CONFIG_PREFIX_BYTES: Final = 48
CONFIG_PREFIX_VERSION: Final = 21700
"""The version that introduced the prefix's members, except `splitShare`, which is never set."""
assert sizeof(ncclConfig_t) == CONFIG_PREFIX_BYTES


def configuration(*, is_blocking: bool) -> ncclConfig_t:
    """Return a configuration in which everything but `blocking` is the library's default."""
    unset = NCCL_CONFIG_UNDEF_INT
    return ncclConfig_t(
        CONFIG_PREFIX_BYTES,
        NCCL_API_MAGIC,
        CONFIG_PREFIX_VERSION,
        int(is_blocking),
        unset,
        unset,
        unset,
        None,
        unset,
    )


_communicator = c_void_p
_stream = c_void_p
_window = c_void_p
_buffer = c_void_p
_type = c_int
_op = c_int
_root = c_int
_count = c_size_t
_handle_out = POINTER(c_void_p)
_int_out = POINTER(c_int)
_config = POINTER(ncclConfig_t)

PROTOTYPES: Final = (
    # --- about the library ---
    Prototype("ncclGetVersion", (_int_out,)),
    Prototype("ncclGetErrorString", (c_int,), c_char_p),
    Prototype("ncclGetLastError", (_communicator,), c_char_p),
    # --- communicators ---
    Prototype("ncclGetUniqueId", (POINTER(ncclUniqueId),)),
    Prototype("ncclCommInitRankConfig", (_handle_out, c_int, ncclUniqueId, c_int, _config)),
    Prototype("ncclCommFinalize", (_communicator,)),
    Prototype("ncclCommDestroy", (_communicator,)),
    Prototype("ncclCommAbort", (_communicator,)),
    Prototype("ncclCommSplit", (_communicator, c_int, c_int, _handle_out, _config)),
    Prototype("ncclCommGetAsyncError", (_communicator, _int_out)),
    # --- memory ---
    Prototype("ncclMemAlloc", (_handle_out, c_size_t), since="2.19"),
    Prototype("ncclMemFree", (c_void_p,), since="2.19"),
    Prototype("ncclCommRegister", (_communicator, c_void_p, c_size_t, _handle_out), since="2.19"),
    Prototype("ncclCommDeregister", (_communicator, c_void_p), since="2.19"),
    Prototype(
        "ncclCommWindowRegister",
        (_communicator, c_void_p, c_size_t, _handle_out, c_int),
        since="2.27",
    ),
    Prototype("ncclCommWindowDeregister", (_communicator, _window), since="2.27"),
    # --- reduce operations ---
    Prototype("ncclRedOpCreatePreMulSum", (_int_out, c_void_p, _type, c_int, _communicator)),
    Prototype("ncclRedOpDestroy", (_op, _communicator)),
    # --- collectives: send buffer, receive buffer, count ... ---
    Prototype("ncclAllReduce", (_buffer, _buffer, _count, _type, _op, _communicator, _stream)),
    Prototype("ncclReduce", (_buffer, _buffer, _count, _type, _op, _root, _communicator, _stream)),
    Prototype("ncclBroadcast", (_buffer, _buffer, _count, _type, _root, _communicator, _stream)),
    Prototype("ncclReduceScatter", (_buffer, _buffer, _count, _type, _op, _communicator, _stream)),
    Prototype("ncclAllGather", (_buffer, _buffer, _count, _type, _communicator, _stream)),
    Prototype(
        "ncclAlltoAll", (_buffer, _buffer, _count, _type, _communicator, _stream), since="2.28"
    ),
    Prototype(
        "ncclGather", (_buffer, _buffer, _count, _type, _root, _communicator, _stream), since="2.28"
    ),
    Prototype(
        "ncclScatter",
        (_buffer, _buffer, _count, _type, _root, _communicator, _stream),
        since="2.28",
    ),
    # --- point to point, groups ---
    Prototype("ncclSend", (_buffer, _count, _type, c_int, _communicator, _stream)),
    Prototype("ncclRecv", (_buffer, _count, _type, c_int, _communicator, _stream)),
    Prototype("ncclGroupStart", ()),
    Prototype("ncclGroupEnd", ()),
)
"""The functions that gpucoll calls; one without `since` is in every supported version."""
