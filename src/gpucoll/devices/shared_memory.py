"""What ranks of one host share through a vendor's driver: exported memory, pinned memory, words.

`device.Device` describes the methods. CUDA and HIP differ here only in the names of the functions
and in how a stream waits, which is in each vendor's module.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_int, c_size_t, c_uint, c_void_p
from typing import Any, Final

from gpucoll.devices.device import Exported
from gpucoll.devices.driver_device import DriverDevice
from gpucoll.devices.foreign_library import Prototype

_HANDLE_BYTES: Final = 64


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``, ``hipIpcMemHandle_t``: an opaque handle of the driver."""

    _fields_ = (("data", c_char * _HANDLE_BYTES),)


_ADDRESS = POINTER(c_void_p)

PROTOTYPES: Final = (
    Prototype("memory_range", (_ADDRESS, POINTER(c_size_t), c_void_p)),
    Prototype("memory_export", (POINTER(IpcHandle), c_void_p)),
    Prototype("memory_open", (_ADDRESS, IpcHandle, c_uint)),
    Prototype("memory_close", (c_void_p,)),
    Prototype("host_allocate", (_ADDRESS, c_size_t, c_uint)),
    Prototype("host_free", (c_void_p,)),
    Prototype("host_register", (c_void_p, c_size_t, c_uint)),
    Prototype("host_unregister", (c_void_p,)),
    Prototype("host_device_address", (_ADDRESS, c_void_p, c_uint)),
    Prototype("can_access_peer", (POINTER(c_int), c_int, c_int)),
    Prototype("stream_write_value", (c_void_p, c_void_p, c_uint, c_uint), since="CUDA 8"),
)

_LAZY_PEER_ACCESS: Final = 1
_PORTABLE_AND_MAPPED: Final = 1 | 2
_IS_MANAGED: Final = 8
_OUT_OF_MEMORY: Final = 2
_CANNOT_BE_EXPORTED: Final = (1, 400, 800, 801)
"""Invalid value or handle, not permitted, not supported: the memory cannot be exported."""
_MISSING: Final = 801
"""Not supported: the code for a function that the driver lacks."""
_WORD: Final = (1 << 32) - 1


class SharedMemoryDevice(DriverDevice):
    """A GPU through its vendor's driver, with the features that ranks of one host share."""

    # --- words ------------------------------------------------------------------------------------

    @property
    def can_wait_for_values(self) -> bool:
        raise NotImplementedError

    def stream_wait_value(self, stream: int, address: int, value: int) -> int:
        raise NotImplementedError

    def stream_write_value(self, stream: int, address: int, value: int) -> int:
        return self._quick("stream_write_value", stream, address, value & _WORD, 0)

    def _quick(self, name: str, *arguments: Any) -> int:
        function = self._functions.get(name)
        return _MISSING if function is None else int(function(*arguments))

    # --- memory that other devices write ----------------------------------------------------------

    def flush_remote_writes(self) -> None:
        """Do nothing: see `remote_writes_problem`."""

    @property
    def remote_writes_problem(self) -> str:
        return "its driver does not tell when streams see what a NIC has written"

    # --- host memory ------------------------------------------------------------------------------

    def allocate_pinned(self, size_bytes: int) -> int:
        found = c_void_p()
        arguments = ctypes.byref(found), max(size_bytes, 1), _PORTABLE_AND_MAPPED
        with self, self.relaxed_capture():
            code = self._functions["host_allocate"](*arguments)
        if code == _OUT_OF_MEMORY:
            raise MemoryError(
                f"{self.label}: no {size_bytes} bytes of page-locked host memory: have less of it "
                "elsewhere, or raise the limits (ulimit -l, the container's memory)"
            )
        self.check(code, f"allocate {size_bytes} bytes of page-locked host memory")
        return found.value or 0

    def free_pinned(self, address: int) -> None:
        with self:
            self._call("host_free", "free page-locked host memory", address)

    def register_host(self, address: int, size_bytes: int) -> int:
        what, found = f"page-lock {size_bytes} bytes of host memory", c_void_p()
        with self, self.relaxed_capture():
            self._call("host_register", what, address, size_bytes, _PORTABLE_AND_MAPPED)
            arguments = ctypes.byref(found), address, 0
            code = self._functions["host_device_address"](*arguments)
            if code:
                self._functions["host_unregister"](address)
        self.check(code, "see page-locked host memory")
        return found.value or 0

    def unregister_host(self, address: int) -> None:
        with self:
            self._call("host_unregister", "let page-locked host memory go", address)

    # --- other processes' memory ------------------------------------------------------------------

    def export_memory(self, address: int) -> Exported | None:
        if self.is_managed(address):
            return None
        base, size, handle = c_void_p(), c_size_t(), IpcHandle()
        with self, self.relaxed_capture():
            places = ctypes.byref(base), ctypes.byref(size)
            code = self._functions["memory_range"](*places, address)
            code = code or self._functions["memory_export"](ctypes.byref(handle), base)
        if code in _CANNOT_BE_EXPORTED:
            return None
        self.check(code, "export memory to other processes")
        return Exported(bytes(handle), address - (base.value or 0), size.value)

    def open_exported(self, handle: bytes) -> int:
        if len(handle) != _HANDLE_BYTES:
            raise ValueError(f"a handle of GPU memory has {_HANDLE_BYTES} bytes; got {len(handle)}")
        base, given = c_void_p(), IpcHandle.from_buffer_copy(handle)
        with self, self.relaxed_capture():
            what = "open another process's memory"
            self._call("memory_open", what, ctypes.byref(base), given, _LAZY_PEER_ACCESS)
        return base.value or 0

    def close_exported(self, base: int) -> None:
        with self:
            self._call("memory_close", "close another process's memory", base)

    def can_access(self, number: int) -> bool:
        if number == self.number:
            return True
        answer = c_int()
        what = f"tell whether it reads {self.kind}:{number}'s memory"
        self._call("can_access_peer", what, ctypes.byref(answer), self.number, number)
        return answer.value != 0

    def is_managed(self, address: int) -> bool:
        answer = c_uint(0)  # drivers write one byte of it, or all four
        with self:
            arguments = ctypes.byref(answer), _IS_MANAGED, address
            code = self._functions["pointer_attribute"](*arguments)
        return code == 0 and answer.value != 0
