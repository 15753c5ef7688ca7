"""Blocks in compiled loops: their types, and the loads and stores of their fields, for Numba."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from numba.core import types
from numba.core.datamodel import models
from numba.core.imputils import (
    lower_builtin,
    lower_cast,
    lower_getattr_generic,
    lower_setattr_generic,
)
from numba.core.typeconv import Conversion
from numba.core.typing import signature
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_getattr,
    infer_global,
)
from numba.extending import register_model, typeof_impl

from gpucoll.blocks import WORD_BYTES, Block, BlockClass, Words, kinds
from gpucoll.codes import CodesClass
from gpucoll.kernels.cpu import codegen

if TYPE_CHECKING:
    from llvmlite import ir

    from gpucoll.kernels.cpu.jit import NumbaContext, NumbaSignature, NumbaType

__all__ = ["type_of"]

Declared: TypeAlias = Any
"""A class of blocks, `Words`, or a class of codes, which have only `type` in common."""


class Addressed(types.Type):
    """The type of blocks of a class, or of `Words`: an address in a register."""

    def __init__(self, cls: Declared) -> None:
        self.cls = cls
        super().__init__(f"{cls.__module__}.{cls.__name__}")

    def can_convert_to(self, context: NumbaContext, other: NumbaType) -> object:
        """Say that it may be used as an int64."""
        return Conversion.safe if other == types.int64 else None


class Places(types.Type):
    """The type of a block's attribute ``at``."""

    def __init__(self, cls: type[Block]) -> None:
        self.cls = cls
        super().__init__(f"{cls.__module__}.{cls.__name__}.at")


class Class(types.Callable, types.Dummy):
    """The type of a class itself: a class of blocks is called with an address."""

    def __init__(self, cls: Declared) -> None:
        self.cls = cls
        super().__init__(f"class {cls.__module__}.{cls.__name__}")

    def get_call_type(
        self,
        context: NumbaContext,
        arguments: tuple[NumbaType, ...],
        keywords: Mapping[str, NumbaType],
    ) -> NumbaSignature:
        """Return the signature of the call."""
        return signature(Addressed(self.cls), types.int64)

    def get_call_signatures(self) -> tuple[tuple[()], bool]:
        """Return the signatures that Numba shows in errors: none."""
        return (), False

    def get_impl_key(self, of_call: NumbaSignature) -> type:
        """Return the key under which `lower_builtin` has the call."""
        return Class


@register_model(Addressed)
@register_model(Places)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: NumbaContext, of_type: NumbaType) -> None:
        super().__init__(manager, of_type, codegen.I64)


register_model(Class)(models.OpaqueModel)


def type_of(kind: Declared) -> NumbaType:
    """Return the type for what a field or an argument is declared to be; a word if for nothing."""
    is_addressed = isinstance(kind, type) and (issubclass(kind, Block) or kind is Words)
    return Addressed(kind) if is_addressed else types.int64


@typeof_impl.register(BlockClass)
@typeof_impl.register(CodesClass)
def _typeof_class(cls: Declared, context: NumbaContext) -> NumbaType:
    return Class(cls)


# --- what loops may do with them ------------------------------------------------------------------


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = Addressed

    def generic_resolve(self, block: Addressed, name: str) -> NumbaType | None:
        if name == "address":
            return types.int64
        if block.cls is Words:
            return None
        if name == "at":
            return Places(block.cls)
        return type_of(kinds(block.cls)[name]) if name in block.cls.fields else None


@infer_getattr
class _Places(AttributeTemplate):  # type: ignore[misc]
    key = Places

    def generic_resolve(self, places: Places, name: str) -> NumbaType | None:
        return types.int64 if name in places.cls.fields else None


@infer_getattr
class _OfClass(AttributeTemplate):  # type: ignore[misc]
    key = Class

    def generic_resolve(self, of: Class, name: str) -> NumbaType | None:
        return None if _number(of.cls, name) is None else types.int64


def _number(cls: Declared, name: str) -> int | None:
    """Return a class's number of this name: a code, the index of a field, or a size."""
    if isinstance(cls, CodesClass):
        return int(cls.__members__[name]) if name in cls.__members__ else None
    if cls is not Words and name in cls.fields:
        return int(cls.fields[name])
    return int(getattr(cls, name)) if name in ("n_words", "n_bytes") else None


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):  # type: ignore[misc]
    def generic(
        self, arguments: tuple[NumbaType, ...], keywords: Mapping[str, NumbaType]
    ) -> NumbaSignature | None:
        if not isinstance(arguments[0], Addressed):
            return None
        returns = types.int64 if arguments[0].cls is Words else arguments[0]
        return signature(returns, arguments[0], types.int64)


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):  # type: ignore[misc]
    def generic(
        self, arguments: tuple[NumbaType, ...], keywords: Mapping[str, NumbaType]
    ) -> NumbaSignature | None:
        if isinstance(arguments[0], Addressed) and arguments[0].cls is Words:
            return signature(types.none, arguments[0], types.int64, types.int64)
        return None


@infer_global(bool)
@infer_global(operator.not_)
class _Truth(AbstractTemplate):  # type: ignore[misc]
    def generic(
        self, arguments: tuple[NumbaType, ...], keywords: Mapping[str, NumbaType]
    ) -> NumbaSignature | None:
        is_address = isinstance(arguments[0], Addressed)
        return signature(types.boolean, arguments[0]) if is_address else None


# --- the machine code -----------------------------------------------------------------------------


def _word(b: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """Return a pointer to a word."""
    place = b.add(address, b.shl(index, codegen.I64(3)))
    return codegen.pointer(b, place, codegen.I64)


@lower_getattr_generic(Addressed)
def _get(
    context: NumbaContext, b: ir.IRBuilder, of_type: NumbaType, address: ir.Value, name: str
) -> ir.Value:
    if name in ("address", "at"):
        return address
    field = of_type.cls.fields[name]
    if field.count:
        return b.add(address, codegen.I64(WORD_BYTES * field))
    return b.load(_word(b, address, codegen.I64(int(field))), align=8, typ=codegen.I64)


@lower_setattr_generic(Addressed)
def _set(
    context: NumbaContext,
    b: ir.IRBuilder,
    of_call: NumbaSignature,
    values: Sequence[ir.Value],
    name: str,
) -> None:
    address, value = values
    index = int(of_call.args[0].cls.fields[name])
    b.store(value, _word(b, address, codegen.I64(index)), align=8)


@lower_getattr_generic(Places)
def _place(
    context: NumbaContext, b: ir.IRBuilder, of_type: NumbaType, address: ir.Value, name: str
) -> ir.Value:
    return b.add(address, codegen.I64(WORD_BYTES * of_type.cls.fields[name]))


@lower_getattr_generic(Class)
def _of_class(
    context: NumbaContext, b: ir.IRBuilder, of_type: NumbaType, value: ir.Value, name: str
) -> ir.Value:
    return codegen.I64(_number(of_type.cls, name))


@lower_builtin(Class, types.Any)
@lower_builtin(Class, types.int64)
def _at(
    context: NumbaContext, b: ir.IRBuilder, of_call: NumbaSignature, values: Sequence[ir.Value]
) -> ir.Value:
    return values[0]


@lower_builtin(operator.getitem, Addressed, types.int64)
def _get_item(
    context: NumbaContext, b: ir.IRBuilder, of_call: NumbaSignature, values: Sequence[ir.Value]
) -> ir.Value:
    kind = of_call.args[0].cls
    if kind is not Words:
        return b.add(values[0], b.mul(values[1], codegen.I64(kind.n_bytes)))
    return b.load(_word(b, *values), align=8, typ=codegen.I64)


@lower_builtin(operator.setitem, Addressed, types.int64, types.int64)
def _set_item(
    context: NumbaContext, b: ir.IRBuilder, of_call: NumbaSignature, values: Sequence[ir.Value]
) -> ir.Value:
    b.store(values[2], _word(b, values[0], values[1]), align=8)
    return context.get_dummy_value()


@lower_builtin(bool, Addressed)
def _is_there(
    context: NumbaContext, b: ir.IRBuilder, of_call: NumbaSignature, values: Sequence[ir.Value]
) -> ir.Value:
    return b.icmp_unsigned("!=", values[0], codegen.I64(0))


@lower_builtin(operator.not_, Addressed)
def _is_not_there(
    context: NumbaContext, b: ir.IRBuilder, of_call: NumbaSignature, values: Sequence[ir.Value]
) -> ir.Value:
    return b.icmp_unsigned("==", values[0], codegen.I64(0))


@lower_cast(Addressed, types.int64)
@lower_cast(types.int64, Addressed)
def _same_word(
    context: NumbaContext,
    b: ir.IRBuilder,
    from_type: NumbaType,
    to_type: NumbaType,
    value: ir.Value,
) -> ir.Value:
    return value
