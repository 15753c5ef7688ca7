"""Kernels of one step of gradient descent on a row of parameters: plain, and of Adagrad.

They take the reduce kernel's arguments: the sources are the row and the gradient, the destinations
the row and, for Adagrad, the sums of squares, which are in the accumulator's dtype. The parameter
is a table in that dtype: the learning rate, then epsilon. Each operation is rounded as NumPy rounds
it; half types are computed in float32, and the row is rounded once.
"""

from __future__ import annotations

from llvmlite import ir

from gpucoll.kernels.cpu.codegen import I64, blocks, pointer
from gpucoll.kernels.cpu.elements import bytes_of, elements
from gpucoll.kernels.cpu.operations import OPERATIONS
from gpucoll.kernels.cpu.reduce import ReduceEmitter, element_at, splat


class _DescentEmitter(ReduceEmitter):
    """Emits ``row -= rate * gradient``."""

    def shapes(self) -> list[tuple[int, int]]:
        """Return shapes without pairs of half types, whose order the sums of squares lack."""
        return [(lanes, 1) for lanes, unroll in super().shapes() if unroll == 1]

    def emit(self) -> ir.Function:
        b = self.builder
        self.rate, self.epsilon = self._parameter(0), self._parameter(1)
        blocks(b, self.function.args[4], self.shapes(), self._step_of_block)
        b.ret_void()
        return self.function

    def _parameter(self, place: int) -> ir.Value:
        b, kind = self.builder, self.element.accumulator
        address = b.add(self.function.args[5], I64(place * bytes_of(kind)))
        return b.load(pointer(b, address, kind), align=1, typ=kind)

    def _step_of_block(self, first: ir.Value, lanes: int, unroll: int) -> None:
        b = self.builder
        destinations, _, sources, _ = self.function.args[:4]
        offset = b.mul(first, I64(self.element.size_bytes))
        places = [b.add(element_at(b, sources, I64(place)), offset) for place in (0, 1)]
        (row,), (gradient,) = (self._load(place, lanes, unroll, None) for place in places)
        changed = b.fsub(row, self._change(gradient, first, lanes))
        address = b.add(element_at(b, destinations, I64(0)), offset)
        self._store(address, self._finish([changed], None))

    def _change(self, gradient: ir.Value, first: ir.Value, lanes: int) -> ir.Value:
        return self.builder.fmul(self._all(self.rate, lanes), gradient)

    def _all(self, number: ir.Value, lanes: int) -> ir.Value:
        return splat(self.builder, number, lanes) if lanes > 1 else number


class _AdagradEmitter(_DescentEmitter):
    """Emits ``sums += gradient ** 2; row -= rate * gradient / (sqrt(sums) + epsilon)``."""

    def _change(self, gradient: ir.Value, first: ir.Value, lanes: int) -> ir.Value:
        b, kind = self.builder, gradient.type
        offset = b.mul(first, I64(bytes_of(self.element.accumulator)))
        address = b.add(element_at(b, self.function.args[0], I64(1)), offset)
        sums = b.load(pointer(b, address, kind), align=1, typ=kind)
        sums = b.fadd(sums, b.fmul(gradient, gradient))
        b.store(sums, pointer(b, address, kind), align=1)
        root = b.fadd(self._root(sums), self._all(self.epsilon, lanes))
        return b.fdiv(super()._change(gradient, first, lanes), root)

    def _root(self, values: ir.Value) -> ir.Value:
        kind = values.type
        scalar = {4: "f32", 8: "f64"}[bytes_of(self.element.accumulator)]
        name = f"v{kind.count}{scalar}" if isinstance(kind, ir.VectorType) else scalar
        function = self.builder.module.declare_intrinsic(
            f"llvm.sqrt.{name}", (), ir.FunctionType(kind, [kind])
        )
        return self.builder.call(function, [values])


def emit_descent(dtype: str, has_sums: bool) -> ir.Function:
    """Return the kernel for this dtype: of Adagrad if there are sums of squares."""
    emitter = _AdagradEmitter if has_sums else _DescentEmitter
    name = f"{'adagrad' if has_sums else 'descent'}_{dtype}"
    return emitter(elements()[dtype], OPERATIONS["sum"], name).emit()
