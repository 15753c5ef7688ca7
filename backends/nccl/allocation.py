"""GPU memory from the library, which can use it in every way; otherwise from the driver."""

from __future__ import annotations

import ctypes

from gpucoll.backends.nccl.library import Library
from gpucoll.backends.nccl.prototypes import NCCL_WIN_REQUIRED_ALIGNMENT
from gpucoll.devices import Device

__all__ = ["give_back", "take", "whole_pages"]


def take(library: Library, device: Device, size_bytes: int) -> int:
    """Return the address of new memory.

    Raises
    ------
    MemoryError
        The GPU has too little free memory.
    BackendError
        The library fails for another reason.
    """
    if not library.has("ncclMemFree"):
        return device.allocate(size_bytes)
    made = ctypes.c_void_p()
    with device:
        code = library.functions.ncclMemAlloc(ctypes.byref(made), size_bytes)
    if code:
        free, total = device.memory_bytes()
        error = library.error(code, f"ncclMemAlloc of {size_bytes} bytes")
        if free < size_bytes:
            text = f"{device.label}: {error}; {free} of {total} bytes are free"
            raise MemoryError(text) from None
        raise error
    return made.value or 0


def give_back(library: Library, device: Device, address: int) -> None:
    """Free memory of `take` that nothing on the GPU uses any more."""
    if not library.has("ncclMemFree"):
        device.free(address)
        return
    with device:
        library.check(library.functions.ncclMemFree(address), "ncclMemFree")


def whole_pages(size_bytes: int) -> int:
    """Return the size rounded up to whole pages: windows must begin and end at page boundaries."""
    page = NCCL_WIN_REQUIRED_ALIGNMENT
    return max(-(-size_bytes // page), 1) * page
