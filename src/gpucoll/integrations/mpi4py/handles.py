"""The base of MPI's objects: handles, of which several may refer to the same object, or to none."""

from __future__ import annotations

import sys
import weakref
from typing import Any, TypeAlias, TypeVar

from gpucoll.integrations.mpi4py.errors import argument_error

_H = TypeVar("_H", bound="Handle")
Contents: TypeAlias = Any
"""The object that handles refer to: each class of handles has its own."""
AnyHandle: TypeAlias = Any
"""A handle whose class its object decides: communicators with a topology have their own."""
_shown: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The objects whose handles were given to programs as numbers."""
_NAMESPACE = __name__.rpartition(".")[0] + ".MPI"


def constant(name: str) -> object:
    """Return one of MPI's constants."""
    return getattr(sys.modules[_NAMESPACE], name)


class Handle:
    """One handle. Its `_core` is the object it refers to, or None (``..._NULL``)."""

    _core: Contents = None

    def __new__(cls: type[_H], handle: Handle | None = None) -> _H:
        self = object.__new__(cls)
        if handle is not None:
            if not isinstance(handle, cls._family()):
                raise TypeError(f"expecting {cls._family().__name__}, got {type(handle).__name__}")
            taken: Any = handle
            self._core = taken._core
        return self

    @classmethod
    def _of(cls: type[_H], core: Contents) -> _H:
        self = object.__new__(cls)
        self._core = core
        return self

    @classmethod
    def _family(cls) -> type:
        """Return the class whose handles can be converted to this one."""
        return next(kind for kind in reversed(cls.__mro__) if issubclass(kind, Handle) and
                    kind is not Handle)  # fmt: skip

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle) or not isinstance(other, self._family()):
            return NotImplemented
        return bool(self._core is other._core)

    def __hash__(self) -> int:
        raise TypeError(f"unhashable type: {type(self).__name__!r}")

    def __bool__(self) -> bool:
        return self._core is not None

    def _live(self, error_class: str) -> Contents:
        """Return the object that the handle refers to.

        Raises
        ------
        ArgumentError
            The handle is null.
        """
        if self._core is None:
            raise argument_error(f"{type(self).__name__} is null, or was freed", error_class)
        return self._core

    @property
    def handle(self) -> int:
        """A number that identifies the object in this process while it lives."""
        if self._core is None:
            return 0
        number = id(self._core)
        try:
            _shown[number] = self._core
        except TypeError:
            raise NotImplementedError(f"a {type(self).__name__} has no handle") from None
        return number

    def toint(self) -> int:
        """Return the handle as a number."""
        return self.handle

    @classmethod
    def fromhandle(cls, handle: int) -> AnyHandle:
        """Return the object of a handle of this process."""
        self = cls()
        if handle:
            self._core = _shown.get(handle)
            if self._core is None:
                raise argument_error(f"{handle} is not the handle of a living {cls.__name__}")
        return self

    py2f = toint
    fromint = f2py = fromhandle

    def _reduced(self, name: str) -> tuple[object, ...]:
        """Return the pickled form of a constant or of another handle of it."""
        same = constant(name)
        return (constant, (name,)) if self is same else (type(self), (same,))
