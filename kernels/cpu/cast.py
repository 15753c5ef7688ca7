"""Conversion of single elements between memory and the type in which they are accumulated.

Numba has no half types: it computes with the accumulator, float32. The conversions are those of
`gpucoll.kernels.cpu.elements`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpucoll.kernels.cpu.addresses import HALF_TYPES
from gpucoll.kernels.cpu.codegen import F32, I8, I64, pointer
from gpucoll.kernels.cpu.elements import Element, NarrowFloat, elements

if TYPE_CHECKING:
    from gpucoll.kernels.cpu.jit import (
        Implementation,
        NumbaContext,
        NumbaFunction,
        NumbaSignature,
        NumbaType,
    )


def accumulator_dtype(dtype: str) -> str:
    """Return the dtype in which elements of a dtype are accumulated."""
    return "float32" if dtype in HALF_TYPES else dtype


def accumulator_of(dtype: str) -> NumbaType:
    """Return the accumulator of a dtype as a Numba type."""
    return types.boolean if dtype == "bool" else getattr(types, accumulator_dtype(dtype))


def _element(dtype: str) -> Element:
    """Return the element without special instructions, which Numba's target may lack."""
    if dtype != "float16":
        return elements()[dtype]
    form = NarrowFloat(5, 10)
    return Element(form.storage, F32, "f", form.decode, form.encode)


def _parts(b: ir.IRBuilder, element: Element, address: ir.Value, index: ir.Value) -> list[ir.Value]:
    """Return pointers to the parts of element `index`: two for a complex one.

    All are indexed from one pointer, so that LLVM sees a stride of one and can vectorise a loop.
    """
    base = pointer(b, address, element.storage)
    if element.kind != "c":
        return [b.gep(base, [index], source_etype=element.storage)]
    first = b.shl(index, I64(1))
    places = (first, b.add(first, I64(1)))
    return [b.gep(base, [place], source_etype=element.storage) for place in places]


def _alignment(element: Element, is_aligned: bool) -> int:
    """Return the alignment of an element's parts, or 1: for x86 processors it does not matter."""
    return element.size_bytes if is_aligned else 1


@functools.cache
def load_element(dtype: str, is_aligned: bool = False) -> NumbaFunction:
    """Return ``(address, index) -> accumulator`` for Numba; addresses may be misaligned."""
    element, accumulator = _element(dtype), accumulator_of(dtype)
    alignment = _alignment(element, is_aligned)

    @intrinsic
    def load(typing_context: NumbaContext, address: NumbaType, index: NumbaType) -> Implementation:
        def generate(
            context: NumbaContext,
            b: ir.IRBuilder,
            signature: NumbaSignature,
            args: Sequence[ir.Value],
        ) -> ir.Value:
            places = _parts(b, element, *args)
            values = [b.load(place, align=alignment, typ=element.storage) for place in places]
            if element.kind == "c":
                number = context.make_complex(b, accumulator)
                number.real, number.imag = values
                return number._getvalue()
            if element.kind == "b":
                return b.icmp_unsigned("!=", values[0], element.storage(0))
            return element.load(b, values[0])

        return accumulator(types.int64, types.int64), generate

    return load


@functools.cache
def store_element(dtype: str, is_aligned: bool = False) -> NumbaFunction:
    """Return ``(address, index, accumulator)`` for Numba, which rounds half types."""
    element, accumulator = _element(dtype), accumulator_of(dtype)
    alignment = _alignment(element, is_aligned)

    @intrinsic
    def store(
        typing_context: NumbaContext, address: NumbaType, index: NumbaType, value: NumbaType
    ) -> Implementation:
        def generate(
            context: NumbaContext,
            b: ir.IRBuilder,
            signature: NumbaSignature,
            args: Sequence[ir.Value],
        ) -> ir.Value:
            values = [args[2]]
            if element.kind == "c":
                number = context.make_complex(b, accumulator, args[2])
                values = [number.real, number.imag]
            elif element.kind == "b":
                values = [b.zext(args[2], element.storage)]
            stored = [element.store(b, value) for value in values]
            for place, value in zip(_parts(b, element, *args[:2]), stored, strict=True):
                b.store(value, place, align=alignment)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, accumulator), generate

    return store


def convert_to(kind: NumbaType) -> NumbaFunction:
    """Return ``(number) -> kind`` for Numba: integers wrap, floats round, bool tests nonzero."""

    @intrinsic
    def convert(typing_context: NumbaContext, number: NumbaType) -> Implementation:
        def generate(
            context: NumbaContext,
            b: ir.IRBuilder,
            signature: NumbaSignature,
            args: Sequence[ir.Value],
        ) -> ir.Value:
            return context.cast(b, args[0], signature.args[0], kind)

        return kind(types.unliteral(number)), generate

    return convert


def scratch_of(size_bytes: int) -> NumbaFunction:
    """Return ``() -> address`` for Numba: the address of `size_bytes` on the stack."""

    @intrinsic
    def scratch(typing_context: NumbaContext) -> Implementation:
        def generate(
            context: NumbaContext,
            b: ir.IRBuilder,
            signature: NumbaSignature,
            args: Sequence[ir.Value],
        ) -> ir.Value:
            return b.ptrtoint(cgutils.alloca_once(b, I8, size=I64(size_bytes)), I64)

        return types.int64(), generate

    return scratch
