"""Memory by address, for Numba loops: atomics, prefetch, pause, calls through an address.

Everything consists of LLVM instructions and intrinsics: inline assembly would need LLVM's native
parser, and ctypes pointers would keep Numba from caching (``dynamic globals``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from gpucoll.kernels.cpu.jit import Kind, intrinsic, types

if TYPE_CHECKING:
    from llvmlite import ir

MACHINE = os.environ.get("GPUCOLL_TEST_MACHINE") or os.uname().machine
"""The processor family for which loops are lowered; tests set it to check another one's code."""

_int64, _int32, _void = types.int64, types.int32, types.void


def _ir_type(codegen: ModuleType, kind: Kind) -> ir.Type:
    return {"int64": codegen.I64, "int32": codegen.I32, "void": codegen.VOID}[kind.name]


def _load(kind: Kind, order: str) -> Callable[[int], int]:
    @intrinsic(kind(_int64))
    def load(codegen: ModuleType, b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        made = _ir_type(codegen, kind)
        where = codegen.pointer(b, address, made)
        return b.load_atomic(where, order, made.width // 8, typ=made)

    return load


def _store(kind: Kind, order: str) -> Callable[[int, int], object]:
    @intrinsic(_void(_int64, kind))
    def store(codegen: ModuleType, b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
        made = _ir_type(codegen, kind)
        b.store_atomic(value, codegen.pointer(b, address, made), order, made.width // 8)

    return store


def _read_modify_write(operation: str, kind: Kind) -> Callable[[int, int], int]:
    @intrinsic(kind(_int64, kind))
    def update(
        codegen: ModuleType, b: ir.IRBuilder, address: ir.Value, value: ir.Value
    ) -> ir.Value:
        where = codegen.pointer(b, address, _ir_type(codegen, kind))
        return b.atomic_rmw(operation, where, value, "seq_cst")

    return update


load64 = _load(_int64, "monotonic")
"""Load an int64 that only this thread writes (or whose order an acquire has established)."""
load32 = _load(_int32, "monotonic")
store64 = _store(_int64, "monotonic")
store64_release = _store(_int64, "release")
"""Store an int64 after all earlier loads and stores of this thread."""
store32_release = _store(_int32, "release")
load64_acquire = _load(_int64, "acquire")
load64_ordered = _load(_int64, "seq_cst")
"""Load an int64 after this thread's last exchange, for a handshake: store mine, read yours."""
load32_acquire = _load(_int32, "acquire")
load32_ordered = _load(_int32, "seq_cst")
exchange64 = _read_modify_write("xchg", _int64)
"""Store an int64 with a full fence; return the previous value."""
exchange32 = _read_modify_write("xchg", _int32)
add32 = _read_modify_write("add", _int32)
add64 = _read_modify_write("add", _int64)
"""Add to an int64 with a full fence; return the previous value."""


@intrinsic(_int64(_int64, _int64, _int64))
def compare_exchange64(
    codegen: ModuleType, b: ir.IRBuilder, address: ir.Value, expected: ir.Value, desired: ir.Value
) -> ir.Value:
    """Store `desired` if the current value is `expected`; return the previous value."""
    where = codegen.pointer(b, address, codegen.I64)
    return b.extract_value(b.cmpxchg(where, expected, desired, "seq_cst", "seq_cst"), 0)


@intrinsic(_int64(_int64))
def on_stack(codegen: ModuleType, b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the address of a copy of a word on the stack of the calling function."""
    return codegen.on_stack(b, value)


@intrinsic(_int64(_int64))
def signed32(codegen: ModuleType, b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the lower half of a word, with its own sign: what sequence numbers are."""
    return b.sext(b.trunc(value, codegen.I32), codegen.I64)


def _fence(order: str) -> Callable[[], object]:
    @intrinsic(_void())
    def fence(codegen: ModuleType, b: ir.IRBuilder) -> None:
        b.fence(order)

    return fence


fence_acquire = _fence("acquire")
"""Later loads happen after all earlier loads. Free on x86-64."""
fence_full = _fence("seq_cst")
"""Later loads and stores happen after all earlier ones."""


@intrinsic(_void())
def pause(codegen: ModuleType, b: ir.IRBuilder) -> None:
    """Tell the processor that this is a spin loop: ``pause`` on x86-64, ``yield`` on arm64."""
    if MACHINE == "x86_64":
        codegen.call_intrinsic(b, "llvm.x86.sse2.pause", [])
    elif MACHINE == "aarch64":
        codegen.call_intrinsic(b, "llvm.aarch64.hint", [codegen.I32(1)])


@intrinsic(_void(_int64))
def take_line(codegen: ModuleType, b: ir.IRBuilder, address: ir.Value) -> None:
    """Begin to take a cache line over from the core that has it, for a write soon."""
    codegen.prefetch(b, address, for_write=True)


def _call(count: int, returns: Kind) -> Callable[..., int]:
    """Make an intrinsic that calls the function at an address with `count` int64 arguments."""

    @intrinsic(returns(*[_int64] * (count + 1)))
    def call(
        codegen: ModuleType, b: ir.IRBuilder, address: ir.Value, *values: ir.Value
    ) -> ir.Value | None:
        kind = codegen.function_type(_ir_type(codegen, returns), [codegen.I64] * count)
        result = b.call(codegen.pointer(b, address, kind), values)
        return None if returns is _void else result

    return call


call_copy = _call(4, _void)
call_refill = _call(5, _void)
call_reduce = _call(7, _void)
call_loop = _call(2, _int64)
call_post = _call(3, _int64)
call_step = _call(1, _int64)
call_wait = _call(4, _int64)
call_reach = _call(3, _int64)
call_words = _call(8, _int64)
call_foreign = _call(10, _int32)
"""Call a C function that takes up to ten integers and addresses and returns an int.

A function with fewer arguments ignores the rest: arguments are passed in registers, then in words
on the stack.
"""
