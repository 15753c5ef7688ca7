"""The loading, accumulation and storing of each dtype.

An `Element` has the type of a dtype in memory, the type in which its sums are held, and the
conversions between them. Half types are held in float32 and rounded once, to nearest even.

The conversions of narrow floats are one pair of functions of (exponent bits, mantissa bits):
without tables or branches, the same for vectors and scalars.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from gpucoll.kernels.cpu.codegen import F32, F64, I8, I16, I32, I64, constant, host_features, vector

Convert = Callable[[ir.IRBuilder, ir.Value], ir.Value]


def _lanes(value: ir.Value) -> int:
    return int(value.type.count) if isinstance(value.type, ir.VectorType) else 1


def _same(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return value


@dataclass(frozen=True)
class Pairs:
    """Reads and writes two neighbours of 16 bits in a word of 32 bits, without shuffles."""

    load: Callable[[ir.IRBuilder, ir.Value], tuple[ir.Value, ir.Value]]
    store: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]


@dataclass(frozen=True)
class Element:
    """One dtype in memory and in registers."""

    storage: ir.Type
    accumulator: ir.Type
    kind: str
    """``b`` bool, ``i`` signed, ``u`` unsigned, ``f`` float, ``c`` complex (of `storage` parts)."""
    load: Convert = _same
    store: Convert = _same
    pairs: Pairs | None = None
    """For vectors in reductions, if that is faster: see `NarrowFloat.encode_pair`."""

    @property
    def size_bytes(self) -> int:
        """Bytes of one element in memory (of one part, for complex ones)."""
        return bytes_of(self.storage)


def bytes_of(kind: ir.Type) -> int:
    """Return the size of a number or a vector of numbers."""
    if isinstance(kind, ir.VectorType):
        return int(kind.count) * bytes_of(kind.element)
    if isinstance(kind, ir.IntType):
        return int(kind.width) // 8
    return {ir.HalfType: 2, ir.FloatType: 4, ir.DoubleType: 8}[type(kind)]


@dataclass(frozen=True)
class NarrowFloat:
    """A binary float of less than 32 bits: sign, exponent, mantissa."""

    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def shift(self) -> int:
        """How far the mantissa must be shifted to float32's place."""
        return 23 - self.mantissa_bits

    @property
    def magnitude_mask(self) -> int:
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def overflow_code(self) -> int:
        """The magnitude of infinity or, without infinities, of NaN."""
        if not self.has_infinity:
            return self.magnitude_mask
        return self.magnitude_mask & ~((1 << self.mantissa_bits) - 1)

    @property
    def nan_code(self) -> int:
        return self.overflow_code | (1 << (self.mantissa_bits - 1) if self.has_infinity else 0)

    @property
    def storage(self) -> ir.IntType:
        return I16 if self.exponent_bits + self.mantissa_bits == 15 else I8

    @property
    def has_range_of_float32(self) -> bool:
        """Whether the exponents are float32's (bfloat16): then shifting the bits converts."""
        return self.exponent_bits == 8

    def decode(self, builder: ir.IRBuilder, raw: ir.Value) -> ir.Value:
        """Widen to float32, exactly.

        A normal value's bits are shifted to float32's place and get its exponent. A subnormal value
        is a small integer. Multiplying its bits as a float would also be correct, but takes
        processors a hundred times longer.
        """
        lanes = _lanes(raw)
        ints, floats = vector(I32, lanes), vector(F32, lanes)
        code = builder.zext(raw, ints)
        if self.has_range_of_float32:
            return builder.bitcast(builder.shl(code, constant(ints, self.shift)), floats)
        magnitude = builder.and_(code, constant(ints, self.magnitude_mask))
        sign = builder.shl(
            builder.lshr(code, constant(ints, self.storage.width - 1)), constant(ints, 31)
        )
        shifted = builder.shl(magnitude, constant(ints, self.shift))
        normal = builder.add(shifted, constant(ints, (127 - self.bias) << 23))
        least = 2.0 ** (1 - self.bias - self.mantissa_bits)
        small = builder.fmul(builder.sitofp(magnitude, floats), constant(floats, least))
        is_small = builder.icmp_unsigned("<", magnitude, constant(ints, 1 << self.mantissa_bits))
        finite = builder.select(is_small, builder.bitcast(small, ints), normal)
        special = builder.icmp_unsigned(">=", magnitude, constant(ints, self.overflow_code))
        not_finite = builder.or_(shifted, constant(ints, 0x7F800000))
        bits = builder.select(special, not_finite, finite)
        return builder.bitcast(builder.or_(bits, sign), floats)

    def encode(self, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        """Round to nearest even; overflow becomes infinity or, without infinities, NaN.

        A normal result is rounded by integer operations on its bits. A subnormal one is rounded by
        the processor: after adding 2**(1 - bias + shift), the lowest mantissa bits hold the result
        as a multiple of the least subnormal.
        """
        lanes = _lanes(value)
        ints, floats = vector(I32, lanes), vector(F32, lanes)
        bits = builder.bitcast(value, ints)
        if self.has_range_of_float32:
            return self._encode_bits(builder, value, bits)
        magnitude = builder.and_(bits, constant(ints, 0x7FFFFFFF))
        odd = builder.and_(builder.lshr(magnitude, constant(ints, self.shift)), constant(ints, 1))
        bump = builder.add(odd, constant(ints, (1 << (self.shift - 1)) - 1))
        rounded = builder.lshr(builder.add(magnitude, bump), constant(ints, self.shift))
        normal = builder.sub(rounded, constant(ints, (127 - self.bias) << self.mantissa_bits))
        magic = 2.0 ** (1 - self.bias + self.shift)
        magic_bits = (127 + 1 - self.bias + self.shift) << 23
        lifted = builder.fadd(builder.bitcast(magnitude, floats), constant(floats, magic))
        subnormal = builder.sub(builder.bitcast(lifted, ints), constant(ints, magic_bits))
        least_normal = (127 + 1 - self.bias) << 23
        is_small = builder.icmp_unsigned("<", magnitude, constant(ints, least_normal))
        code = builder.select(is_small, subnormal, normal)
        too_large = builder.icmp_signed(">", code, constant(ints, self.overflow_code))
        code = builder.select(too_large, constant(ints, self.overflow_code), code)
        is_nan = builder.icmp_unsigned(">", magnitude, constant(ints, 0x7F800000))
        code = builder.select(is_nan, constant(ints, self.nan_code), code)
        sign = builder.and_(
            builder.lshr(bits, constant(ints, 32 - self.storage.width)),
            constant(ints, self.magnitude_mask + 1),
        )
        return builder.trunc(builder.or_(code, sign), vector(self.storage, lanes))

    def _encode_bits(self, builder: ir.IRBuilder, value: ir.Value, bits: ir.Value) -> ir.Value:
        """Round the bits: the carry of a full mantissa gives the next exponent, or infinity."""
        ints = bits.type
        odd = builder.and_(builder.lshr(bits, constant(ints, self.shift)), constant(ints, 1))
        bump = builder.add(odd, constant(ints, (1 << (self.shift - 1)) - 1))
        code = builder.lshr(builder.add(bits, bump), constant(ints, self.shift))
        is_nan = builder.fcmp_unordered("uno", value, value)
        code = builder.select(is_nan, constant(ints, self.nan_code), code)
        return builder.trunc(code, vector(self.storage, _lanes(value)))

    def decode_pair(self, builder: ir.IRBuilder, words: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Widen the lower and the upper half of each word; only for float32's exponent range."""
        ints, floats = words.type, vector(F32, _lanes(words))
        lower = builder.shl(words, constant(ints, 16))
        upper = builder.and_(words, constant(ints, 0xFFFF0000))
        return builder.bitcast(lower, floats), builder.bitcast(upper, floats)

    def encode_pair(self, builder: ir.IRBuilder, lower: ir.Value, upper: ir.Value) -> ir.Value:
        """Round two values into the halves of a word, to nearest even; see `decode_pair`.

        The values must come from operations on such values only. A NaN among them then has zeros in
        its lower bits, whether it was an operand or was produced by the processor: rounding does
        not change it, and no test is needed.
        """
        ints = vector(I32, _lanes(lower))
        rounded = []
        for value in (lower, upper):
            bits = builder.bitcast(value, ints)
            odd = builder.and_(builder.lshr(bits, constant(ints, 16)), constant(ints, 1))
            rounded.append(builder.add(builder.add(bits, constant(ints, 0x7FFF)), odd))
        return builder.or_(
            builder.lshr(rounded[0], constant(ints, 16)),
            builder.and_(rounded[1], constant(ints, 0xFFFF0000)),
        )


def _half_to_float(builder: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    return builder.fpext(raw, vector(F32, _lanes(raw)))


def _float_to_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.fptrunc(value, vector(ir.HalfType(), _lanes(value)))


def _narrow(form: NarrowFloat) -> Element:
    pairs = Pairs(form.decode_pair, form.encode_pair) if form.has_range_of_float32 else None
    return Element(form.storage, F32, "f", form.decode, form.encode, pairs)


def _float16() -> Element:
    # Without these instructions LLVM would call a routine of compiler-rt, which is not available.
    if {"f16c", "fullfp16", "neon"} & host_features():
        return Element(ir.HalfType(), F32, "f", _half_to_float, _float_to_half)
    return _narrow(NarrowFloat(5, 10))


@functools.cache
def elements() -> dict[str, Element]:
    """Return the `Element` of every dtype that reductions support, by the dtype's name."""
    table: dict[str, Element] = {"bool": Element(I8, I8, "b")}
    for width, kind in ((8, I8), (16, I16), (32, I32), (64, I64)):
        table[f"int{width}"] = Element(kind, kind, "i")
        table[f"uint{width}"] = Element(kind, kind, "u")
    table["float16"] = _float16()
    table["bfloat16"] = _narrow(NarrowFloat(8, 7))
    table["float8_e4m3fn"] = _narrow(NarrowFloat(4, 3, has_infinity=False))
    table["float8_e5m2"] = _narrow(NarrowFloat(5, 2))
    table["float32"] = Element(F32, F32, "f")
    table["float64"] = Element(F64, F64, "f")
    table["complex64"] = Element(F32, F32, "c")
    table["complex128"] = Element(F64, F64, "c")
    return table
