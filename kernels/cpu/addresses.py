"""The addresses of kernels, and facts that their callers need. Imports no compiler by itself.

Kernels that most programs need are in the linked library of the cache. Any other is compiled when
its address is first requested, which imports LLVM; it is then kept in the cache, too.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.block_message import FORMATS, HALVES
from gpucoll.kernels.conversion import CONVERTIBLE
from gpucoll.kernels.cpu import cache
from gpucoll.types import DTYPES, ReduceOp

if TYPE_CHECKING:
    from llvmlite import ir

HALF_TYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that are accumulated in float32."""
KEPT_COUNT = 1
"""For a keeping kernel: the word after the result that contains the number of kept inputs."""
KEPT = 2
"""The word at which the kept inputs begin."""
REDUCE_ARGUMENTS = 7
"""Number of arguments of reduce and scan kernels, each a word."""
HAS_STRING_COPY = os.uname().machine == "x86_64"
"""Whether this processor has the instruction of `string_copy_kernel`."""
ROW_WORDS = 7
"""Number of words in a row of the pack kernel's table."""

_LINKED_DTYPES = ("float32", "float64", "int64", "int32")
_LINKED_OPERATIONS = ("sum", "avg", "prod", "min", "max")
_compile_lock = threading.RLock()


class CopyKind(NamedTuple):
    """The lines that a copy prefetches: ``None``, for ``"read"`` or for ``"write"``."""

    source: str | None
    destination: str | None


PLAIN = CopyKind(None, None)
POSTED = CopyKind(None, "write")
"""From private memory to a slot that others have read since: takes its lines back early."""
INTO_SLOT = CopyKind("read", None)
"""From private memory to my slot, whose lines this core still owns."""
OUT_OF_SLOT = CopyKind("write", "write")
"""From my slot to private memory: takes the slot's lines back for the next turn."""
OUT_OF_PEER = CopyKind("read", "write")
"""From a peer's memory to private memory: the peer writes there next."""


class Kernel(NamedTuple):
    """A kernel by its name, with the function that makes its LLVM IR.

    Attributes
    ----------
    name : str
        Its name in the linked library, and in a debugger.
    emitter : (str, str)
        A module in this package and its function; the module is imported only when needed.
    arguments : tuple
        The arguments of that function.
    """

    name: str
    emitter: tuple[str, str]
    arguments: tuple[Any, ...] = ()

    def emit(self) -> ir.Function:
        """Return the kernel as LLVM IR: a function of llvmlite."""
        module = importlib.import_module(f"gpucoll.kernels.cpu.{self.emitter[0]}")
        make: Callable[..., Any] = getattr(module, self.emitter[1])
        return make(*self.arguments)


def address_of(kernel: Kernel) -> int:
    """Return a kernel's address, from a library or by compiling it now (5 to 30 ms)."""
    with _compile_lock:
        library = cache.library()
        found = None if library is None else library.address(kernel.name)
        if found is None and library is not None:
            from gpucoll.kernels.cpu.kernel_files import kept_library

            path = cache.cache_folder() / f"{kernel.name}.so"
            kept = kept_library(path, functools.partial(_linked, kernel))
            found = None if kept is None else kept.address(kernel.name)
        if found is not None:
            return found
        from gpucoll.kernels.cpu.codegen import compile_function

        return compile_function(kernel.emit())


def _linked(kernel: Kernel) -> bytes:
    from gpucoll.kernels.cpu.linking import linked_kernel

    return linked_kernel(kernel.name, kernel.emit())


def linked_kernels() -> Iterator[Kernel]:
    """Yield the kernels that are in the linked library."""
    for kind in (PLAIN, POSTED, INTO_SLOT, OUT_OF_SLOT, OUT_OF_PEER):
        yield _copy(kind)
    yield from (_REFILL, _STREAMING_COPY, PACK)
    if HAS_STRING_COPY:
        yield _STRING_COPY
    for operation in _LINKED_OPERATIONS:
        yield from (_reduce(dtype, operation) for dtype in _LINKED_DTYPES)
        yield _keeping(operation)


def packaged_kernels() -> Iterator[Kernel]:
    """Yield the kernels that only the package's machine code has in addition.

    These are the same operations for all other dtypes, conversions, and compression: 0.1 MB for a
    level of processors, 3 s to make. Scans and bitwise operations would take five times as long.
    """
    for dtype in DTYPES:
        for operation in _LINKED_OPERATIONS:
            if dtype not in _LINKED_DTYPES and _is_defined(dtype, operation):
                yield _reduce(dtype, operation)
    for source_dtype in CONVERTIBLE:
        for dtype in CONVERTIBLE:
            for scales in (False, True):
                if scales or source_dtype != dtype:
                    yield _convert(source_dtype, dtype, scales)
    yield _convert("float64", "float64", True)
    for source_dtype in ("float32", *HALVES, "float64"):
        yield _add_scaled(source_dtype, "float64" if source_dtype == "float64" else "float32")
    for is_so in (False, True):
        yield from (quantise_kernel(block_format, is_so) for block_format in FORMATS)
        yield from (dequantise_kernel(wire, is_so) for wire in (*FORMATS, *HALVES))


def _is_defined(dtype: str, operation: str) -> bool:
    try:
        ReduceOp.parse(operation).check_dtype(dtype)
    except ArgumentTypeError:
        return False
    return True


# --- each kind --------------------------------------------------------------------------------

_REFILL = Kernel("gpucoll_refill", ("copy", "emit_refill"))
_STREAMING_COPY = Kernel("gpucoll_streaming_copy", ("copy", "emit_streaming_copy"))
_STRING_COPY = Kernel("gpucoll_string_copy", ("copy", "emit_string_copy"))
PACK = Kernel("gpucoll_pack", ("pack_kernel", "emit_pack"))


def _copy(kind: CopyKind) -> Kernel:
    name = f"gpucoll_copy_{kind.source or 'none'}_{kind.destination or 'none'}"
    return Kernel(name, ("copy", "emit_copy"), (kind,))


def _reduce(dtype: str, operation: str) -> Kernel:
    name = f"gpucoll_reduce_{operation}_{dtype}"
    return Kernel(name, ("reduce", "emit_reduce"), (dtype, operation))


def _keeping(operation: str) -> Kernel:
    name = f"gpucoll_reduce_keeping_{operation}"
    return Kernel(name, ("keeping", "emit_keeping"), (operation,))


def _convert(source_dtype: str, dtype: str, scales: bool) -> Kernel:
    name = f"gpucoll_convert_{source_dtype}_{dtype}{'_scaled' if scales else ''}"
    return Kernel(name, ("convert", "emit_convert"), (source_dtype, dtype, scales))


def _add_scaled(source_dtype: str, dtype: str) -> Kernel:
    name = f"gpucoll_add_scaled_{source_dtype}_{dtype}"
    return Kernel(name, ("convert", "emit_add_scaled"), (source_dtype, dtype))


def quantise_kernel(block_format: str, by_chance: bool) -> Kernel:
    """Return the kernel that writes blocks of a format."""
    name = f"gpucoll_quantise_{block_format}{'_by_chance' if by_chance else ''}"
    return Kernel(name, ("quantise_kernels", "emit_quantise"), (block_format, by_chance))


def dequantise_kernel(wire_format: str, divides: bool) -> Kernel:
    """Return the kernel that reads blocks of a format, and adds them up."""
    name = f"gpucoll_dequantise_{wire_format}{'_divided' if divides else ''}"
    return Kernel(name, ("quantise_kernels", "emit_dequantise"), (wire_format, divides))


@functools.cache
def copy_kernel(kind: CopyKind) -> int:
    """Return the address of ``kernel(destination, source, size_bytes, prefetch_bytes)``."""
    return address_of(_copy(kind))


@functools.cache
def streaming_copy_kernel() -> int:
    """Return the address of a copy kernel for data too large to stay in a cache."""
    return address_of(_STREAMING_COPY)


@functools.cache
def string_copy_kernel() -> int:
    """Return the address of a copy kernel by ``rep movsb``; only if `HAS_STRING_COPY`."""
    return address_of(_STRING_COPY)


@functools.cache
def refill_kernel() -> int:
    """Return the address of ``kernel(destination, slot, source, size_bytes, prefetch_bytes)``."""
    return address_of(_REFILL)


@functools.cache
def reduce_kernel(dtype: str, operation: str) -> int:
    """Return the address of the kernel for this dtype and operation.

    For complex dtypes the kernel counts real and imaginary parts.
    """
    return address_of(_reduce(dtype, operation))


@functools.cache
def keeping_kernel(operation: str) -> int:
    """Return the address of the int64 kernel that also keeps the inputs."""
    return address_of(_keeping(operation))


@functools.cache
def scan_kernel(dtype: str, operation: str, exclusive: bool) -> int:
    """Return the address of the scan kernel for this dtype and operation; it counts likewise."""
    name = f"gpucoll_{'exclusive_' if exclusive else ''}scan_{operation}_{dtype}"
    return address_of(Kernel(name, ("scan", "emit_scan"), (dtype, operation, exclusive)))


@functools.cache
def descent_kernel(dtype: str, has_sums: bool) -> int:
    """Return the address of the kernel of gradient descent on a row, or of Adagrad."""
    name = f"gpucoll_{'adagrad' if has_sums else 'descent'}_{dtype}"
    return address_of(Kernel(name, ("descent", "emit_descent"), (dtype, has_sums)))


@functools.cache
def convert_kernel(source_dtype: str, dtype: str, scales: bool = False) -> int:
    """Return the address of ``kernel(destination*, source*, count, scale*)``."""
    return address_of(_convert(source_dtype, dtype, scales))


@functools.cache
def add_scaled_kernel(source_dtype: str, dtype: str) -> int:
    """Return the address of ``kernel(destination*, source*, count, scale*)``, which adds."""
    return address_of(_add_scaled(source_dtype, dtype))


# --- facts for callers ----------------------------------------------------------------------------


def element_bytes(dtype: str) -> int:
    """Return the size of an element, or of a part of a complex one."""
    special = {"bool": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
    return special[dtype] if dtype in special else np.dtype(dtype).itemsize


def parts_per_element(dtype: str) -> int:
    """Return how many counted parts an element has: two for complex dtypes."""
    return 2 if dtype.startswith("complex") else 1


def changes_inputs(operation: str) -> bool:
    """Return whether the kernel changes each input before it combines them."""
    return operation in ("scaled_sum", "land", "lor", "lxor")


def parameter_for(dtype: str, values: Sequence[float]) -> npt.NDArray[np.generic]:
    """Return a kernel's parameters as an array, whose address the kernel gets."""
    if dtype.startswith(("int", "uint")):
        return np.array(values, dtype)
    plain = [value if value == value else math.nan for value in values]  # see `encode_pair`
    return np.array(plain, np.float64 if dtype in ("float64", "complex128") else np.float32)
