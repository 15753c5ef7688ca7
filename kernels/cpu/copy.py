"""The copy kernels' code: ``kernel(destination, source, size_bytes, prefetch_bytes)``.

They replace ``memcpy``: the cost of a copy between ranks is cache lines that change hands, and it
depends on which lines are prefetched in which state (`docs/decisions/0003-staged-ping-pong.md`).
"""

from __future__ import annotations

from llvmlite import ir

from gpucoll.kernels.cpu.addresses import POSTED, CopyKind
from gpucoll.kernels.cpu.codegen import (
    CACHE_LINE_BYTES,
    I8,
    I32,
    I64,
    blocks,
    new_function,
    pointer,
    prefetch,
    vector,
    vector_bytes,
)

_UNROLL = 4
_LEAST_STRING_BYTES = 2048


def _touch(
    b: ir.IRBuilder, address: ir.Value, ahead: ir.Value, mode: str | None, size_bytes: int
) -> None:
    """Prefetch the lines of a block that lies `ahead` bytes further on."""
    if mode is None:
        return
    start = b.add(address, ahead)
    for line in range(0, size_bytes, CACHE_LINE_BYTES):
        prefetch(b, b.add(start, I64(line)), for_write=mode == "write")


def _load_block(b: ir.IRBuilder, address: ir.Value, lanes: int, unroll: int) -> list[ir.Value]:
    wide = vector(I8, lanes)
    places = [b.add(address, I64(place * lanes)) for place in range(unroll)]
    return [b.load(pointer(b, place, wide), align=1, typ=wide) for place in places]


def _store_block(b: ir.IRBuilder, address: ir.Value, values: list[ir.Value], lanes: int) -> None:
    for place, value in enumerate(values):
        b.store(value, pointer(b, b.add(address, I64(place * lanes)), value.type), align=1)


_SHAPES = [(16, 1), (4, 1), (1, 1)]


def emit_copy(kind: CopyKind) -> ir.Function:
    """Return a copy kernel that prefetches according to `kind`."""
    function, b = new_function("copy", (I64, I64, I64, I64))
    _copy_blocks(b, kind, *function.args)
    b.ret_void()
    return function


def _copy_blocks(
    b: ir.IRBuilder,
    kind: CopyKind,
    destination: ir.Value,
    source: ir.Value,
    size_bytes: ir.Value,
    ahead: ir.Value,
) -> None:
    """Emit a copy in blocks of vectors."""

    def body(first: ir.Value, lanes: int, unroll: int) -> None:
        read, write = b.add(source, first), b.add(destination, first)
        if unroll > 1:
            _touch(b, read, ahead, kind.source, lanes * unroll)
            _touch(b, write, ahead, kind.destination, lanes * unroll)
        _store_block(b, write, _load_block(b, read, lanes, unroll), lanes)

    blocks(b, size_bytes, [(vector_bytes(), _UNROLL), *_SHAPES], body)


def emit_streaming_copy() -> ir.Function:
    """Return a copy kernel for data too large to stay in a cache.

    Its stores bypass the caches: lines need not be read before they are written.
    """
    function, b = new_function("copy_streaming", (I64, I64, I64, I64))
    destination, source, size_bytes, ahead = function.args
    to_line = b.and_(b.neg(destination), I64(CACHE_LINE_BYTES - 1))
    is_short = b.icmp_signed("<", size_bytes, to_line)
    head = b.select(is_short, size_bytes, to_line)

    def plainly(first: ir.Value, lanes: int, unroll: int) -> None:
        values = _load_block(b, b.add(source, first), lanes, unroll)
        _store_block(b, b.add(destination, first), values, lanes)

    blocks(b, head, _SHAPES, plainly)
    mark = b.module.add_metadata([ir.Constant(I32, 1)])

    def streaming(first: ir.Value, lanes: int, unroll: int) -> None:
        read, write = (b.add(b.add(base, head), first) for base in (source, destination))
        if unroll > 1:
            _touch(b, read, ahead, "read", lanes * unroll)
        for place, value in enumerate(_load_block(b, read, lanes, unroll)):
            where = pointer(b, b.add(write, I64(place * lanes)), value.type)
            stored = b.store(value, where, align=lanes if unroll > 1 else 1)
            if unroll > 1:
                stored.set_metadata("nontemporal", mark)

    shapes = [(vector_bytes(), _UNROLL), *_SHAPES]
    blocks(b, b.sub(size_bytes, head), shapes, streaming)
    b.fence("seq_cst")  # such stores are not ordered with others
    b.ret_void()
    return function


def emit_string_copy() -> ir.Function:
    """Return a copy kernel that uses ``rep movsb`` unless data is small. Only for x86-64.

    The processor need not read a line that it writes as a whole. Others see its stores before any
    later store. Small data is copied as by `POSTED`, because the instruction starts slowly.
    """
    function, b = new_function("copy_string", (I64, I64, I64, I64))
    destination, source, size_bytes, ahead = function.args
    is_small = b.icmp_signed("<", size_bytes, I64(_LEAST_STRING_BYTES))
    with b.if_else(is_small) as (small, other):
        with small:
            _copy_blocks(b, POSTED, destination, source, size_bytes, ahead)
        with other:
            registers = ir.FunctionType(ir.LiteralStructType([I64] * 3), [I64] * 3)
            constraints = "={di},={si},={cx},0,1,2,~{memory},~{dirflag},~{fpsr},~{flags}"
            b.asm(registers, "rep movsb", constraints, function.args[:3], side_effect=True)
    b.ret_void()
    return function


def emit_refill() -> ir.Function:
    """Return ``kernel(destination, slot, source, size_bytes, prefetch_bytes)``.

    Copies the slot out and refills it in one pass: its lines change hands once for both.
    """
    function, b = new_function("refill", (I64,) * 5)
    destination, slot, source, size_bytes, ahead = function.args

    def body(first: ir.Value, lanes: int, unroll: int) -> None:
        write, through, read = (b.add(base, first) for base in (destination, slot, source))
        if unroll > 1:
            _touch(b, through, ahead, "write", lanes * unroll)
            _touch(b, write, ahead, "write", lanes * unroll)
            _touch(b, read, ahead, "read", lanes * unroll)
        old, new = (_load_block(b, place, lanes, unroll) for place in (through, read))
        _store_block(b, write, old, lanes)
        _store_block(b, through, new, lanes)

    blocks(b, size_bytes, [(vector_bytes(), _UNROLL), *_SHAPES], body)
    b.ret_void()
    return function
