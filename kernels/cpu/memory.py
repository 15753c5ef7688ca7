"""Memory by address, for Numba loops: atomics, prefetch, pause, calls through an address.

All of it LLVM instructions and intrinsics: inline assembly would need LLVM's native parser, and
ctypes pointers would keep Numba from caching (``dynamic globals``).
"""

from __future__ import annotations

import os
import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gpucoll.kernels.cpu.codegen import I32, I64, VOID, pointer, prefetch

MACHINE = os.environ.get("GPUCOLL_TEST_MACHINE") or platform.machine()
"""The processor family that loops are lowered for; tests set it to check another one's code."""

_NUMBA_TYPES = {I32: types.int32, I64: types.int64}


def _load(kind: Any, order: str) -> Any:
    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            where = pointer(b, args[0], kind)
            return b.load_atomic(where, order, kind.width // 8, typ=kind)

        return _NUMBA_TYPES[kind](types.int64), generate

    return load


def _store(kind: Any, order: str) -> Any:
    @intrinsic
    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            b.store_atomic(args[1], pointer(b, args[0], kind), order, kind.width // 8)
            return context.get_dummy_value()

        return types.void(types.int64, _NUMBA_TYPES[kind]), generate

    return store


def _read_modify_write(operation: str, kind: Any) -> Any:
    @intrinsic
    def update(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            return b.atomic_rmw(operation, pointer(b, args[0], kind), args[1], "seq_cst")

        return _NUMBA_TYPES[kind](types.int64, _NUMBA_TYPES[kind]), generate

    return update


load64 = _load(I64, "monotonic")
"""Load an int64 that only this thread writes (or whose order an acquire has settled)."""
store64 = _store(I64, "monotonic")
store64_release = _store(I64, "release")
"""Store an int64 after all that this thread has loaded and stored before."""
store32_release = _store(I32, "release")
load64_acquire = _load(I64, "acquire")
load64_ordered = _load(I64, "seq_cst")
"""Load an int64 after this thread's last exchange: for a handshake, store mine, look at yours."""


def _word_address(b: Any, block: Any, field: Any) -> Any:
    return pointer(b, b.add(block, b.shl(field, I64(3))), I64)


@intrinsic
def get(typing_context: Any, block: Any, field: Any) -> Any:
    """Read word `field` of a block of int64 that this process alone writes."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(_word_address(b, *args), align=8, typ=I64)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def put(typing_context: Any, block: Any, field: Any, value: Any) -> Any:
    """Write word `field` of a block of int64."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.store(args[2], _word_address(b, *args[:2]), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


load32_acquire = _load(I32, "acquire")
load32_ordered = _load(I32, "seq_cst")
exchange64 = _read_modify_write("xchg", I64)
"""Store an int64 with a full fence; returns what was there."""
exchange32 = _read_modify_write("xchg", I32)
add32 = _read_modify_write("add", I32)


@intrinsic
def compare_exchange64(typing_context: Any, address: Any, expected: Any, desired: Any) -> Any:
    """Store `desired` where `expected` is; return what was there."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        where = pointer(b, args[0], I64)
        return b.extract_value(b.cmpxchg(where, args[1], args[2], "seq_cst", "seq_cst"), 0)

    return types.int64(types.int64, types.int64, types.int64), generate


def _fence(order: str) -> Any:
    @intrinsic
    def fence(typing_context: Any) -> Any:
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            b.fence(order)
            return context.get_dummy_value()

        return types.void(), generate

    return fence


fence_acquire = _fence("acquire")
"""What is loaded afterwards is loaded after all that was loaded before. Free on x86-64."""
fence_full = _fence("seq_cst")
"""Whatever is loaded or stored afterwards is so after all that was before."""


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the processor that this is a spin loop: ``pause`` on x86-64, ``yield`` on arm64."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if MACHINE == "x86_64":
            name, arguments = "llvm.x86.sse2.pause", []
        elif MACHINE == "aarch64":
            name, arguments = "llvm.aarch64.hint", [I32(1)]
        else:
            return context.get_dummy_value()
        kinds = [argument.type for argument in arguments]
        function = b.module.declare_intrinsic(name, (), ir.FunctionType(VOID, kinds))
        b.call(function, arguments)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def take_line(typing_context: Any, address: Any) -> Any:
    """Begin to take a cache line over from whoever has it, to be written soon."""

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        prefetch(b, args[0], for_write=True)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _call(count: int, returns: Any) -> Any:
    """Make an intrinsic that calls the function at an address with `count` int64 arguments."""

    def build(arguments: tuple[Any, ...]) -> Any:
        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(VOID if returns is types.void else I64, [I64] * count)
            result = b.call(pointer(b, args[0], kind), args[1:])
            return context.get_dummy_value() if returns is types.void else result

        return returns(*[types.int64] * (count + 1)), generate

    names = ", ".join(f"a{place}" for place in range(count + 1))
    scope: dict[str, Any] = {"build": build}
    # Numba reads an intrinsic's arity from its Python signature, so it has to be spelled out.
    exec(f"def call(typing_context, {names}):\n    return build(({names}))", scope)  # noqa: S102
    return intrinsic(scope["call"])


call_copy = _call(4, types.void)
call_refill = _call(5, types.void)
call_reduce = _call(7, types.void)
call_loop = _call(2, types.int64)
call_wait = _call(5, types.int64)
call_reach = _call(3, types.int64)
call_words = _call(8, types.int64)
