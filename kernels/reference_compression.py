"""Casts, packing and block quantisation in plain, slow NumPy: the reference for the kernels.

All arithmetic is float32, each operation rounded to nearest even separately: no contraction, and
`/` is a true division. The dtypes that NumPy lacks come from ml_dtypes, which the caller imports.
`docs/compression.md` describes the formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
"""Numbers of any dtype: np.generic has no arithmetic."""
Float32s = npt.NDArray[np.float32]

BLOCK = 256
LIMITS = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
"""The greatest magnitude of a code, by block format."""
_MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}
_BIASES = {"float8_e4m3fn": 7, "float8_e5m2": 15}
_INFINITY_BITS = 0x7F800000
_NAN = np.uint32(0x7FC00000).view(np.float32)
_GREATEST_INT8_SCALE = np.uint32(0x7C010203).view(np.float32)  # 127 times it does not overflow


# --- casts and packing ----------------------------------------------------------------------------


def convert(x: Array, dtype: str, scale: float | None = None) -> Array:
    """Return x as another float dtype: widened to float32, scaled if asked for, rounded once."""
    to = np.dtype(dtype)
    if scale is None and to == x.dtype:
        return x.copy()
    with np.errstate(all="ignore"):
        if to == x.dtype == np.float64:
            return np.asarray(x * np.float64(scale or 0))
        wide = x.astype(np.float32)
        if scale is not None:
            wide = wide * np.float32(scale)
        return np.asarray(wide.astype(to))


def add_scaled(total: Array, x: Array, factor: float) -> Array:
    """Return ``total + factor * x`` in total's dtype, product and sum rounded separately."""
    with np.errstate(all="ignore"):
        return np.asarray(total + total.dtype.type(factor) * x.astype(total.dtype))


def layout(sizes_bytes: Sequence[int], alignment_bytes: int = 16) -> list[int]:
    """Return the offset of each array in a packed buffer, and last the buffer's size."""
    offsets = [0]
    for size_bytes in sizes_bytes:
        offsets.append(-(-(offsets[-1] + size_bytes) // alignment_bytes) * alignment_bytes)
    return offsets


def pack(
    arrays: Sequence[Array],
    dtype: str | None = None,
    scale: float | None = None,
    alignment_bytes: int = 16,
) -> npt.NDArray[np.uint8]:
    """Return the arrays side by side as bytes, with zeros in between."""
    made = [convert(x, dtype or x.dtype.name, scale) for x in arrays]
    offsets = layout([x.nbytes for x in made], alignment_bytes)
    buffer = np.zeros(offsets[-1], np.uint8)
    for offset, x in zip(offsets, made, strict=False):
        buffer[offset : offset + x.nbytes] = np.frombuffer(x.tobytes(), np.uint8)
    return buffer


# --- random bits ----------------------------------------------------------------------------------


def philox(key: tuple[int, int], counter: Sequence[npt.ArrayLike]) -> list[npt.NDArray[np.uint64]]:
    """Return the four words of Philox4x32-10 for each counter (Salmon et al., SC 2011)."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            second & mask,
            (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            first & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def random_bits(block: int, seed: int, sequence: int) -> npt.NDArray[np.int64]:
    """Return 16 random bits for each element of a block, as whole numbers.

    Each of 32 lanes draws once: four words. Their lower halves are for the elements ``4 lane +
    word``, their upper halves for the elements 128 further on.
    """
    lanes = [(block * 32 + lane) & (1 << 64) - 1 for lane in range(32)]
    words = philox(
        (seed & 0xFFFFFFFF, seed >> 32),
        (
            [lane & 0xFFFFFFFF for lane in lanes],
            [lane >> 32 for lane in lanes],
            sequence & 0xFFFFFFFF,
            sequence >> 32,
        ),
    )
    drawn = np.stack(words, axis=1).reshape(-1).astype(np.int64)
    return np.concatenate([drawn & 0xFFFF, drawn >> 16])


# --- blocks ---------------------------------------------------------------------------------------


def scales_bytes(blocks: int) -> int:
    """Return the size of a message's scales in bytes, a multiple of 16: the offset of its codes."""
    return -(-4 * blocks // 16) * 16


def message_bytes(blocks: int) -> int:
    """Return the size of a message in bytes: the scales, then one byte for each element."""
    return scales_bytes(blocks) + BLOCK * blocks


def quantise(
    x: Float32s,
    block_format: str,
    blocks: int,
    *,
    seed: int | None = None,
    sequence: int = 0,
    first_block: int = 0,
) -> npt.NDArray[np.uint8]:
    """Return the message of x, padded with zeros; with a seed, stochastically rounded."""
    padded = np.zeros(blocks * BLOCK, np.float32)
    padded[: x.size] = x
    scales = np.zeros(scales_bytes(blocks) // 4, np.float32)
    codes = np.zeros((blocks, BLOCK), np.uint8)
    for block, values in enumerate(padded.reshape(blocks, BLOCK)):
        drawn = None if seed is None else random_bits(first_block + block, seed, sequence)
        scales[block], codes[block] = _quantise_block(values, block_format, drawn)
    return np.concatenate([scales.view(np.uint8), codes.reshape(-1)])


def _quantise_block(
    x: Float32s, block_format: str, drawn: npt.NDArray[np.int64] | None
) -> tuple[np.float32, npt.NDArray[np.uint8]]:
    greatest = (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).max()
    if greatest >= _INFINITY_BITS:
        return _NAN, np.zeros(BLOCK, np.uint8)
    limit = np.float32(LIMITS[block_format])
    magnitude = max(greatest.view(np.float32), limit * np.float32(2.0**-126))
    scale, inverse = magnitude / limit, limit / magnitude
    if block_format == "int8":
        scale = min(scale, _GREATEST_INT8_SCALE)
    scaled = np.minimum(np.maximum(x * inverse, -limit), limit)
    if block_format == "int8":
        rounded = np.rint(scaled) if drawn is None else _round_up_by_chance(scaled, drawn)
        return scale, rounded.astype(np.int8).view(np.uint8)
    if drawn is None:
        return scale, scaled.astype(np.dtype(block_format)).view(np.uint8)
    return scale, _float8_by_chance(scaled, block_format, drawn)


def _round_up_by_chance(x: Float32s, drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the integer below or above: the fraction, in 1/65536, is the chance of the latter."""
    return np.asarray(np.rint(x * np.float32(65536)).astype(np.int64) + drawn >> 16)


def _float8_by_chance(
    x: Float32s, block_format: str, drawn: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    mantissa_bits, bias = _MANTISSA_BITS[block_format], _BIASES[block_format]
    shift = 23 - mantissa_bits
    bits = x.view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    in_least = np.abs(x) * np.float32(2.0 ** (bias - 1 + mantissa_bits))
    normal = (magnitude + (drawn << (shift - 16)) + (1 << (shift - 17))) >> shift
    is_subnormal = magnitude < (127 + 1 - bias) << 23
    subnormal = _round_up_by_chance(np.where(is_subnormal, in_least, np.float32(0)), drawn)
    code = np.where(is_subnormal, subnormal, normal - ((127 - bias) << mantissa_bits))
    return np.asarray(code | bits >> 31 << 7).astype(np.uint8)


def dequantise(
    message: npt.NDArray[np.uint8], block_format: str, blocks: int, count: int
) -> Float32s:
    """Return the first `count` elements of a message."""
    start = scales_bytes(blocks)
    scales = message[: 4 * blocks].view(np.float32)
    codes = message[start : start + BLOCK * blocks].view(np.dtype(block_format))
    with np.errstate(all="ignore"):
        values = codes.astype(np.float32).reshape(blocks, BLOCK) * scales[:, None]
    return values.reshape(-1)[:count]


def dequantise_reduce(
    messages: Sequence[npt.NDArray[np.uint8]],
    block_format: str,
    blocks: int,
    count: int,
    divisor: int | None = None,
) -> Float32s:
    """Return the sum of messages, left to right, divided at the end if a divisor is given."""
    values = [dequantise(message, block_format, blocks, count) for message in messages]
    with np.errstate(all="ignore"):
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total if divisor is None else total / np.float32(divisor)
