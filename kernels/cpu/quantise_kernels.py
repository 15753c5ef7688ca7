"""The kernels of block quantisation as LLVM IR: one vector of float32 at a time, block by block.

There is no contraction: each operation is rounded separately, as in NumPy and on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from gpucoll.kernels.block_message import BLOCK
from gpucoll.kernels.cpu.block_codes import FORMATS, BlockFormat
from gpucoll.kernels.cpu.codegen import (
    CACHE_LINE_BYTES,
    F32,
    I8,
    I32,
    I64,
    constant,
    counted_loop,
    new_function,
    pointer,
    prefetch,
    vector,
    vector_bytes,
)
from gpucoll.kernels.cpu.elements import elements
from gpucoll.kernels.cpu.philox import COUNTERS, Generator
from gpucoll.kernels.cpu.reduce import splat

_UNROLL = 4
_AHEAD = 4096
"""Distance in bytes of float32 from the current element to the prefetched one. Measured for int8:
0.56 of memcpy's rate without prefetching, 0.77 with 1024, 0.9 to 1.0 with 4096 (Xeon with
AVX-512)."""
_INFINITY, _NAN = 0x7F800000, 0x7FC00000


def _place(b: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """Return a pointer to element `index` of an array of `kind`."""
    return b.gep(pointer(b, address, kind), [index], source_etype=kind)


def _load(
    b: ir.IRBuilder, address: ir.Value, index: ir.Value, kind: ir.Type, lanes: int
) -> ir.Value:
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
    """Emits ``(scales*, codes*, source*, blocks, random*)`` for one format and one way to round."""

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
        """Return elements in units of their scale.

        Two roundings may put the greatest element one ulp beyond the limit. No way of rounding to a
        code is affected by that, so the element is not limited here; the reference limits it and
        gives the same bits.
        """
        source = self.function.args[2]
        return self.builder.fmul(_load(self.builder, source, index, F32, self.lanes), inverse)

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
                halves = (b.and_(words, constant(ints, 0xFFFF)), b.lshr(words, constant(ints, 16)))
                for place, drawn in zip((lower, upper), halves, strict=True):
                    value = self._scaled(place, inverse)
                    _store(b, self.form.round_by_chance(b, value, drawn), codes, place)

    def _zeros(self, first: ir.Value) -> None:
        b, codes = self.builder, self.function.args[1]
        zero = constant(vector(I8, self.lanes), 0)
        step = I64(self.lanes)
        with counted_loop(b, first, b.add(first, I64(BLOCK)), step, []) as (index, _, _):
            _store(b, zero, codes, index)


def emit_quantise(block_format: str, by_chance: bool) -> ir.Function:
    """Return the kernel ``(scales*, codes*, source*, blocks, random*)``.

    `random` is the address of seed, sequence and number of the first block, as three int64; it is
    not read when rounding to nearest.
    """
    return _QuantiseEmitter(FORMATS[block_format], by_chance).emit()


def _widened(
    b: ir.IRBuilder, wire_format: str, message: ir.Value, block: ir.Value, codes: ir.Value
) -> Callable[[ir.Value], ir.Value]:
    """Return a function that reads a vector of a message's block: a place -> float32."""
    lanes = vector_bytes() // 4
    form = FORMATS.get(wire_format)
    if form is None:
        half = elements()[wire_format]
        return lambda place: half.load(b, _load(b, codes, place, half.storage, lanes))
    scale = splat(b, b.load(_place(b, message, block, F32), align=1, typ=F32), lanes)
    return lambda place: b.fmul(form.widen(b, _load(b, codes, place, I8, lanes)), scale)


def emit_dequantise(wire_format: str, divides: bool) -> ir.Function:
    """Return ``(destination*, messages*, stride, codes_offset, sources, blocks, divisor*)``.

    Adds `sources` messages of whole blocks, `stride` bytes apart, in order. Messages of float16 and
    bfloat16 have only codes.
    """
    lanes, code_bytes = vector_bytes() // 4, elements()[wire_format].size_bytes
    name = f"dequantise_{wire_format}{'_average' if divides else ''}"
    function, b = new_function(name, (I64,) * 7)
    destination, messages, stride, codes_offset, sources, blocks, divisor = function.args

    def values(message: ir.Value, block: ir.Value, index: ir.Value) -> list[ir.Value]:
        codes = b.add(message, codes_offset)
        read = b.add(codes, b.mul(index, I64(code_bytes)))
        _prefetch(b, read, code_bytes * lanes * _UNROLL, code_bytes * _AHEAD // 4)
        read_vector = _widened(b, wire_format, message, block, codes)
        return [read_vector(b.add(index, I64(turn * lanes))) for turn in range(_UNROLL)]

    by = None
    if divides:
        by = splat(b, b.load(pointer(b, divisor, F32), align=4, typ=F32), lanes)
    with counted_loop(b, I64(0), blocks, I64(1), []) as (block, _, _):
        first = b.mul(block, I64(BLOCK))
        step = I64(lanes * _UNROLL)
        with counted_loop(b, first, b.add(first, I64(BLOCK)), step, []) as (index, _, _):
            write = b.add(destination, b.shl(index, I64(2)))
            _prefetch(b, write, 4 * lanes * _UNROLL, _AHEAD, for_write=True)
            totals = values(messages, block, index)
            with counted_loop(b, I64(1), sources, I64(1), totals) as (source, before, after):
                message = b.add(messages, b.mul(source, stride))
                more = values(message, block, index)
                after[:] = [b.fadd(x, y) for x, y in zip(before, more, strict=True)]
            for turn, total in enumerate(totals):
                result = total if by is None else b.fdiv(total, by)
                _store(b, result, destination, b.add(index, I64(turn * lanes)))
    b.ret_void()
    return function
