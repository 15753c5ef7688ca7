"""A user's function as a number, which is equal on ranks whose code, and all it uses, is equal.

The digest covers bytecode, constants, defaults, and the values of closures and globals: numbers,
arrays and, recursively, functions. It does not cover addresses, file names and line numbers.
Bytecode depends on the version of Python, which all ranks of a job share.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections import ChainMap
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, EllipsisType, FunctionType, ModuleType, NoneType
from typing import Any

from gpucoll.errors import ArgumentTypeError

DIGEST_BITS = 62
"""Number of bits that `gpucoll.types.mix_digest` takes of one number."""

_PLAIN = (bool, int, float, complex, str, bytes, NoneType, EllipsisType)
_LIBRARIES = ("builtins", "cmath", "math", "numba", "numpy", "operator")
"""Libraries whose functions are identified by name, because every rank has the same ones."""
_MAY_NOT_RETURN_ONCE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def python_function(value: object) -> FunctionType | None:
    """Return a Python function, or that of a ``numba.njit`` function; None for other objects."""
    function = getattr(value, "py_func", value)
    return function if isinstance(function, FunctionType) else None


def function_digest(function: object, *others: object) -> int:
    """Return the digest of a function, and of plain values that belong to it.

    Raises
    ------
    ArgumentTypeError
        The function, or one that it calls, raises exceptions or is a generator; or it uses an
        object that cannot be compared between ranks.
    """
    digest = _Digest()
    digest.add(function, "itself")
    for value in others:
        digest.add(value, "as its identity")
    return int.from_bytes(digest.hash.digest()[:8], "little") & ((1 << DIGEST_BITS) - 1)


class _Digest:
    """A hash to which values are added one after another."""

    def __init__(self) -> None:
        import hashlib  # only ops made of a function need it

        self.hash = hashlib.sha256()
        self._functions: list[FunctionType] = []

    def _write(self, *parts: str | bytes) -> None:
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            self.hash.update(len(data).to_bytes(8, "little") + data)

    def add(self, value: object, name: str) -> None:
        """Add a value that the code calls `name`."""
        function = python_function(value)
        if isinstance(value, _PLAIN):
            self._write(type(value).__qualname__, repr(value))
        elif isinstance(value, tuple):
            self._write("tuple", str(len(value)))
            for item in value:
                self.add(item, name)
        elif isinstance(value, frozenset):  # its order differs in every process
            self._write("frozenset", *sorted(map(repr, value)))
        elif hasattr(value, "dtype") and hasattr(value, "tobytes") and not isinstance(value, type):
            array: Any = value
            self._write(str(array.dtype), str(array.shape), array.tobytes())
        elif function is not None and not _is_of_library(function):
            self._add_function(function)
        elif spelled := _spelled(value):
            self._write("name", spelled)
        else:
            raise ArgumentTypeError(
                f"it uses {name}, a {type(value).__name__}, which cannot be compared between "
                "ranks: use numbers, arrays, and functions compiled by numba.njit"
            )

    def _add_function(self, function: FunctionType) -> None:
        if function in self._functions:  # a recursive call, or a second one
            self._write("again", str(self._functions.index(function)))
            return
        self._functions.append(function)
        if function.__code__.co_flags & _MAY_NOT_RETURN_ONCE:
            raise ArgumentTypeError(f"{function.__name__} is a generator or a coroutine")
        self.add(function.__defaults__, "its defaults")
        self.add(tuple(sorted((function.__kwdefaults__ or {}).items())), "its defaults")
        self._add_code(function.__code__, function)

    def _add_code(self, code: CodeType, function: FunctionType) -> None:
        references = list(_references(code, function))  # first, because it refuses code that raises
        self._write("code", str(code.co_argcount), str(code.co_flags), code.co_code)
        self._write(getattr(code, "co_exceptiontable", b""), *code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._add_code(constant, function)
            else:
                self.add(constant, "a constant")
        for name, value in references:
            self.add(value, name)


def _references(code: CodeType, function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield the globals and closure values that code uses; for modules, the attributes it uses."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    outer = ChainMap(function.__globals__, vars(builtins))
    name, value, is_module = "", None, False
    for step in dis.get_instructions(code):
        if step.opname == "RAISE_VARARGS":
            raise ArgumentTypeError(
                f"{function.__name__} has a raise or an assert: a collective cannot stop in the "
                "middle. Return a value for the error instead, such as NaN"
            )
        after_module, is_module = is_module, is_module and step.opname == "EXTENDED_ARG"
        if after_module and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name, value = f"{name}.{step.argval}", getattr(value, step.argval, None)
        elif step.opname == "LOAD_GLOBAL" and step.argval in outer:
            name, value = step.argval, outer[step.argval]
        elif step.opname == "LOAD_DEREF" and step.argval in cells:
            name, value = step.argval, cells[step.argval].cell_contents
        else:  # including unknown names, which Numba reports, and variables of an outer function
            continue
        is_module = isinstance(value, ModuleType)
        yield name, value


def _is_of_library(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _LIBRARIES


def _spelled(value: object) -> str:
    """Return a name that identifies a value on every rank; empty if there is none."""
    if isinstance(value, ModuleType):
        return value.__name__
    kind = type(value)
    if kind.__module__.startswith("numba.core.types"):
        return str(value)
    is_library = _is_of_library(value) or kind.__module__.partition(".")[0] == "numpy"
    if isinstance(value, type | BuiltinFunctionType) or is_library:
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "")
        return f"{getattr(value, '__module__', '')}.{name}" if name else ""
    return ""
