"""Attributes that a program attaches to communicators, datatypes and windows."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from gpucoll.integrations.mpi4py.constants import KEYVAL_INVALID
from gpucoll.integrations.mpi4py.errors import argument_error

if TYPE_CHECKING:
    from gpucoll.integrations.mpi4py.handles import Contents

Attribute: TypeAlias = Any
"""A value that a program has attached, or a function of the program that copies or deletes it."""
_numbers = itertools.count(1000)
_keys: dict[int, tuple[type, Any, Any]] = {}
"""By key: the class it is for, and its copy and delete functions."""


class HasAttributes:
    """Get_attr and related methods; the values are in ``_core.attributes``."""

    _core: Contents

    def Get_attr(self, keyval: int) -> Attribute:
        """Return the value of a key; None if it is not set."""
        return self._kept(keyval).get(keyval)

    def Set_attr(self, keyval: int, attrval: Attribute) -> None:
        """Set the value of a key."""
        kept = self._kept(keyval)
        if keyval not in _keys:
            raise argument_error(f"{keyval} is not an attribute key", "ERR_KEYVAL")
        if keyval in kept:
            self.Delete_attr(keyval)
        kept[keyval] = attrval

    def Delete_attr(self, keyval: int) -> None:
        """Delete the value of a key."""
        kept = self._kept(keyval)
        if keyval in kept:
            delete = _keys[keyval][2] if keyval in _keys else None
            if delete is not None:
                _called(delete, self, keyval, kept[keyval])
            del kept[keyval]

    @classmethod
    def Create_keyval(
        cls,
        copy_fn: Callable[..., Attribute] | bool | None = None,
        delete_fn: Callable[..., Attribute] | bool | None = None,
        nopython: bool = False,
    ) -> int:
        """Return a new key."""
        number = next(_numbers)
        _keys[number] = (cls, copy_fn, delete_fn or None)
        return number

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Free a key. Values that are set under it stay."""
        if keyval not in _keys:
            raise argument_error(f"{keyval} is not an attribute key", "ERR_KEYVAL")
        return KEYVAL_INVALID

    def _kept(self, keyval: int) -> dict[int, Attribute]:
        if keyval == KEYVAL_INVALID:
            raise argument_error("KEYVAL_INVALID is not an attribute key", "ERR_KEYVAL")
        kept: dict[int, Any] = self._live_core().attributes
        return kept

    def _live_core(self) -> Contents:
        if self._core is None:
            raise argument_error(f"{type(self).__name__} is null, or was freed", "ERR_COMM")
        return self._core

    def _copied_attributes(self) -> dict[int, Attribute]:
        """Return the attributes of a duplicate: each key's copy function determines its value."""
        copied = {}
        for keyval, value in list(self._live_core().attributes.items()):
            copy = _keys[keyval][1] if keyval in _keys else None
            if copy is True:
                copied[keyval] = value
            elif copy:
                new = _called(copy, self, keyval, value)
                if new is not NotImplemented:
                    copied[keyval] = new
        return copied

    def _delete_attributes(self) -> None:
        for keyval in list(self._live_core().attributes):
            self.Delete_attr(keyval)


def _called(function: Callable[..., Attribute], *given: object) -> Attribute:
    """Call a program's function. If it raises, print its traceback and raise an error of MPI's."""
    try:
        return function(*given)
    except Exception as error:
        traceback.print_exception(error)
        raise argument_error(f"an attribute's function raised {error!r}", "ERR_OTHER") from error
