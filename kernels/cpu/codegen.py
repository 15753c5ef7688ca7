"""From LLVM IR to machine code: one target machine, one loop builder, no optimisation passes.

The emitters write the final vector code, so a kernel compiles in 5 to 20 ms and needs no cache on
disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from gpucoll.kernels.cpu.levels import Level

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
VOID = ir.VoidType()
CACHE_LINE_BYTES = 64

_engines: list[Any] = []  # an engine owns its machine code: kept for the whole process
_level: Level | None = None


def make_for(level: Level) -> None:
    """Let this process emit libraries for a level of processors, instead of for its own.

    Call it before anything is emitted: what depends on the processor is determined once.
    """
    global _level
    _level = level


@functools.cache
def target_machine() -> llvm.TargetMachine:
    """Return the target machine of this processor, with all its features."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # otherwise LLVM aborts the process at `rep movsb`
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        jit=True,
    )


def library_machine() -> llvm.TargetMachine:
    """Return a target machine for code that is linked: position-independent, small code model."""
    machine = target_machine()
    if _level is not None:
        name, features = _level.llvm_name, _level.llvm_features
    else:
        name, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_triple(machine.triple).create_target_machine(
        cpu=name, features=features, opt=3, reloc="pic", codemodel="small"
    )


@functools.cache
def host_features() -> frozenset[str]:
    """Return the features of the processor that code is made for, as LLVM spells them."""
    if _level is not None:
        return _level.features
    return frozenset(name for name, there in llvm.get_host_cpu_features().items() if there)


@functools.cache
def vector_bytes() -> int:
    """Return the width of that processor's vector registers, in bytes."""
    features = host_features()
    if "avx512f" in features:
        return 64
    return 32 if "avx" in features else 16


def new_function(name: str, arguments: tuple[ir.Type, ...]) -> tuple[ir.Function, ir.IRBuilder]:
    """Begin a module with one function, and return it with a builder in its entry block."""
    module = ir.Module(name=name)
    function = ir.Function(module, ir.FunctionType(VOID, arguments), name=name)
    return function, ir.IRBuilder(function.append_basic_block("entry"))


def compile_function(function: ir.Function) -> int:
    """Compile the module of `function` for this machine and return the function's address."""
    machine = target_machine()
    module = llvm.parse_assembly(str(function.module))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(function.name))


def pointer(builder: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    """Turn an integer address into a pointer to `to`."""
    return builder.inttoptr(address, to.as_pointer())


def function_type(returns: ir.Type, arguments: list[ir.Type]) -> ir.Type:
    """Return the type of a function."""
    return ir.FunctionType(returns, arguments)


def call_intrinsic(builder: ir.IRBuilder, name: str, arguments: list[ir.Value]) -> None:
    """Call an LLVM intrinsic that returns nothing."""
    kinds = [argument.type for argument in arguments]
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(VOID, kinds))
    builder.call(function, arguments)


def on_stack(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the address of a word on the function's stack that contains a value."""
    with builder.goto_entry_block():  # allocated once, even in a loop
        word = builder.alloca(value.type)
    builder.store(value, word)
    return builder.ptrtoint(word, I64)


def vector(element: ir.Type, lanes: int) -> ir.Type:
    """Return `lanes` of `element`: the element itself for one lane."""
    return element if lanes == 1 else ir.VectorType(element, lanes)


def constant(like: ir.Type, value: object) -> ir.Constant:
    """Return `value` in every lane of the type `like`."""
    if isinstance(like, ir.VectorType):
        return ir.Constant(like, [value] * like.count)
    return ir.Constant(like, value)


def prefetch(builder: ir.IRBuilder, address: ir.Value, *, for_write: bool) -> None:
    """Prefetch the cache line of `address` into every level, in shared or in exclusive state."""
    bytes_pointer = I8.as_pointer()
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", (bytes_pointer,), ir.FunctionType(VOID, [bytes_pointer, I32, I32, I32])
    )
    keep_in_all_levels, data_cache = I32(3), I32(1)
    target = builder.inttoptr(address, bytes_pointer)
    builder.call(function, [target, I32(int(for_write)), keep_in_all_levels, data_cache])


@contextmanager
def counted_loop(
    builder: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: ir.Value, carried: list[ir.Value]
) -> Iterator[tuple[ir.Value, list[ir.Value], list[ir.Value]]]:
    """Emit ``for i in range(start, stop, step)`` with values carried between iterations.

    Yields the index, the carried values at the start of an iteration, and a list, initially a copy
    of them, in which the body leaves their values at its end. After the loop, `carried` contains
    the final values.
    """
    before = builder.block
    body = builder.append_basic_block("loop")
    after = builder.append_basic_block("done")
    builder.cbranch(builder.icmp_signed("<", start, stop), body, after)
    builder.position_at_end(body)
    index = builder.phi(start.type)
    index.add_incoming(start, before)
    entering = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        entering.append(phi)
    leaving = list(entering)
    yield index, entering, leaving
    following = builder.add(index, step)
    last = builder.block
    index.add_incoming(following, last)
    for phi, value in zip(entering, leaving, strict=True):
        phi.add_incoming(value, last)
    builder.cbranch(builder.icmp_signed("<", following, stop), body, after)
    builder.position_at_end(after)
    for place, (initial, value) in enumerate(zip(carried, leaving, strict=True)):
        phi = builder.phi(value.type)
        phi.add_incoming(initial, before)
        phi.add_incoming(value, last)
        carried[place] = phi


def blocks(
    builder: ir.IRBuilder,
    count: ir.Value,
    shapes: list[tuple[int, int]],
    body: Callable[[ir.Value, int, int], None],
) -> None:
    """Cover ``0..count-1`` with blocks of falling size: (lanes, unroll) pairs, ending in (1, 1).

    ``body(first, lanes, unroll)`` handles the ``lanes * unroll`` elements from `first` on.
    """
    start: ir.Value = I64(0)
    for lanes, unroll in shapes:
        size = lanes * unroll
        stop = builder.and_(count, I64(-size)) if size > 1 else count
        with counted_loop(builder, start, stop, I64(size), []) as (first, _, _):
            body(first, lanes, unroll)
        start = stop
