"""Loops that other code calls by address: their machine code comes from the cache, or from Numba.

Code in the linked library of the cache (`gpucoll.kernels.cpu.library`) is found there by its name,
and Numba is not even imported. So the decorators here only record the functions that they decorate,
and `types` only names types. Whatever Numba needs of either is made when Numba requests it, through
an attribute that it looks for (``_numba_type_``).
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast, get_type_hints

from gpucoll.kernels.cpu import cache

if TYPE_CHECKING:
    from llvmlite import ir

__all__ = ["Inlined", "Loop", "compile_module", "compiled", "inline", "inline_typed", "types"]


F = TypeVar("F", bound=Callable[..., Any])

# Numba's objects are Any, since only some versions of Numba describe some of them to type checkers.
NumbaType: TypeAlias = Any
"""A type of Numba's."""
NumbaSignature: TypeAlias = Any
"""Numba's types of a function's result and arguments."""
NumbaContext: TypeAlias = Any
"""The part of Numba that types functions, lowers them, or keeps their data models."""
NumbaFunction: TypeAlias = Any
"""A function that Numba compiles: a dispatcher, a C function, an intrinsic, or a loaded result."""
CType: TypeAlias = Any
"""A number's type in ctypes, whose base class has no public name; None for no result."""
Implementation: TypeAlias = "tuple[NumbaSignature, Callable[..., ir.Value]]"
"""What Numba gets from an intrinsic: its signature, and the function that makes its LLVM IR."""


class Kind:
    """A type of a compiled function's arguments, with Numba's name for it."""

    def __init__(self, name: str, c_type: CType) -> None:
        self.name = name
        self.c_type = c_type

    def __call__(self, *arguments: Kind) -> Signature:
        """Return the signature of functions that return this type."""
        return Signature(self, arguments)

    @property
    def numba(self) -> NumbaType:
        """The corresponding type of Numba."""
        from numba import types as numba_types

        return getattr(numba_types, self.name)

    def __repr__(self) -> str:
        return self.name


class Signature:
    """The return type and argument types of a compiled function."""

    def __init__(self, returns: Kind, arguments: tuple[Kind, ...]) -> None:
        self.returns = returns
        self.arguments = arguments

    @property
    def numba(self) -> NumbaSignature:
        """The corresponding signature of Numba."""
        return self.returns.numba(*(kind.numba for kind in self.arguments))

    @property
    def prototype(self) -> type[ctypes._CFunctionType]:
        """The corresponding function type of ctypes; its calls release the interpreter."""
        return ctypes.CFUNCTYPE(self.returns.c_type, *(kind.c_type for kind in self.arguments))


class ExternalFunction:
    """A function of libc or CPython that loops call.

    The linked library can need only these functions. Any other would have been inserted by Numba,
    to raise an exception or to count references.
    """

    declared: set[str] = set()  # noqa: RUF012 (of all of them)

    def __init__(self, name: str, signature: Signature) -> None:
        self.name = name
        self.signature = signature
        self.declared.add(name)

    def __call__(self, *arguments: object) -> int:
        """Say that only compiled code can call it; loops that do so are checked by this type."""
        raise TypeError(f"only compiled code calls {self.name}")

    @cached_property
    def _numba_type_(self) -> NumbaType:
        from numba import types as numba_types

        return numba_types.ExternalFunction(self.name, self.signature.numba)


class _Types:
    """The types of loops; ``from numba import types`` would import all of Numba."""

    int64 = Kind("int64", ctypes.c_int64)
    int32 = Kind("int32", ctypes.c_int32)
    int16 = Kind("int16", ctypes.c_int16)
    int8 = Kind("int8", ctypes.c_int8)
    uint64 = Kind("uint64", ctypes.c_uint64)
    uint32 = Kind("uint32", ctypes.c_uint32)
    uint16 = Kind("uint16", ctypes.c_uint16)
    uint8 = Kind("uint8", ctypes.c_uint8)
    float64 = Kind("float64", ctypes.c_double)
    float32 = Kind("float32", ctypes.c_float)
    void = Kind("void", None)
    ExternalFunction = ExternalFunction


types = _Types


class Inlined:
    """A function that loops call; LLVM inlines it."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.__wrapped__ = self.py_func = function
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: object) -> object:
        """Run it as plain Python, on blocks of Python's."""
        return self.py_func(*arguments)

    @cached_property
    def types(self) -> tuple[NumbaType, ...]:
        """Numba's types of the arguments."""
        return _argument_types(self.py_func)

    @cached_property
    def dispatcher(self) -> NumbaFunction:
        """Numba's dispatcher for the function."""
        made = inline_typed(self.py_func)
        template_for = made.get_call_template

        def template_as_declared(
            arguments: tuple[NumbaType, ...], keywords: dict[str, NumbaType]
        ) -> object:
            return template_for(self.types[: len(arguments)], keywords)

        made.get_call_template = template_as_declared
        return made

    @property
    def _numba_type_(self) -> NumbaType:
        return self.dispatcher._numba_type_


class Intrinsic:
    """A function that loops call and whose LLVM IR a Python function makes."""

    def __init__(self, generate: Callable[..., object], signature: Signature) -> None:
        self._generate = generate
        self.signature = signature
        self.__name__ = generate.__name__
        self.__module__ = generate.__module__
        self.__doc__ = generate.__doc__

    def _define(self, typing_context: NumbaContext, *arguments: NumbaType) -> Implementation:
        """Return the signature and the function that makes the IR, as Numba needs them."""
        from gpucoll.kernels.cpu import codegen

        def generate(
            context: NumbaContext,
            builder: ir.IRBuilder,
            signature: NumbaSignature,
            values: Sequence[ir.Value],
        ) -> ir.Value:
            made = self._generate(codegen, builder, *values)
            return context.get_dummy_value() if made is None else made

        return self.signature.numba, generate

    @cached_property
    def _numba_type_(self) -> NumbaType:
        from numba.core.registry import cpu_target
        from numba.extending import intrinsic as numba_intrinsic

        def define(typing_context: NumbaContext, *arguments: NumbaType) -> Implementation:
            return self._define(typing_context, *arguments)

        # Numba reads an intrinsic's arity from its signature in Python.
        names = ("typing_context", *(f"a{n}" for n in range(len(self.signature.arguments))))
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        define.__name__ = self.__name__
        define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        made = numba_intrinsic(define)
        cpu_target.typing_context.refresh()
        return cpu_target.typing_context.resolve_value_type(made)


class Loop:
    """A compiled C function of words, called by address."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.__wrapped__ = self.py_func = function
        self.__name__ = function.__name__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        returns = types.void if function.__annotations__.get("return") == "None" else types.int64
        self.signature = returns(*[types.int64] * function.__code__.co_argcount)

    @property
    def numba_signature(self) -> NumbaSignature:
        """The function's types for Numba, to which a block is more than a word."""
        return self.signature.returns.numba(*_argument_types(self.py_func))

    @property
    def symbol(self) -> str:
        """Its name in the linked library, and in a debugger."""
        return f"{self.__module__}.{self.__name__}".replace(".", "_")

    @cached_property
    def numba(self) -> NumbaFunction:
        """The function as Numba compiled it, or loaded it from the cache."""
        from numba.core import sigutils

        from gpucoll.kernels.cpu.loop_cache import CachedLoop

        signature = sigutils.normalize_signature(self.numba_signature)
        made = CachedLoop(self.py_func, signature, {}, {"error_model": "numpy"})
        made.enable_caching()
        made.compile()
        return made

    @cached_property
    def address(self) -> int:
        """The address of its code."""
        library = cache.library()
        found = library.address(self.symbol) if library is not None else None
        return int(self.numba.address) if found is None else found

    @cached_property
    def ctypes(self) -> Callable[..., int]:
        """The function for calls from Python, which release the interpreter."""
        return self.signature.prototype(self.address)


def inline_typed(function: Callable[..., object]) -> NumbaFunction:
    """Decorate a function that compiled code calls, with arguments of any type; LLVM inlines it."""
    import numba

    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options)(function)


def inline(function: F) -> F:
    """Decorate a function that the compiled loops call; its arguments are as it declares them.

    An argument is a block of a class, several `Words`, or otherwise a word, whatever the caller
    passes. So Numba compiles the function once, where `inline_typed` is compiled anew for each
    constant argument, and for bools. Of 23 s for compiling all loops, 7 s went there (one core,
    2026-11-21). LLVM sees the constants anyway.
    """
    return cast("F", Inlined(function))


def intrinsic(signature: Signature) -> Callable[[Callable[..., object]], Callable[..., int]]:
    """Decorate a function ``(codegen, builder, *values) -> value`` that makes LLVM IR.

    The first argument is the module `gpucoll.kernels.cpu.codegen`, which imports LLVM.
    """

    def decorate(generate: Callable[..., object]) -> Callable[..., int]:
        return cast("Callable[..., int]", Intrinsic(generate, signature))

    return decorate


def compiled(function: Callable[..., object]) -> Loop:
    """Decorate a function that becomes a C function when its address is needed.

    It gets and returns words, or returns nothing if it is annotated with ``-> None``.
    """
    return Loop(function)


def _argument_types(function: Callable[..., object]) -> tuple[NumbaType, ...]:
    from gpucoll.kernels.cpu.block_types import type_of

    declared = get_type_hints(function)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return tuple(type_of(declared.get(name)) for name in names)


def loops_of(module: str) -> Iterator[Loop]:
    """Yield the loops that a module defines, which must have been imported."""
    for value in vars(sys.modules[module]).values():
        if isinstance(value, Loop) and value.__module__ == module:
            yield value


def compile_module(module: str) -> None:
    """Have Numba compile the loops that a module defines, or load them from the cache."""
    for loop in loops_of(module):
        _ = loop.numba
