"""The kernel that says what a quantisation has lost: a difference, and zero where it is none."""

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

_INFINITY = 0x7F800000


def emit_lost() -> ir.Function:
    """Return ``(lost*, held*, meant*, count)``: held - meant of float32, zero where not finite."""
    function, b = new_function("lost", (I64,) * 4)
    lost, held, meant, count = function.args

    def body(first: ir.Value, lanes: int, unroll: int) -> None:
        offset, kind, bits = b.shl(first, I64(2)), vector(F32, lanes), vector(I32, lanes)
        before, after = (
            b.load(pointer(b, b.add(base, offset), kind), align=1, typ=kind)
            for base in (held, meant)
        )
        difference = b.bitcast(b.fsub(before, after), bits)
        magnitude = b.and_(difference, constant(bits, 0x7FFFFFFF))
        is_finite = b.icmp_unsigned("<", magnitude, constant(bits, _INFINITY))
        kept = b.select(is_finite, difference, constant(bits, 0))
        b.store(kept, pointer(b, b.add(lost, offset), bits), align=1)

    blocks(b, count, [(vector_bytes() // 4, 1), (1, 1)], body)
    b.ret_void()
    return function
