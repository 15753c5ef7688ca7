"""Casts of whole arrays between float32 and the half types, with an optional factor.

``kernel(destination*, source*, count, scale*)``: widened to float32, multiplied, rounded once. A
kernel that adds rounds the product, adds it to the destination and rounds the sum: float32 and the
half types to float32, float64 to float64.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from gpucoll.kernels.cpu.addresses import convert_kernel
from gpucoll.kernels.cpu.codegen import (
    CACHE_LINE_BYTES,
    I64,
    blocks,
    new_function,
    pointer,
    prefetch,
    vector,
    vector_bytes,
)
from gpucoll.kernels.cpu.elements import elements
from gpucoll.kernels.cpu.reduce import splat

_UNROLL = 4
_AHEAD_ELEMENTS = 1024
_ADDING_UNROLL = 2
"""With 2 and no prefetching, adding float32 moved 44.8 GB/s where NumPy's `add` moved 45.0; with 4
and prefetching 41 (EPYC, two cores of a virtual machine)."""


def emit_convert(source_dtype: str, dtype: str, scales: bool) -> ir.Function:
    """Return the kernel ``(destination*, source*, count, scale*)``; addresses may be misaligned.

    The scale is a float32, or a float64 for float64; without `scales` it is not read.
    """
    name = f"convert_{source_dtype}_{dtype}{'_scaled' if scales else ''}"
    return _emit(name, source_dtype, dtype, scales=scales, adds=False)


def emit_add_scaled(source_dtype: str, dtype: str) -> ir.Function:
    """Return the kernel ``(destination*, source*, count, scale*)`` that adds to the destination.

    `dtype` is float32 or float64, and so is the scale.
    """
    name = f"add_scaled_{source_dtype}_{dtype}"
    return _emit(name, source_dtype, dtype, scales=True, adds=True)


def _emit(name: str, source_dtype: str, dtype: str, *, scales: bool, adds: bool) -> ir.Function:
    come, go = elements()[source_dtype], elements()[dtype]
    function, b = new_function(name, (I64,) * 4)
    destination, source, count, scale = function.args
    held = come.accumulator
    factor = b.load(pointer(b, scale, held), align=1, typ=held) if scales else None

    def body(first: ir.Value, lanes: int, unroll: int) -> None:
        by = factor if factor is None or lanes == 1 else splat(b, factor, lanes)
        read = b.add(source, b.mul(first, I64(come.size_bytes)))
        write = b.add(destination, b.mul(first, I64(go.size_bytes)))
        if unroll > 1 and not adds:
            _fetch_ahead(b, read, come.size_bytes, lanes * unroll, for_write=False)
            _fetch_ahead(b, write, go.size_bytes, lanes * unroll, for_write=True)
        for turn in range(unroll):
            of = b.add(read, I64(turn * lanes * come.size_bytes))
            to = b.add(write, I64(turn * lanes * go.size_bytes))
            kind = vector(come.storage, lanes)
            value = come.load(b, b.load(pointer(b, of, kind), align=1, typ=kind))
            value = value if by is None else b.fmul(value, by)
            if adds:
                before = b.load(pointer(b, to, value.type), align=1, typ=value.type)
                value = b.fadd(before, value)
            value = go.store(b, value)
            b.store(value, pointer(b, to, value.type), align=1)

    lanes = vector_bytes() // (8 if source_dtype == "float64" else 4)
    blocks(b, count, [(lanes, _ADDING_UNROLL if adds else _UNROLL), (lanes, 1), (1, 1)], body)
    b.ret_void()
    return function


def _fetch_ahead(
    b: ir.IRBuilder, address: ir.Value, item_bytes: int, count: int, *, for_write: bool
) -> None:
    for offset in range(0, count * item_bytes, CACHE_LINE_BYTES):
        line = b.add(address, I64(_AHEAD_ELEMENTS * item_bytes + offset))
        prefetch(b, line, for_write=for_write)


@functools.cache
def _callable(address: int) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address)


def cast(source: npt.NDArray[np.generic], destination: npt.NDArray[np.generic]) -> None:
    """Cast between float32 and a half type, or between two half types. Releases the GIL.

    Parameters
    ----------
    source, destination : ndarray
        C-contiguous, of equal size, at any address. Rounds to nearest even; float16, bfloat16 and
        float8_e5m2 overflow to infinity, float8_e4m3fn to NaN, as in ml_dtypes.
    """
    kernel = _callable(convert_kernel(source.dtype.name, destination.dtype.name))
    kernel(destination.ctypes.data, source.ctypes.data, source.size, 0)


def cast_array(
    source: npt.NDArray[np.generic], dtype: str, *, narrows: bool
) -> npt.NDArray[np.generic]:
    """Return float32 numbers as the bits of a half type, or the reverse. Releases the GIL.

    The bits are unsigned integers, because NumPy itself has no such dtypes.
    """
    bits = np.dtype(f"u{elements()[dtype].size_bytes}")
    held = np.ascontiguousarray(source, np.float32 if narrows else bits)
    made = np.empty(held.shape, bits if narrows else np.float32)
    ends = ("float32", dtype) if narrows else (dtype, "float32")
    _callable(convert_kernel(*ends))(made.ctypes.data, held.ctypes.data, held.size, 0)
    return made
