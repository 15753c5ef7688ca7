"""oneCCL 2022 as a vendor's library: where its copies are, and how it differs from NCCL.

Its C interface (libccl.so.2) has NCCL's functions, arguments, types and ops under names of its own,
so the table of NCCL serves it, too. Missing are: abort, asynchronous errors, gather. A call blocks
the thread that makes it where NCCL would report that it is in progress.

Source: ``oneapi/ccl.h`` and ``oneapi/ccl/v2/types.h`` of oneCCL 2022.2.
"""

from __future__ import annotations

import functools
import os
from ctypes import POINTER, Structure, c_byte, c_int, c_size_t, c_uint, c_void_p
from types import MappingProxyType
from typing import Final

from gpucoll import config
from gpucoll.backends.choice import HOST_DEVICE
from gpucoll.backends.nccl.library import Library, Vendor, find
from gpucoll.backends.nccl.prototypes import PROTOTYPES
from gpucoll.devices.foreign_library import Prototype

UNIQUE_ID_BYTES: Final = 4096
NOT_IMPLEMENTED: Final = 12
"""The code of a function that the loaded plug-in lacks."""


class UniqueId(Structure):
    """``onecclUniqueId``, which rank 0 makes and every rank joins with; passed by value."""

    _fields_ = (("internal", c_byte * UNIQUE_ID_BYTES),)


_SHARED: Final = (
    "ncclGetVersion",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclCommFinalize",
    "ncclCommDestroy",
    "ncclRedOpCreatePreMulSum",
    "ncclRedOpDestroy",
    "ncclAllReduce",
    "ncclReduce",
    "ncclBroadcast",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclAlltoAll",
    "ncclScatter",
    "ncclSend",
    "ncclRecv",
    "ncclGroupStart",
    "ncclGroupEnd",
)
"""Functions with NCCL's arguments. The other ones differ, do not work, or are not used:

- onecclCommAbort, onecclCommGetAsyncError, onecclCommInitAll: "not implemented".
- onecclCommSplit: with the CPU plug-in of 2022.2 a rank without a color hung, and the new
  communicator reported wrong ranks. Each part of a split joins by an id of its own instead.
- onecclMemAlloc, onecclCommRegister, windows: not tried on a GPU.
"""
_ROWS: Final = {row.name: row._replace(since="") for row in PROTOTYPES}
_PROTOTYPES: Final = (
    *(_ROWS[name] for name in _SHARED),
    Prototype("ncclGetUniqueId", (POINTER(UniqueId),)),
    Prototype("ncclCommInitRank", (POINTER(c_void_p), c_size_t, UniqueId, c_int)),
    Prototype("onecclSetDevice", (c_uint,)),
)


def spelled(name: str) -> str:
    """Return the library's own name of a function of the table."""
    return "onecclAllToAll" if name == "ncclAlltoAll" else name.replace("nccl", "oneccl", 1)


ONECCL: Final = Vendor(
    name="oneCCL",
    device_kind="sycl",
    variable=config.ONECCL_LIBRARY,
    pattern=r"libccl\.so\.2.*",
    # pip installs libraries beside Python's own, two folders above the packages.
    wheels=("../../libccl.so.2", "lib/libccl.so.2"),
    file_names=("libccl.so.2", "/opt/intel/oneapi/ccl/latest/lib/libccl.so.2"),
    # The C interface came with 2022.0.
    minimum=(2022, 0, 0),
    prototypes=_PROTOTYPES,
    spellings=MappingProxyType(
        {row.name: (spelled(row.name),) for row in _PROTOTYPES if row.name.startswith("nccl")}
    ),
    remedy="pip install oneccl, which brings intel-sycl-rt (oneccl-cpu has no libccl.so.2), or "
    "name a copy in " + config.ONECCL_LIBRARY,
    variables_to_mention=MappingProxyType({}),
    variables_to_set=MappingProxyType({}),
    errors=MappingProxyType({}),
    unique_id=UniqueId,
)
"""Never executed on an Intel GPU so far: tested on host memory, through oneCCL's CPU plug-in."""


@functools.cache
def load() -> Library:
    """Return oneCCL: one copy per process, found at the first call.

    Raises
    ------
    BackendUnavailableError
        There is none, or it is not usable; the text gives cause and remedy. The next call searches
        again.
    """
    is_on_host = config.uses_host_devices()
    return find(ONECCL._replace(device_kind=HOST_DEVICE) if is_on_host else ONECCL)


def set_environment(interface: str, *, is_on_host: bool) -> None:
    """Choose how oneCCL's processes talk and wait; the user's own settings stand.

    It reads these variables when a process makes its first id or communicator.

    Parameters
    ----------
    interface : str
        The interface that links the hosts; empty on one host.
    is_on_host : bool
        Whether host memory stands in for GPUs. oneCCL's threads then share the CPUs with those of
        the Host devices: if they spin, single calls of 4 KB took seconds on 2 CPUs.
    """
    # oneCCL's default, "mpi", needs ranks that MPI has started.
    os.environ.setdefault(config.CCL_ATL_TRANSPORT, "ofi")
    if is_on_host:
        os.environ.setdefault(config.CCL_YIELD, "sleep")
    if interface:
        for name in (config.CCL_KVS_IFACE, config.FI_TCP_IFACE):
            os.environ.setdefault(name, interface)
