"""What XLA calls: handlers of its FFI (xla/ffi/api/c_api.h), by ctypes.

XLA calls a handler with the address of a frame: arguments, results and attributes of one execution
of a custom call. The words of the frame are the same since version 0.1 of the interface; a jaxlib
with another version is refused when the handlers are registered.
"""

from __future__ import annotations

import _thread
import collections
import ctypes
import re
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    StateError,
)
from gpucoll.integrations.jax.sites import Site, sites
from gpucoll.types import DTYPES

__all__ = ["TARGET", "failures", "register"]

TARGET = "gpucoll_call"
VERSIONS = ((0, 1), (0, 2), (0, 3))
"""Those of XLA's FFI whose frame is as below."""

_EXTENSION, _API, _CONTEXT, _STAGE = 1, 2, 3, 4
_N_ARGUMENTS, _ARGUMENTS = 7, 9
_N_RESULTS, _RESULTS = 12, 14
_ATTRIBUTES = 20
_FRAME_BYTES = 168
_RANK, _SHAPE, _DATA = 4, 5, 3
"""Words of the frame, and of a buffer."""
_EXECUTE = 3
_ERROR_CREATE, _STREAM_GET = 6, 10
"""Words of the table of functions."""

_CODES: tuple[tuple[Any, int], ...] = (
    ((MismatchError, StateError), 9),  # FAILED_PRECONDITION
    ((ArgumentError, ArgumentTypeError), 3),  # INVALID_ARGUMENT
    (DeadlineError, 4),
    (PeerLostError, 14),  # UNAVAILABLE
    (AbortedError, 10),
)
_INTERNAL = 13
_DTYPES = {
    1: "bool", 2: "int8", 3: "int16", 4: "int32", 5: "int64",
    6: "uint8", 7: "uint16", 8: "uint32", 9: "uint64",
    10: "float16", 11: "float32", 12: "float64", 16: "bfloat16",
    15: "complex64", 18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn",
}  # fmt: skip
_TOKEN = 17

_Words = POINTER(c_int64)
_Ints = POINTER(c_int32)
_Handler = CFUNCTYPE(c_void_p, c_void_p)

failures: collections.deque[str] = collections.deque(maxlen=16)
"""The texts of errors of calls that have no result, which JAX tells nobody."""


class _ErrorArguments(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class _StreamArguments(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("context", c_void_p),
        ("stream", c_void_p),
    )


_kept: list[Any] = []
"""What XLA calls: never freed, since handlers stay registered until the process ends."""


def register() -> None:
    """Register the handlers, for CPUs and for NVIDIA's and AMD's GPUs.

    Raises
    ------
    BackendUnavailableError
        jaxlib has another version of the FFI.
    """
    version = _version()
    for platform, run in (("cpu", _run_on_host), ("CUDA", _run_on_gpu), ("ROCM", _run_on_gpu)):
        handler = _Handler(_handler(version, run))
        _kept.append(handler)
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)
        address = ctypes.cast(handler, c_void_p).value
        jax.ffi.register_ffi_target(TARGET, capsule(address, None, None), platform=platform)


def _version() -> tuple[int, int]:
    """Return the version of jaxlib's FFI, which the header says that jaxlib brings."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = [re.search(rf"#define XLA_FFI_API_{x} (\d+)", text) for x in ("MAJOR", "MINOR")]
    version = tuple(int(x[1]) if x else -1 for x in found)
    if version not in VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        raise BackendUnavailableError(
            f"jaxlib {jaxlib.__version__} has version {version[0]}.{version[1]} of XLA's FFI; this "
            f"version of gpucoll knows {known}: install jax and jaxlib 0.5.0 to 0.10.2, or a newer "
            "gpucoll"
        )
    return version  # type: ignore[return-value]  # two


def _handler(
    version: tuple[int, int], run: Callable[[Site, Any], None]
) -> Callable[[int], int | None]:
    def handle(address: int) -> int | None:
        frame = ctypes.cast(address, _Words)
        if frame[_EXTENSION]:
            return _tell_version(frame, version)
        if ctypes.cast(address, _Ints)[2 * _STAGE] != _EXECUTE:
            return None
        site = None
        try:
            site = sites[_site_key(frame)]
            run(site, frame)
        except BaseException as error:  # noqa: BLE001 - C++ is told of every one
            if isinstance(error, KeyboardInterrupt):
                _thread.interrupt_main()
            return _error(frame, site, error)
        return None

    return handle


def _tell_version(frame: Any, version: tuple[int, int]) -> None:
    """Answer XLA's question which version the handler was written for."""
    if frame[0] < _FRAME_BYTES:
        return
    metadata = ctypes.cast(ctypes.cast(frame[_EXTENSION], _Words)[3], _Ints)
    metadata[6], metadata[7] = version
    metadata[8] = 0  # no traits


def _site_key(frame: Any) -> int:
    scalar = ctypes.cast(ctypes.cast(frame[_ATTRIBUTES], _Words)[0], _Words)
    return int(ctypes.cast(scalar[1], _Words)[0])


def _error(frame: Any, site: Site | None, error: BaseException) -> int:
    """Return XLA's form of an error."""
    code = next((code for kinds, code in _CODES if isinstance(error, kinds)), _INTERNAL)
    text = f"{type(error).__name__}: {error}"
    if site is not None and not site.gets:
        failures.append(text)
    create = ctypes.cast(frame[_API], _Words)[_ERROR_CREATE]
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text.encode(), code)
    return CFUNCTYPE(c_void_p, c_void_p)(create)(ctypes.addressof(arguments))  # type: ignore[no-any-return]


def _buffers(frame: Any, number: int, place: int) -> list[tuple[int, str, tuple[int, ...]]]:
    """Return address, dtype and shape of the arguments or results; tokens are none."""
    found = []
    addresses = ctypes.cast(frame[place], _Words)
    for index in range(frame[number]):
        buffer = ctypes.cast(addresses[index], _Words)
        code = ctypes.cast(addresses[index], _Ints)[4]
        if code != _TOKEN:
            shape = ctypes.cast(buffer[_SHAPE], _Words)
            dimensions = tuple(shape[axis] for axis in range(buffer[_RANK]))
            found.append((buffer[_DATA], _DTYPES[code], dimensions))
    return found


_dtypes: dict[str, np.dtype[Any]] = {name: jax.numpy.dtype(name) for name in DTYPES}


def _host_array(address: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    kind = _dtypes[dtype]
    size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if not size:
        return np.empty(shape, kind)
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)


def _run_on_host(site: Site, frame: Any) -> None:
    sources = [_host_array(*x) for x in _buffers(frame, _N_ARGUMENTS, _ARGUMENTS)]
    results = [_host_array(*x) for x in _buffers(frame, _N_RESULTS, _RESULTS)]
    site.run(sources, results)


class _DeviceArray:
    """An array on a GPU, as `__cuda_array_interface__` describes it."""

    def __init__(self, address: int, dtype: str, shape: tuple[int, ...], stream: int) -> None:
        kind = _dtypes[dtype]
        self.dtype, self.shape, self.ndim = kind, shape, len(shape)
        self._address, self._stream = address, stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "strides": None,
            "stream": self._stream or 1,
            "version": 3,
        }

    def reshape(self, *shape: int) -> _DeviceArray:
        return _DeviceArray(self._address, self.dtype.name, shape, self._stream)


def _run_on_gpu(site: Site, frame: Any) -> None:
    arguments = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame[_CONTEXT], None)
    get = ctypes.cast(frame[_API], _Words)[_STREAM_GET]
    if CFUNCTYPE(c_void_p, c_void_p)(get)(ctypes.addressof(arguments)):
        raise StateError(f"{site.options.spelled}: XLA did not say on which stream it runs")
    stream = arguments.stream or 0
    sources = [_DeviceArray(*x, stream) for x in _buffers(frame, _N_ARGUMENTS, _ARGUMENTS)]
    results = [_DeviceArray(*x, stream) for x in _buffers(frame, _N_RESULTS, _RESULTS)]
    site.run(sources, results, stream=stream)
