"""Machine code as a CPython built-in function.

``PyCFunction_NewEx`` is public C API: from a method's definition (name, code, calling convention)
and an object for ``self`` it makes a callable. The definition must outlive the callable, whose
lifetime is unknown, so definitions are kept for the life of the process: one per compiled entry.
"""

from __future__ import annotations

import ctypes
from types import BuiltinFunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

METH_NOARGS = 0x0004
METH_FASTCALL = 0x0080


class _MethodDefinition(ctypes.Structure):
    """``PyMethodDef`` of CPython's ``methodobject.h``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("documentation", ctypes.c_char_p),
    )


_definitions: dict[int, _MethodDefinition] = {}

_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.restype = ctypes.py_object
_new_function.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]


def builtin(address: int, flags: int, self_object: object) -> BuiltinFunctionType:
    """Return the code at `address` as a built-in bound to `self_object`, which it keeps alive."""
    definition = _definitions.setdefault(
        address, _MethodDefinition(b"gpucoll_entry", address, flags, None)
    )
    made: BuiltinFunctionType = _new_function(ctypes.addressof(definition), self_object, None)
    return made


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def capsule(address: int) -> CapsuleType:
    """Return a capsule of an address, by which `builtin` code finds its data. Owns nothing."""
    made: CapsuleType = _new_capsule(address, None, None)
    return made
