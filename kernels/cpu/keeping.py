"""The reduce kernel that also keeps every input, for results to be computed exactly afterwards.

Integers wrap, but a user who passes a Python int expects that it does not. The other ranks see no
difference: the inputs arrive as usual, and only this rank makes more of them.
"""

from __future__ import annotations

from llvmlite import ir

from gpucoll.kernels.cpu.addresses import KEPT, KEPT_COUNT
from gpucoll.kernels.cpu.codegen import I64, counted_loop, pointer
from gpucoll.kernels.cpu.elements import elements
from gpucoll.kernels.cpu.operations import OPERATIONS
from gpucoll.kernels.cpu.reduce import ReduceEmitter, element_at

DTYPE = "int64"


class _KeepingEmitter(ReduceEmitter):
    """Emits a kernel of one element that also stores the inputs in its only destination.

    The destination must have room for them. With several destinations, as when ranks reduce for
    each other, it is the ordinary kernel.
    """

    def emit(self) -> ir.Function:
        b = self.builder
        destinations, n_destinations, sources, n_sources = self.function.args[:4]
        with b.if_then(b.icmp_signed("==", n_destinations, I64(1))):
            result = element_at(b, destinations, I64(0))
            self._put(result, I64(KEPT_COUNT), n_sources)
            with counted_loop(b, I64(0), n_sources, I64(1), []) as (index, _, _):
                source = pointer(b, element_at(b, sources, index), I64)
                value = b.load(source, align=1, typ=I64)
                self._put(result, b.add(index, I64(KEPT)), value)
        return super().emit()

    def _put(self, words: ir.Value, place: ir.Value, value: ir.Value) -> None:
        b = self.builder
        b.store(value, pointer(b, b.add(words, b.shl(place, I64(3))), I64), align=1)


def emit_keeping(operation: str) -> ir.Function:
    """Return the int64 kernel of this operation."""
    name = f"reduce_keeping_{operation}_{DTYPE}"
    return _KeepingEmitter(elements()[DTYPE], OPERATIONS[operation], name).emit()
