"""The kernel that computes what quantisation lost: a difference, and zero if it is not finite."""

from __future__ import annotations

from llvmlite import ir

from gpucoll.kernels.cpu.codegen import (
    F32,
    I32,
    I64,
    blocks,
    constant,
    new_function,
    pointer,
    vector,
    vector_bytes,
)
from gpucoll.kernels.cpu.reduce import splat

_INFINITY = 0x7F800000


def emit_lost(of_sum: bool = False) -> ir.Function:
    """Return ``(lost*, held*, meant*, count, factor*)``: held - meant, zero where not finite.

    All arrays are float32. With `of_sum`, the difference times the factor is added to `lost`;
    otherwise the factor is not read.
    """
    function, b = new_function("lost", (I64,) * 5)
    lost, held, meant, count, factor = function.args
    times = b.load(pointer(b, factor, F32), align=4, typ=F32) if of_sum else None

    def body(first: ir.Value, lanes: int, unroll: int) -> None:
        offset, kind, bits = b.shl(first, I64(2)), vector(F32, lanes), vector(I32, lanes)
        before, after = (
            b.load(pointer(b, b.add(base, offset), kind), align=1, typ=kind)
            for base in (held, meant)
        )
        difference = b.fsub(before, after)
        if times is not None:
            there = b.load(pointer(b, b.add(lost, offset), kind), align=1, typ=kind)
            difference = b.fadd(
                there, b.fmul(difference, splat(b, times, lanes) if lanes > 1 else times)
            )
        difference = b.bitcast(difference, bits)
        magnitude = b.and_(difference, constant(bits, 0x7FFFFFFF))
        is_finite = b.icmp_unsigned("<", magnitude, constant(bits, _INFINITY))
        kept = b.select(is_finite, difference, constant(bits, 0))
        b.store(kept, pointer(b, b.add(lost, offset), bits), align=1)

    blocks(b, count, [(vector_bytes() // 4, 1), (1, 1)], body)
    b.ret_void()
    return function
