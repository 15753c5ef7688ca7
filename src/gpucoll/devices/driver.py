"""The parts that CUDA's and HIP's drivers have in common, which is nearly everything.

Both drivers have the same functions under different names. `PROTOTYPES` is their common table; each
vendor's module adds the symbols and the differences.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ushort, c_void_p
from typing import Any, Final, NamedTuple

from gpucoll.devices.foreign_library import (
    Prototype,
    bind,
    files_of_wheels,
    loaded_copies,
    open_library,
)
from gpucoll.errors import BackendError, BackendUnavailableError

_HANDLES = POINTER(c_void_p)
_INTS = POINTER(c_int)

PROTOTYPES: Final = (
    Prototype("initialise", (c_uint,)),
    Prototype("driver_version", (_INTS,)),
    Prototype("device_count", (_INTS,)),
    Prototype("device_name", (c_char_p, c_int, c_int)),
    Prototype("device_uuid", (c_void_p, c_int)),
    Prototype("device_pci_bus_id", (c_char_p, c_int, c_int)),
    Prototype("synchronize", ()),
    Prototype("device_attribute", (_INTS, c_int, c_int)),
    Prototype("stream_priorities", (_INTS, _INTS)),
    Prototype("stream_create", (_HANDLES, c_uint, c_int)),
    Prototype("stream_destroy", (c_void_p,)),
    Prototype("stream_query", (c_void_p,)),
    Prototype("stream_synchronize", (c_void_p,)),
    Prototype("stream_wait_event", (c_void_p, c_void_p, c_uint)),
    Prototype("stream_is_capturing", (c_void_p, _INTS)),
    Prototype("capture_mode", (_INTS,)),
    Prototype("event_create", (_HANDLES, c_uint)),
    Prototype("event_destroy", (c_void_p,)),
    Prototype("event_record", (c_void_p, c_void_p)),
    Prototype("event_query", (c_void_p,)),
    Prototype("event_synchronize", (c_void_p,)),
    Prototype("memory_allocate", (_HANDLES, c_size_t)),
    Prototype("memory_free", (c_void_p,)),
    Prototype("memory_fill_1", (c_void_p, c_ubyte, c_size_t, c_void_p)),
    Prototype("memory_fill_2", (c_void_p, c_ushort, c_size_t, c_void_p)),
    Prototype("memory_fill_4", (c_void_p, c_uint, c_size_t, c_void_p)),
    Prototype("memory_info", (POINTER(c_size_t), POINTER(c_size_t))),
    Prototype("pointer_attribute", (c_void_p, c_int, c_void_p)),
    Prototype("module_load", (_HANDLES, c_char_p)),
    Prototype("module_unload", (c_void_p,)),
    Prototype("module_function", (_HANDLES, c_void_p, c_char_p)),
    Prototype("launch", (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_char_p), c_void_p)),
)
"""Functions that both drivers have, with the same arguments; others are in the vendors' modules."""

_DEVICE_ORDINAL = 9


class Vendor(NamedTuple):
    """The differences between the drivers."""

    kind: str
    driver: str
    """Its common name."""
    file_names: tuple[str, ...]
    """For the loader, in this order; a copy that is already in the process comes first."""
    wheels: tuple[str, ...]
    """Where Python packages keep their copies: patterns of paths, searched on Python's path."""
    prototypes: tuple[Prototype, ...]
    symbols: Mapping[str, Sequence[str]]
    attributes: Mapping[str, int]
    """Name in `device.ATTRIBUTES` -> the vendor's number."""
    remedy: str
    """What to do if there is no driver."""


class Driver:
    """A vendor's driver, loaded and initialised: its functions, and the meanings of its codes.

    Raises
    ------
    BackendUnavailableError
        It is missing, is too old, or does not start.
    """

    def __init__(self, vendor: Vendor) -> None:
        self.vendor = vendor
        functions = bind(self._open(), vendor.prototypes, vendor.symbols)
        if missing := sorted(
            {row.name for row in vendor.prototypes if not row.since} - {*functions}
        ):
            symbols = ", ".join(vendor.symbols[name][0] for name in missing)
            raise BackendUnavailableError(f"{vendor.driver} is too old: it has no {symbols}")
        self.functions = functions
        self.prepare()
        if code := functions["initialise"](0):
            raise BackendUnavailableError(
                f"{vendor.driver} does not start: {self.text(code)}. {vendor.remedy}"
            )

    def _open(self) -> ctypes.CDLL:
        problems = []
        stem = self.vendor.file_names[0].partition(".so")[0]
        loaded = loaded_copies(rf"{re.escape(stem)}\.so.*")  # PyTorch for ROCm brings its own
        wheels = files_of_wheels(self.vendor.wheels)
        for name in (*loaded, *wheels, *self.vendor.file_names):
            try:
                return open_library(name)
            except OSError as error:
                problems.append(str(error))
        raise BackendUnavailableError(
            f"{self.vendor.driver} cannot be loaded: {'; '.join(problems)}. {self.vendor.remedy}"
        )

    def prepare(self) -> None:
        """Do what is needed before the driver is initialised."""

    def text(self, code: int) -> str:
        """Return the meaning of a code."""
        raise NotImplementedError

    def number(self, name: str, *arguments: Any) -> int:
        """Call a function that returns an int through its first argument."""
        value = c_int()
        if code := self.functions[name](ctypes.byref(value), *arguments):
            raise BackendError(f"{self.vendor.driver}: {name.replace('_', ' ')}: {self.text(code)}")
        return value.value

    def device_count(self) -> int:
        """Return how many GPUs the process sees."""
        value = c_int()
        code = self.functions["device_count"](ctypes.byref(value))
        return 0 if code else value.value  # HIP returns an error if there are none

    def device_of(self, address: int) -> int | None:
        """Return the memory's device, as far as the thread's current context can tell."""
        value = c_int()
        code = self.functions["pointer_attribute"](ctypes.byref(value), _DEVICE_ORDINAL, address)
        return None if code or value.value < 0 else value.value
