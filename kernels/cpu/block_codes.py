"""Conversion between scaled numbers and codes of a block format, as LLVM IR, for any vector length.

The input to rounding is float32 within the format's limits; `docs/compression.md` describes the
formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from gpucoll.kernels.cpu.codegen import F32, I8, I32, constant, vector
from gpucoll.kernels.cpu.elements import NarrowFloat, elements

_CHANCES = 65536  # a fraction is a chance in this number
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class BlockFormat:
    """A format with one byte per element: an 8-bit integer or float.

    Attributes
    ----------
    limit : float
        The greatest magnitude of a code.
    greatest_scale : float or None
        A bound on the scale: the limit times a greater scale would overflow.
    narrow : NarrowFloat or None
        The layout of a float's bits; None for integers.
    """

    name: str
    limit: float
    greatest_scale: float | None = None
    narrow: NarrowFloat | None = None

    @property
    def least_magnitude(self) -> float:
        """A block with a smaller greatest magnitude is scaled as if it had this one."""
        return self.limit * 2.0**-126

    def round(self, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        """Return the codes, rounded to nearest even."""
        if self.narrow is not None:
            return elements()[self.name].store(b, x)
        floats, ints = x.type, vector(I32, x.type.count)
        # After adding 1.5 * 2**23, the lowest bits hold a small number's integer part, rounded.
        magic = constant(floats, 12582912.0)
        rounded = b.bitcast(b.fadd(x, magic), ints)
        return b.trunc(rounded, vector(I8, x.type.count))

    def round_by_chance(self, b: ir.IRBuilder, x: ir.Value, drawn: ir.Value) -> ir.Value:
        """Return the codes, rounded up with a chance equal to the fraction, in 1/65536."""
        ints = vector(I32, x.type.count)
        bits = b.bitcast(x, ints)
        if self.narrow is not None:
            return self._float_by_chance(b, bits, drawn)
        sign = b.ashr(bits, constant(ints, 31))
        size = _whole(b, b.and_(bits, constant(ints, _MAGNITUDE)), _CHANCES)
        signed = b.sub(b.xor(size, sign), sign)
        code = b.ashr(b.add(signed, drawn), constant(ints, 16))
        return b.trunc(code, vector(I8, x.type.count))

    def _float_by_chance(self, b: ir.IRBuilder, bits: ir.Value, drawn: ir.Value) -> ir.Value:
        form, ints = self.narrow, bits.type
        assert form is not None
        magnitude = b.and_(bits, constant(ints, _MAGNITUDE))
        more = b.add(
            b.shl(drawn, constant(ints, form.shift - 16)), constant(ints, 1 << (form.shift - 17))
        )
        rounded = b.lshr(b.add(magnitude, more), constant(ints, form.shift))
        normal = b.sub(rounded, constant(ints, (127 - form.bias) << form.mantissa_bits))
        is_small = b.icmp_unsigned("<", magnitude, constant(ints, (128 - form.bias) << 23))
        small = b.select(is_small, magnitude, constant(ints, 0))
        least = _CHANCES * 2.0 ** (form.bias - 1 + form.mantissa_bits)
        subnormal = b.lshr(b.add(_whole(b, small, least), drawn), constant(ints, 16))
        sign = b.and_(b.lshr(bits, constant(ints, 24)), constant(ints, 0x80))
        code = b.or_(b.select(is_small, subnormal, normal), sign)
        return b.trunc(code, vector(I8, ints.count))

    def widen(self, b: ir.IRBuilder, code: ir.Value) -> ir.Value:
        """Return the values of the codes before scaling."""
        if self.narrow is not None:
            return elements()[self.name].load(b, code)
        lanes = code.type.count
        return b.sitofp(b.sext(code, vector(I32, lanes)), vector(F32, lanes))


def _whole(b: ir.IRBuilder, magnitude: ir.Value, factor: float) -> ir.Value:
    """Return a float's bits times a power of two, below 2**23, to the nearest integer."""
    ints, floats = magnitude.type, vector(F32, magnitude.type.count)
    scaled = b.fmul(b.bitcast(magnitude, floats), constant(floats, float(factor)))
    lifted = b.fadd(scaled, constant(floats, 2.0**23))
    return b.sub(b.bitcast(lifted, ints), constant(ints, 150 << 23))


FORMATS = {
    "int8": BlockFormat("int8", 127.0, float.fromhex("0x1.020406p+121")),
    "float8_e4m3fn": BlockFormat(
        "float8_e4m3fn", 448.0, narrow=NarrowFloat(4, 3, has_infinity=False)
    ),
    "float8_e5m2": BlockFormat("float8_e5m2", 57344.0, narrow=NarrowFloat(5, 2)),
}
