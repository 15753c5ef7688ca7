"""The reduce kernel: every destination = source 0 op source 1 op ..., in one pass, left to right.

``kernel(destinations*, n_destinations, sources*, n_sources, count, parameter*, prefetch_bytes)``

A kernel is compiled for each (dtype, op). It reads all sources for one block of four vectors at a
time. So accumulators stay in registers for any number of ranks, half types are rounded once, and
the bits do not depend on how many ranks are reduced at once. A destination may be a source.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from gpucoll.kernels.cpu.addresses import (
    REDUCE_ARGUMENTS,
    parameter_for,
    parts_per_element,
    reduce_kernel,
)
from gpucoll.kernels.cpu.codegen import (
    CACHE_LINE_BYTES,
    I32,
    I64,
    blocks,
    constant,
    counted_loop,
    new_function,
    pointer,
    prefetch,
    vector,
    vector_bytes,
)
from gpucoll.kernels.cpu.elements import Element, bytes_of, elements
from gpucoll.kernels.cpu.operations import OPERATIONS, Operation

_UNROLL = 4
KERNEL_ARGUMENTS = (I64,) * REDUCE_ARGUMENTS


def element_at(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    """Load entry `index` of a table of addresses."""
    entry = b.add(table, b.shl(index, I64(3)))
    return b.load(pointer(b, entry, I64), align=8, typ=I64)


class ReduceEmitter:
    """Emits the kernel for one (dtype, op)."""

    def __init__(self, element: Element, operation: Operation, name: str) -> None:
        self.element = element
        self.operation = operation
        self.function, self.builder = new_function(name, KERNEL_ARGUMENTS)
        names = ("destinations", "n_destinations", "sources", "n_sources")
        for argument, text in zip(
            self.function.args, (*names, "count", "parameter", "prefetch_bytes"), strict=True
        ):
            argument.name = text

    def shapes(self) -> list[tuple[int, int]]:
        """Return the block shapes: integer division has no vector form, so it gets none."""
        if self.operation.divided and self.element.kind in "iu":
            return [(1, 1)]
        accumulator = max(self.element.size_bytes, 4 if self.element.kind == "f" else 1)
        lanes = vector_bytes() // accumulator
        pair = [(lanes, 2)] if self.element.pairs is not None else []
        return [(lanes, _UNROLL), *pair, (lanes, 1), (1, 1)]

    def emit(self) -> ir.Function:
        b = self.builder
        args = self.function.args
        parameter = None
        if self.operation.has_parameter:
            kind = self.element.accumulator
            parameter = b.load(pointer(b, args[5], kind), align=8, typ=kind)
        prefetching = b.icmp_signed(">", args[6], I64(0))
        with b.if_else(prefetching) as (with_prefetch, without):
            with with_prefetch:
                self._loops(parameter, prefetches=True)
            with without:
                self._loops(parameter, prefetches=False)
        b.ret_void()
        return self.function

    def _loops(self, parameter: ir.Value | None, *, prefetches: bool) -> None:
        def body(first: ir.Value, lanes: int, unroll: int) -> None:
            self._block(first, lanes, unroll, parameter, prefetches and unroll > 1)

        blocks(self.builder, self.function.args[4], self.shapes(), body)

    def _block(
        self, first: ir.Value, lanes: int, unroll: int, parameter: ir.Value | None, prefetches: bool
    ) -> None:
        b = self.builder
        destinations, n_destinations, sources, n_sources = self.function.args[:4]
        offset = b.mul(first, I64(self.element.size_bytes))
        if parameter is not None and lanes > 1:
            parameter = splat(b, parameter, lanes)

        with counted_loop(b, I64(0), n_destinations if prefetches else I64(0), I64(1), []) as (
            index,
            _,
            _,
        ):
            self._prefetch(b.add(element_at(b, destinations, index), offset), lanes, unroll)

        values = self._load(b.add(element_at(b, sources, I64(0)), offset), lanes, unroll, parameter)
        with counted_loop(b, I64(1), n_sources, I64(1), values) as (index, before, after):
            address = b.add(element_at(b, sources, index), offset)
            after[:] = self._combine(before, self._load(address, lanes, unroll, parameter))
        results = self._finish(values, parameter)
        with counted_loop(b, I64(0), n_destinations, I64(1), []) as (index, _, _):
            self._store(b.add(element_at(b, destinations, index), offset), results)

    def _combine(self, left: list[ir.Value], right: list[ir.Value]) -> list[ir.Value]:
        combine = self.operation.combine
        return [combine(self.builder, self.element, x, y) for x, y in zip(left, right, strict=True)]

    def _step(self, lanes: int) -> int:
        return lanes * self.element.size_bytes

    def _prefetch(self, address: ir.Value, lanes: int, unroll: int) -> None:
        b = self.builder
        ahead = b.add(address, self.function.args[6])
        for line in range(0, self._step(lanes) * unroll, CACHE_LINE_BYTES):
            prefetch(b, b.add(ahead, I64(line)), for_write=True)

    def _load(
        self, address: ir.Value, lanes: int, unroll: int, parameter: ir.Value | None
    ) -> list[ir.Value]:
        b, element = self.builder, self.element
        pairs = element.pairs if lanes > 1 and unroll % 2 == 0 else None
        kind = vector(element.storage if pairs is None else I32, lanes)
        loaded: list[ir.Value] = []
        for place in range(0, unroll, 1 if pairs is None else 2):
            where = pointer(b, b.add(address, I64(place * self._step(lanes))), kind)
            raw = b.load(where, align=1, typ=kind)
            loaded += [element.load(b, raw)] if pairs is None else pairs.load(b, raw)
        return [self.operation.prepare(b, element, value, parameter) for value in loaded]

    def _finish(self, values: list[ir.Value], parameter: ir.Value | None) -> list[ir.Value]:
        """Return the values to store, one after the other, for fully combined values."""
        b, element = self.builder, self.element
        finished = [self.operation.finish(b, element, value, parameter) for value in values]
        if (
            element.pairs is None
            or len(values) % 2
            or not isinstance(values[0].type, ir.VectorType)
        ):
            return [element.store(b, value) for value in finished]
        return [
            element.pairs.store(b, lower, upper)
            for lower, upper in zip(finished[::2], finished[1::2], strict=True)
        ]

    def _store(self, address: ir.Value, results: list[ir.Value]) -> None:
        b = self.builder
        for result in results:
            b.store(result, pointer(b, address, result.type), align=1)
            address = b.add(address, I64(bytes_of(result.type)))


def splat(b: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    """Return a vector with the scalar in every lane."""
    kind = vector(scalar.type, lanes)
    one = b.insert_element(constant(kind, ir.Undefined), scalar, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


class ComplexProductEmitter(ReduceEmitter):
    """Complex multiplication, with one (real, imaginary) pair per block."""

    def shapes(self) -> list[tuple[int, int]]:
        return [(1, 2)]

    def _combine(self, left: list[ir.Value], right: list[ir.Value]) -> list[ir.Value]:
        b = self.builder
        (a, ai), (c, ci) = left, right
        real = b.fsub(b.fmul(a, c), b.fmul(ai, ci))
        return [real, b.fadd(b.fmul(a, ci), b.fmul(ai, c))]


def is_complex_product(dtype: str, operation: str) -> bool:
    """Return whether the parts cannot be reduced independently."""
    return operation == "prod" and elements()[dtype].kind == "c"


def emit_reduce(dtype: str, operation: str) -> ir.Function:
    """Return the kernel for this dtype and operation."""
    emitter = ComplexProductEmitter if is_complex_product(dtype, operation) else ReduceEmitter
    name = f"reduce_{operation}_{dtype}"
    return emitter(elements()[dtype], OPERATIONS[operation], name).emit()


@functools.cache
def _callable(address: int) -> Callable[..., None]:
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(KERNEL_ARGUMENTS))
    return prototype(address)


def reduce_arrays(
    operation: str,
    destinations: Sequence[npt.NDArray[np.generic]],
    sources: Sequence[npt.NDArray[np.generic]],
    parameter: float = 1,
    prefetch_bytes: int = 0,
) -> None:
    """Reduce `sources`, left to right, into every one of `destinations`. Releases the GIL.

    Parameters
    ----------
    operation : str
        A name of `OPERATIONS`.
    destinations, sources : sequence of ndarray
        C-contiguous, all of one dtype and size. A destination may be a source.
    parameter : float
        The factor of ``scaled_sum`` or the divisor of ``avg``.
    prefetch_bytes : int
        How far ahead destinations are prefetched for writing; 0 for not at all.
    """
    dtype = sources[0].dtype.name
    kernel = _callable(reduce_kernel(dtype, operation))
    tables = [
        np.array([array.ctypes.data for array in group], np.int64)
        for group in (destinations, sources)
    ]
    held = parameter_for(dtype, [parameter])
    kernel(
        tables[0].ctypes.data,
        len(destinations),
        tables[1].ctypes.data,
        len(sources),
        sources[0].size * parts_per_element(dtype),
        held.ctypes.data,
        prefetch_bytes,
    )
