"""What XLA calls (xla/ffi/api/c_api.h): compiled code on CPUs, Python on GPUs.

XLA calls a handler with the address of a frame: arguments, results and attributes of one execution
of a custom call.
"""

from __future__ import annotations

import ctypes
import functools
import re
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import jax

from gpucoll.errors import BackendUnavailableError, StateError
from gpucoll.integrations.jax.compiled.handler import VERSION, handle_call
from gpucoll.integrations.jax.sites import Site, sites

__all__ = ["TARGET", "register"]

TARGET = "gpucoll_call"

_EXTENSION, _API, _CONTEXT, _STAGE = 1, 2, 3, 4
_N_ARGUMENTS, _ARGUMENTS, _N_RESULTS, _RESULTS, _ATTRIBUTES = 7, 9, 12, 14, 20
_EXECUTE = 3
_ERROR_CREATE, _STREAM_GET = 6, 10
_DTYPES = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64",
    6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    10: "float16", 11: "float32", 12: "float64", 16: "bfloat16",
    15: "complex64", 18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn",
}  # fmt: skip
_TOKEN = 17
_INTERNAL = 13

_Words = POINTER(c_int64)
_Ints = POINTER(c_int32)
_kept: list[Any] = []
"""What XLA calls: never freed, since handlers stay registered until the process ends."""


@functools.cache
def register() -> None:
    """Register the handlers, once, for CPUs and for NVIDIA's and AMD's GPUs.

    Raises
    ------
    BackendUnavailableError
        jaxlib has an FFI of another kind.
    """
    _check_version()
    on_gpu = CFUNCTYPE(c_void_p, c_void_p)(_handle_on_gpu)
    _kept.append(on_gpu)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)
    in_python = ctypes.cast(on_gpu, c_void_p).value
    for platform, handler in (
        ("cpu", handle_call.address),
        ("CUDA", in_python),
        ("ROCM", in_python),
    ):
        jax.ffi.register_ffi_target(TARGET, new_capsule(handler, None, None), platform=platform)


def _check_version() -> None:
    """Look into the header that jaxlib brings: XLA itself compares the minor versions."""
    if not hasattr(jax, "ffi"):
        raise BackendUnavailableError(
            f"gpucoll.integrations.jax needs jax 0.5.0 or newer; this is {jax.__version__}"
        )
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = [re.search(rf"#define XLA_FFI_API_{x} (\d+)", text) for x in ("MAJOR", "MINOR")]
    version = tuple(int(x[1]) if x else -1 for x in found)
    if version[0] != VERSION[0] or version[1] < VERSION[1]:
        raise BackendUnavailableError(
            f"the jaxlib of jax {jax.__version__} has version {version[0]}.{version[1]} of XLA's "
            f"FFI; gpucoll knows {VERSION[0]}.{VERSION[1]} and later minor versions: install jax "
            "0.5.0 to 0.10.2, or a newer gpucoll"
        )


# --- GPUs -----------------------------------------------------------------------------------------


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        *(("size", c_size_t), ("extension", c_void_p)),
        *(("message", c_char_p), ("code", c_int32)),
    )


class _StreamArguments(ctypes.Structure):
    _fields_ = (
        *(("size", c_size_t), ("extension", c_void_p)),
        *(("context", c_void_p), ("stream", c_void_p)),
    )


class _DeviceArray:
    """An array on a GPU, as `__cuda_array_interface__` describes it."""

    def __init__(self, address: int, dtype: str, shape: tuple[int, ...], stream: int) -> None:
        self.shape, self.dtype, self.ndim = shape, jax.numpy.dtype(dtype), len(shape)
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": self.dtype.str,
            "data": (address, False),
            "strides": None,
            "stream": stream or 1,
            "version": 3,
        }


def _handle_on_gpu(address: int) -> int | None:
    frame = ctypes.cast(address, _Words)
    if frame[_EXTENSION]:
        metadata = ctypes.cast(ctypes.cast(frame[_EXTENSION], _Words)[3], _Ints)
        metadata[6], metadata[7] = VERSION
        return None
    if ctypes.cast(address, _Ints)[2 * _STAGE] != _EXECUTE:
        return None
    try:
        _run_on_gpu(sites[_attribute(frame, 1)], frame)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".encode()
        create = ctypes.cast(frame[_API], _Words)[_ERROR_CREATE]
        given = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, _INTERNAL)
        made: int = CFUNCTYPE(c_void_p, c_void_p)(create)(ctypes.addressof(given))
        return made
    return None


def _run_on_gpu(site: Site, frame: Any) -> None:
    """Make a call on XLA's stream."""
    given = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame[_CONTEXT], None)
    get = ctypes.cast(frame[_API], _Words)[_STREAM_GET]
    if CFUNCTYPE(c_void_p, c_void_p)(get)(ctypes.addressof(given)):
        raise StateError(f"{site.options.spelled}: XLA did not say on which stream it runs")
    stream = given.stream or 0
    sources, results = (
        [_DeviceArray(*x, stream) for x in _buffers(frame, number, place)]
        for number, place in ((_N_ARGUMENTS, _ARGUMENTS), (_N_RESULTS, _RESULTS))
    )
    site.run(sources, results, stream=stream)


def _attribute(frame: Any, number: int) -> int:
    scalar = ctypes.cast(ctypes.cast(frame[_ATTRIBUTES], _Words)[number], _Words)
    return int(ctypes.cast(scalar[1], _Words)[0])


def _buffers(frame: Any, number: int, place: int) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return address, dtype and shape of the arguments or results; tokens are none."""
    found = []
    addresses = ctypes.cast(frame[place], _Words)
    for index in range(frame[number]):
        buffer = ctypes.cast(addresses[index], _Words)
        code = ctypes.cast(addresses[index], _Ints)[4]
        if code != _TOKEN:
            shape = ctypes.cast(buffer[5], _Words)
            dimensions = tuple(shape[axis] for axis in range(buffer[4]))
            found.append((buffer[3], _DTYPES[code], dimensions))
    return found
