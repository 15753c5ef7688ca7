"""Block quantisation: a byte for each float32, and a scale for each block of 256.

A message is its blocks' scales, zeros up to a multiple of 16 bytes, then the codes. Every byte of it
follows from the input alone; `docs/compression.md` has the formats. No contraction: each operation
is rounded by itself, as in NumPy and on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from gpucoll.kernels.cpu.block_codes import BLOCK, FORMATS, BlockFormat
from gpucoll.kernels.cpu.codegen import (
    CACHE_LINE_BYTES,
    F32,
    I8,
    I32,
    I64,
    compile_function,
    constant,
    counted_loop,
    new_function,
    pointer,
    prefetch,
    vector,
    vector_bytes,
)
from gpucoll.kernels.cpu.philox import COUNTERS, Generator
from gpucoll.kernels.cpu.reduce import compile_lock, splat

_UNROLL = 4
_ALIGNMENT_BYTES = 16
_AHEAD = 4096
"""Bytes of float32 between what is prefetched and what is worked on. Measured: 0.56 of memcpy's rate
without prefetching, 0.77 with 1024, 1.0 with 4096 (quantise to int8, Xeon with AVX-512)."""
_INFINITY, _NAN = 0x7F800000, 0x7FC00000

Bytes = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]


def scales_bytes(blocks: int) -> int:
    """Return where the codes of a message of so many blocks begin."""
    return -(-4 * blocks // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def message_bytes(blocks: int) -> int:
    """Return the size of a message of so many blocks."""
    return scales_bytes(blocks) + BLOCK * blocks


# --- LLVM IR --------------------------------------------------------------------------------------


def _place(b: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """Return a pointer to element `index` of an array of `kind`."""
    return b.gep(pointer(b, address, kind), [index], source_etype=kind)


def _load(b: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type, lanes: int) -> Any:
    wide = vector(kind, lanes)
    where = b.bitcast(_place(b, address, index, kind), wide.as_pointer())
    return b.load(where, align=1, typ=wide)


def _store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, index: ir.Value) -> None:
    where = _place(b, address, index, value.type.element)
    b.store(value, b.bitcast(where, value.type.as_pointer()), align=1)


def _prefetch(
    b: ir.IRBuilder, address: ir.Value, size_bytes: int, ahead: int, *, for_write: bool = False
) -> None:
    for line in range(0, size_bytes, CACHE_LINE_BYTES):
        prefetch(b, b.add(address, I64(ahead + line)), for_write=for_write)


def _greater(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed(">", x, y), x, y)


def _greatest_bits(b: ir.IRBuilder, source: ir.Value, first: ir.Value, lanes: int) -> ir.Value:
    """Return the largest magnitude of a block, as bits: NaN and infinity are the largest."""
    ints = vector(I32, lanes)
    found = [constant(ints, 0)] * _UNROLL
    end = b.add(first, I64(BLOCK))
    with counted_loop(b, first, end, I64(lanes * _UNROLL), found) as (index, before, after):
        for turn in range(_UNROLL):
            bits = _load(b, source, b.add(index, I64(turn * lanes)), I32, lanes)
            magnitude = b.and_(bits, constant(ints, 0x7FFFFFFF))
            after[turn] = _greater(b, before[turn], magnitude)
        _prefetch(b, b.add(source, b.shl(index, I64(2))), 4 * lanes * _UNROLL, _AHEAD)
    together = functools.reduce(functools.partial(_greater, b), found)
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(together.type, ir.Undefined)
        halves = [
            b.shuffle_vector(
                together, undefined, ir.Constant(ir.VectorType(I32, lanes), list(places))
            )
            for places in (range(lanes), range(lanes, 2 * lanes))
        ]
        together = _greater(b, *halves)
    return b.extract_element(together, I32(0))


class _QuantiseEmitter:
    """Emits ``(scales*, codes*, source*, blocks, random*)`` of one format and way to round."""

    def __init__(self, form: BlockFormat, by_chance: bool) -> None:
        self.form = form
        self.lanes = vector_bytes() // 4
        name = f"quantise_{form.name}{'_by_chance' if by_chance else ''}"
        self.function, self.builder = new_function(name, (I64,) * 5)
        random = self.function.args[4]
        self.generator = Generator.of(self.builder, random, self.lanes) if by_chance else None

    def emit(self) -> ir.Function:
        b = self.builder
        scales, _, source, blocks, _ = self.function.args
        with counted_loop(b, I64(0), blocks, I64(1), []) as (block, _, _):
            first = b.mul(block, I64(BLOCK))
            bits = _greatest_bits(b, source, first, self.lanes)
            where = _place(b, scales, block, F32)
            is_finite = b.icmp_unsigned("<", bits, I32(_INFINITY))
            with b.if_else(is_finite) as (finite, other):
                with finite:
                    scale, inverse = self._scale(bits)
                    b.store(scale, where, align=1)
                    self._codes(block, first, splat(b, inverse, self.lanes))
                with other:
                    b.store(b.bitcast(I32(_NAN), F32), where, align=1)
                    self._zeros(first)
        b.ret_void()
        return self.function

    def _scale(self, bits: ir.Value) -> tuple[ir.Value, ir.Value]:
        b, limit = self.builder, F32(self.form.limit)
        held, least = b.bitcast(bits, F32), F32(self.form.least_magnitude)
        magnitude = b.select(b.fcmp_ordered(">", held, least), held, least)
        scale, inverse = b.fdiv(magnitude, limit), b.fdiv(limit, magnitude)
        if self.form.greatest_scale is not None:
            greatest = F32(self.form.greatest_scale)
            scale = b.select(b.fcmp_ordered("<", scale, greatest), scale, greatest)
        return scale, inverse

    def _scaled(self, index: ir.Value, inverse: ir.Value) -> ir.Value:
        b = self.builder
        value = b.fmul(_load(b, self.function.args[2], index, F32, self.lanes), inverse)
        low, high = (constant(value.type, sign * self.form.limit) for sign in (-1, 1))
        value = b.select(b.fcmp_ordered(">", value, low), value, low)
        return b.select(b.fcmp_ordered("<", value, high), value, high)

    def _codes(self, block: ir.Value, first: ir.Value, inverse: ir.Value) -> None:
        b, lanes, codes = self.builder, self.lanes, self.function.args[1]
        if self.generator is not None:
            self._codes_by_chance(self.generator, block, first, inverse)
            return
        step = I64(lanes * _UNROLL)
        with counted_loop(b, first, b.add(first, I64(BLOCK)), step, []) as (index, _, _):
            for turn in range(_UNROLL):
                place = b.add(index, I64(turn * lanes))
                _store(b, self.form.round(b, self._scaled(place, inverse)), codes, place)

    def _codes_by_chance(
        self, generator: Generator, block: ir.Value, first: ir.Value, inverse: ir.Value
    ) -> None:
        b, lanes, codes = self.builder, self.lanes, self.function.args[1]
        ints = vector(I32, lanes)
        with counted_loop(b, I64(0), I64(COUNTERS), I64(lanes), []) as (counter, _, _):
            start = b.add(first, b.shl(counter, I64(2)))
            for turn, words in enumerate(generator.draw(b, block, counter)):
                lower = b.add(start, I64(turn * lanes))
                upper = b.add(lower, I64(BLOCK // 2))
                halves = (
                    b.and_(words, constant(ints, 0xFFFF)),
                    b.lshr(words, constant(ints, 16)),
                )
                for place, drawn in zip((lower, upper), halves, strict=True):
                    value = self._scaled(place, inverse)
                    _store(b, self.form.round_by_chance(b, value, drawn), codes, place)

    def _zeros(self, first: ir.Value) -> None:
        b, codes = self.builder, self.function.args[1]
        zero = constant(vector(I8, self.lanes), 0)
        step = I64(self.lanes)
        with counted_loop(b, first, b.add(first, I64(BLOCK)), step, []) as (index, _, _):
            _store(b, zero, codes, index)


def emit_quantise(block_format: str, *, by_chance: bool) -> ir.Function:
    """Return the kernel ``(scales*, codes*, source*, blocks, random*)``.

    `random` is the address of seed, sequence and number of the first block, as three int64; it is
    not read to nearest.
    """
    return _QuantiseEmitter(FORMATS[block_format], by_chance).emit()


def emit_dequantise(block_format: str, *, divides: bool) -> ir.Function:
    """Return the kernel ``(destination*, messages*, stride, codes_offset, sources, blocks, divisor*)``.

    The sum of as many messages, `stride` bytes apart, in their order: block for block, whole blocks.
    """
    form, lanes = FORMATS[block_format], vector_bytes() // 4
    name = f"dequantise_{block_format}{'_average' if divides else ''}"
    function, b = new_function(name, (I64,) * 7)
    destination, messages, stride, codes_offset, sources, blocks, divisor = function.args

    def values(message: ir.Value, block: ir.Value, index: ir.Value) -> list[ir.Value]:
        scale = b.load(_place(b, message, block, F32), align=1, typ=F32)
        scales, codes = splat(b, scale, lanes), b.add(message, codes_offset)
        _prefetch(b, b.add(codes, index), lanes * _UNROLL, _AHEAD // 4)
        return [
            b.fmul(form.widen(b, _load(b, codes, place, I8, lanes)), scales)
            for place in (b.add(index, I64(turn * lanes)) for turn in range(_UNROLL))
        ]

    if divides:
        by = splat(b, b.load(pointer(b, divisor, F32), align=4, typ=F32), lanes)
    with counted_loop(b, I64(0), blocks, I64(1), []) as (block, _, _):
        first = b.mul(block, I64(BLOCK))
        step = I64(lanes * _UNROLL)
        with counted_loop(b, first, b.add(first, I64(BLOCK)), step, []) as (index, _, _):
            _prefetch(
                b,
                b.add(destination, b.shl(index, I64(2))),
                4 * lanes * _UNROLL,
                _AHEAD,
                for_write=True,
            )
            totals = values(messages, block, index)
            with counted_loop(b, I64(1), sources, I64(1), totals) as (source, before, after):
                message = b.add(messages, b.mul(source, stride))
                more = values(message, block, index)
                after[:] = [b.fadd(x, y) for x, y in zip(before, more, strict=True)]
            for turn, total in enumerate(totals):
                result = b.fdiv(total, by) if divides else total
                _store(b, result, destination, b.add(index, I64(turn * lanes)))
    b.ret_void()
    return function


@functools.cache
def _quantise_kernel(block_format: str, by_chance: bool) -> Any:
    with compile_lock:
        address = compile_function(emit_quantise(block_format, by_chance=by_chance))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(address)


@functools.cache
def _dequantise_kernel(block_format: str, divides: bool) -> Any:
    with compile_lock:
        address = compile_function(emit_dequantise(block_format, divides=divides))
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(address)


# --- arrays ---------------------------------------------------------------------------------------


def quantise(
    source: Float32s,
    message: Bytes,
    block_format: str,
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
        C-contiguous, at any address; at most ``256 * blocks`` elements. What is missing counts as
        zeros.
    message : ndarray of uint8
        ``message_bytes(blocks)`` bytes.
    block_format : str
        "int8", "float8_e4m3fn" or "float8_e5m2".
    seed : int, optional
        Round stochastically, with bits that follow from seed, sequence and the place of an element;
        all of 64 bits, without sign. Default: to nearest even.
    first_block : int
        The number of the first block, for the place.

    Notes
    -----
    Cost: one pass; the first call of a format compiles (20 ms; 100 ms with a seed).
    """
    kernel = _quantise_kernel(block_format, seed is not None)
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
    block_format: str,
    *,
    blocks: int,
    sources: int = 1,
    divisor: int | None = None,
) -> None:
    """Fill `destination` with what messages mean, added up in their order. Releases the GIL.

    Parameters
    ----------
    messages : ndarray of uint8
        `sources` messages of as many blocks, one after another.
    destination : ndarray of float32
        C-contiguous, at any address; at most ``256 * blocks`` elements.
    divisor : int, optional
        Divide the sum by it.
    """
    kernel = _dequantise_kernel(block_format, divisor is not None)
    start, stride, whole = scales_bytes(blocks), message_bytes(blocks), destination.size // BLOCK
    by = np.array([divisor or 1], np.float32)
    of = messages.ctypes.data
    kernel(destination.ctypes.data, of, stride, start, sources, whole, by.ctypes.data)
    if destination.size > whole * BLOCK:
        rest = np.empty(BLOCK, np.float32)
        # The last block's scale and codes lie as far from each other as those of its message.
        offset = start + whole * (BLOCK - 4)
        kernel(rest.ctypes.data, of + 4 * whole, stride, offset, sources, 1, by.ctypes.data)
        destination[whole * BLOCK :] = rest[: destination.size - whole * BLOCK]
