"""The reductions as vector code: how two accumulators are combined into one.

An operation has three steps, each on a whole vector: `prepare` (once per source, after loading),
`combine` (left to right, in rank order) and `finish` (once, before storing).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from gpucoll.kernels.cpu.codegen import constant
from gpucoll.kernels.cpu.elements import Element

Binary = Callable[[ir.IRBuilder, Element, ir.Value, ir.Value], ir.Value]


def _is_float(element: Element) -> bool:
    return element.kind in "fc"


def _add(b: ir.IRBuilder, e: Element, x: ir.Value, y: ir.Value) -> ir.Value:
    if e.kind == "b":
        return b.or_(x, y)
    return b.fadd(x, y) if _is_float(e) else b.add(x, y)


def _multiply(b: ir.IRBuilder, e: Element, x: ir.Value, y: ir.Value) -> ir.Value:
    if e.kind == "b":
        return b.and_(x, y)
    return b.fmul(x, y) if _is_float(e) else b.mul(x, y)


def _divide(b: ir.IRBuilder, e: Element, x: ir.Value, y: ir.Value) -> ir.Value:
    if _is_float(e):
        return b.fdiv(x, y)
    return b.sdiv(x, y) if e.kind == "i" else b.udiv(x, y)


def _extremum(predicate: str) -> Binary:
    """Return min or max. A NaN on either side wins; of two equal values, the left one wins."""

    def pick(b: ir.IRBuilder, e: Element, x: ir.Value, y: ir.Value) -> ir.Value:
        if _is_float(e):
            better = b.fcmp_ordered(f"{predicate}=", x, y)
            left = b.or_(better, b.fcmp_unordered("uno", x, x))
        elif e.kind == "i":
            left = b.icmp_signed(f"{predicate}=", x, y)
        else:
            left = b.icmp_unsigned(f"{predicate}=", x, y)
        return b.select(left, x, y)

    return pick


def _truth(b: ir.IRBuilder, e: Element, x: ir.Value) -> ir.Value:
    zero = constant(x.type, 0.0 if _is_float(e) else 0)
    return b.fcmp_unordered("!=", x, zero) if _is_float(e) else b.icmp_unsigned("!=", x, zero)


def _zero_one(b: ir.IRBuilder, e: Element, truth: ir.Value, like: ir.Type) -> ir.Value:
    one, zero = (1.0, 0.0) if _is_float(e) else (1, 0)
    return b.select(truth, constant(like, one), constant(like, zero))


def _logical(name: str) -> Binary:
    def combine(b: ir.IRBuilder, e: Element, x: ir.Value, y: ir.Value) -> ir.Value:
        truth = getattr(b, name)(_truth(b, e, x), _truth(b, e, y))
        return _zero_one(b, e, truth, x.type)

    return combine


def _bitwise(name: str) -> Binary:
    def combine(b: ir.IRBuilder, e: Element, x: ir.Value, y: ir.Value) -> ir.Value:
        return getattr(b, name)(x, y)

    return combine


@dataclass(frozen=True)
class Operation:
    """One reduction: `combine`, with the steps before it on inputs and after it on the result."""

    combine: Binary
    scaled: bool = False
    logical: bool = False
    divided: bool = False

    def prepare(
        self, b: ir.IRBuilder, e: Element, x: ir.Value, parameter: ir.Value | None
    ) -> ir.Value:
        """Return one source's value in the form for `combine`."""
        if self.logical:
            return _zero_one(b, e, _truth(b, e, x), x.type)
        if self.scaled:
            return _multiply(b, e, x, parameter)
        return x

    def finish(
        self, b: ir.IRBuilder, e: Element, x: ir.Value, parameter: ir.Value | None
    ) -> ir.Value:
        """Return the result for one fully combined value."""
        return _divide(b, e, x, parameter) if self.divided else x

    @property
    def has_parameter(self) -> bool:
        """Whether the kernel reads a parameter: the factor, or the number of ranks."""
        return self.scaled or self.divided


OPERATIONS: dict[str, Operation] = {
    "sum": Operation(_add),
    "avg": Operation(_add, divided=True),
    "scaled_sum": Operation(_add, scaled=True),
    "prod": Operation(_multiply),
    "min": Operation(_extremum("<")),
    "max": Operation(_extremum(">")),
    "band": Operation(_bitwise("and_")),
    "bor": Operation(_bitwise("or_")),
    "bxor": Operation(_bitwise("xor")),
    "land": Operation(_logical("and_"), logical=True),
    "lor": Operation(_logical("or_"), logical=True),
    "lxor": Operation(_logical("xor"), logical=True),
}
