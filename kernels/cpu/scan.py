"""The scan kernels: destination i = source 0 op ... op source i, for all i in one pass.

They take the reduce kernel's arguments, with as many destinations as sources; the parameter of avg
is a table with one divisor per destination. In the exclusive scan destination i gets the sources
before the i-th, and destination 0 stays unchanged. A destination may be the source of the same
number.
"""

from __future__ import annotations

from llvmlite import ir

from gpucoll.kernels.cpu.codegen import I64, counted_loop, pointer
from gpucoll.kernels.cpu.elements import Element, elements
from gpucoll.kernels.cpu.operations import OPERATIONS, Operation
from gpucoll.kernels.cpu.reduce import (
    ComplexProductEmitter,
    ReduceEmitter,
    element_at,
    is_complex_product,
    splat,
)


class _ScanEmitter(ReduceEmitter):
    """Emits the kernel for one (dtype, op)."""

    def __init__(self, element: Element, operation: Operation, name: str, exclusive: bool) -> None:
        super().__init__(element, operation, name)
        self.exclusive = exclusive

    def _block(
        self, first: ir.Value, lanes: int, unroll: int, parameter: ir.Value | None, prefetches: bool
    ) -> None:
        b = self.builder
        destinations, _, sources, n_sources = self.function.args[:4]
        offset = b.mul(first, I64(self.element.size_bytes))
        if parameter is not None and lanes > 1:
            parameter = splat(b, parameter, lanes)

        def source(index: ir.Value) -> list[ir.Value]:
            address = b.add(element_at(b, sources, index), offset)
            return self._load(address, lanes, unroll, parameter)

        def give(values: list[ir.Value], to: ir.Value, inputs: ir.Value) -> None:
            divisor = self._divisor(inputs, lanes)
            results = self._finish(values, divisor)
            self._store(b.add(element_at(b, destinations, to), offset), results)

        values = source(I64(0))
        if not self.exclusive:
            give(values, I64(0), I64(0))
        with counted_loop(b, I64(1), n_sources, I64(1), values) as (index, before, after):
            loaded = source(index)  # before the store, which may go to the same place
            if self.exclusive:
                give(before, index, b.sub(index, I64(1)))
            after[:] = self._combine(before, loaded)
            if not self.exclusive:
                give(after, index, index)

    def _divisor(self, index: ir.Value, lanes: int) -> ir.Value | None:
        """Return entry `index` of the table of divisors."""
        if not self.operation.divided:
            return None
        b, kind = self.builder, self.element.accumulator
        size_bytes = max(self.element.size_bytes, 4) if self.element.kind in "fc" else 0
        step = I64(size_bytes or self.element.size_bytes)
        address = b.add(self.function.args[5], b.mul(index, step))
        value = b.load(pointer(b, address, kind), align=1, typ=kind)
        return splat(b, value, lanes) if lanes > 1 else value


class _ComplexProductScanEmitter(_ScanEmitter, ComplexProductEmitter):
    """Emits scan kernels of complex products; shapes and products are those of the base classes."""


def emit_scan(dtype: str, operation: str, exclusive: bool) -> ir.Function:
    """Return the kernel for this dtype and operation."""
    emitter = _ComplexProductScanEmitter if is_complex_product(dtype, operation) else _ScanEmitter
    name = f"{'exclusive_' if exclusive else ''}scan_{operation}_{dtype}"
    return emitter(elements()[dtype], OPERATIONS[operation], name, exclusive).emit()
