"""The copy kernels: ``kernel(destination, source, size_bytes, prefetch_bytes)``.

Not ``memcpy``: what a copy between ranks costs is cache lines changing hands, and that is decided
by which lines are prefetched in which state (`docs/decisions/0003-staged-ping-pong.md`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from llvmlite import ir

from gpucoll.kernels.cpu.codegen import (
    CACHE_LINE_BYTES,
    I8,
    I64,
    blocks,
    compile_function,
    new_function,
    pointer,
    prefetch,
    vector,
    vector_bytes,
)

_UNROLL = 4


@dataclass(frozen=True)
class CopyKind:
    """Which lines a copy prefetches: ``None``, for ``"read"`` or for ``"write"``."""

    source: str | None
    destination: str | None


PLAIN = CopyKind(None, None)
INTO_SLOT = CopyKind("read", None)
"""Private memory to my slot, whose lines this core still owns."""
OUT_OF_SLOT = CopyKind("write", "write")
"""My slot to private memory: take the slot's lines back for the next turn."""


@functools.cache
def copy_kernel(kind: CopyKind) -> int:
    """Return the address of a copy kernel, compiled on first need (about 5 ms)."""
    function, b = new_function("copy", (I64, I64, I64, I64))
    destination, source, size_bytes, ahead = function.args

    def touch(address: ir.Value, mode: str | None, bytes_: int) -> None:
        if mode is None:
            return
        start = b.add(address, ahead)
        for line in range(0, bytes_, CACHE_LINE_BYTES):
            prefetch(b, b.add(start, I64(line)), for_write=mode == "write")

    def body(first: ir.Value, lanes: int, unroll: int) -> None:
        read, write = b.add(source, first), b.add(destination, first)
        if unroll > 1:
            touch(read, kind.source, lanes * unroll)
            touch(write, kind.destination, lanes * unroll)
        wide = vector(I8, lanes)
        values = [
            b.load(pointer(b, b.add(read, I64(place * lanes)), wide), align=1, typ=wide)
            for place in range(unroll)
        ]
        for place, value in enumerate(values):
            b.store(value, pointer(b, b.add(write, I64(place * lanes)), wide), align=1)

    blocks(b, size_bytes, [(vector_bytes(), _UNROLL), (16, 1), (4, 1), (1, 1)], body)
    b.ret_void()
    return compile_function(function)
