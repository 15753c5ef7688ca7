"""The kernel that processes a table of pieces, each with the kernel that moves it."""

from __future__ import annotations

from llvmlite import ir

from gpucoll.kernels.cpu.addresses import ROW_WORDS
from gpucoll.kernels.cpu.codegen import (
    I8,
    I64,
    VOID,
    blocks,
    constant,
    counted_loop,
    new_function,
    pointer,
    vector,
    vector_bytes,
)


def emit_pack() -> ir.Function:
    """Return ``(table*, rows)``: a row has a kernel, its four arguments, a gap and its size."""
    function, b = new_function("pack", (I64, I64))
    table, rows = function.args
    kernel_type = ir.FunctionType(VOID, [I64] * 4)
    with counted_loop(b, I64(0), rows, I64(1), []) as (row, _, _):
        start = b.add(table, b.mul(row, I64(8 * ROW_WORDS)))
        kernel, *arguments, gap, gap_bytes = (
            b.load(pointer(b, b.add(start, I64(8 * place)), I64), align=8, typ=I64)
            for place in range(ROW_WORDS)
        )
        b.call(pointer(b, kernel, kernel_type), arguments)

        def clear(first: ir.Value, lanes: int, unroll: int, gap: ir.Value = gap) -> None:
            kind = vector(I8, lanes)
            b.store(constant(kind, 0), pointer(b, b.add(gap, first), kind), align=1)

        blocks(b, gap_bytes, [(vector_bytes(), 1), (1, 1)], clear)
    b.ret_void()
    return function
