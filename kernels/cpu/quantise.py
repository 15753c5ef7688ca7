"""Block quantisation: a byte for each float32, and a scale for each block of 256.

A message has its blocks' scales, zeros up to a multiple of 16 bytes, then the codes. Every byte
depends only on the input; `docs/compression.md` describes the formats. Messages of float16 and
bfloat16 consist of cast elements only, also in whole blocks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gpucoll.kernels.block_message import (
    BLOCK,
    FORMATS,
    HALVES,
    codes_bytes,
    message_bytes,
    scales_bytes,
)
from gpucoll.kernels.cpu.addresses import (
    address_of,
    convert_kernel,
    dequantise_kernel,
    quantise_kernel,
)

WIRE_FORMATS = (*FORMATS, *HALVES)

Bytes = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]


@functools.cache
def _quantise_kernel(block_format: str, by_chance: bool) -> Callable[..., None]:
    address = address_of(quantise_kernel(block_format, by_chance))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(address)


@functools.cache
def _dequantise_kernel(wire_format: str, divides: bool) -> Callable[..., None]:
    address = address_of(dequantise_kernel(wire_format, divides))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(address)


@functools.cache
def _narrow_kernel(dtype: str) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(convert_kernel("float32", dtype))


def prepare_kernels(wire_format: str, *, by_chance: bool, divides: bool) -> None:
    """Compile the kernels of a compressed reduction, before anything waits for it."""
    if wire_format in HALVES:
        _narrow_kernel(wire_format)
    else:
        _quantise_kernel(wire_format, by_chance)
    for is_divided in {False, divides}:
        _dequantise_kernel(wire_format, is_divided)


def quantise(
    source: Float32s,
    message: Bytes,
    wire_format: str,
    *,
    blocks: int,
    seed: int | None = None,
    sequence: int = 0,
    first_block: int = 0,
) -> None:
    """Fill a message with the codes of `source`. Releases the GIL.

    Parameters
    ----------
    source : ndarray of float32
        C-contiguous, at any address; at most ``256 * blocks`` elements. Missing elements count as
        zeros.
    message : ndarray of uint8
        ``message_bytes(blocks, wire_format)`` bytes.
    wire_format : str
        A block format ("int8", "float8_e4m3fn", "float8_e5m2"), or "float16" or "bfloat16".
    seed : int, optional
        Round stochastically, with bits that depend on seed, sequence and the place of an element;
        an unsigned 64-bit number. Default: round to nearest even, as the half types always do.
    first_block : int
        The number of the first block, for the place.

    Notes
    -----
    Cost: one pass; the first call of a format compiles (20 ms; 50 ms with a seed).
    """
    if wire_format in HALVES:
        _narrow_kernel(wire_format)(message.ctypes.data, source.ctypes.data, source.size, 0)
        message[2 * source.size :] = 0
        return
    kernel = _quantise_kernel(wire_format, seed is not None)
    start, whole = scales_bytes(blocks), source.size // BLOCK
    message[4 * blocks : start] = 0
    random = np.array([seed or 0, sequence, first_block], np.uint64)
    to, of = message.ctypes.data, source.ctypes.data
    kernel(to, to + start, of, whole, random.ctypes.data)
    if whole < blocks:
        rest = np.zeros((blocks - whole) * BLOCK, np.float32)
        rest[: source.size - whole * BLOCK] = source[whole * BLOCK :]
        random[2] += np.uint64(whole)
        codes = to + start + whole * BLOCK
        kernel(to + 4 * whole, codes, rest.ctypes.data, blocks - whole, random.ctypes.data)


def dequantise(
    messages: Bytes,
    destination: Float32s,
    wire_format: str,
    *,
    blocks: int,
    sources: int = 1,
    divisor: int | None = None,
) -> None:
    """Fill `destination` with the values of messages, added in order. Releases the GIL.

    Parameters
    ----------
    messages : ndarray of uint8
        `sources` messages of equal numbers of blocks, one after another.
    destination : ndarray of float32
        C-contiguous, at any address; at most ``256 * blocks`` elements.
    divisor : int, optional
        The sum is divided by it.
    """
    kernel = _dequantise_kernel(wire_format, divisor is not None)
    start, stride = scales_bytes(blocks, wire_format), message_bytes(blocks, wire_format)
    whole = destination.size // BLOCK
    by = np.array([divisor or 1], np.float32)
    of = messages.ctypes.data
    kernel(destination.ctypes.data, of, stride, start, sources, whole, by.ctypes.data)
    if destination.size > whole * BLOCK:
        rest = np.empty(BLOCK, np.float32)
        # The last block is a message of its own: its scale is where that message begins.
        scale, codes = 4 * whole, start + codes_bytes(whole, wire_format)
        kernel(rest.ctypes.data, of + scale, stride, codes - scale, sources, 1, by.ctypes.data)
        destination[whole * BLOCK :] = rest[: destination.size - whole * BLOCK]
