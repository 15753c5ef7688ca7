"""Info objects (keys and values) and error handlers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from gpucoll.integrations.mpi4py.constants import MAX_INFO_KEY, MAX_INFO_VAL
from gpucoll.integrations.mpi4py.errors import argument_error
from gpucoll.integrations.mpi4py.handles import Handle

if TYPE_CHECKING:
    from typing_extensions import Self


Items: TypeAlias = "Info | Mapping[str, str] | Iterable[tuple[str, str]]"
"""Keys and values."""


class Info(Handle):
    """A dictionary of strings; its `_core` is a dict. No call of this library reads it."""

    @property
    def _items(self) -> dict[str, str]:
        items: dict[str, str] = self._live("ERR_INFO")
        return items

    @classmethod
    def Create(cls, items: Items | None = None) -> Self:
        self = cls._of({})
        if items is not None:
            self.update(items)
        return self

    @classmethod
    def Create_env(cls, args: Sequence[str] | None = None) -> Self:
        return cls._of({})

    def Dup(self) -> Self:
        return type(self)._of(dict(self._items))

    def copy(self) -> Self:
        return self.Dup() if self else type(self)()

    def Free(self) -> None:
        self._live("ERR_INFO")
        self._core = None

    def free(self) -> None:
        """Free it unless it is null."""
        if self is not INFO_ENV:
            self._core = None

    def Get(self, key: str) -> str | None:
        return self._items.get(key)

    def Set(self, key: str, value: str) -> None:
        if not 0 < len(key) <= MAX_INFO_KEY:
            raise argument_error(
                f"a key of {len(key)} characters is empty or too long", "ERR_INFO_KEY"
            )
        if not 0 < len(value) <= MAX_INFO_VAL:
            raise argument_error(
                f"a value of {len(value)} characters is too long", "ERR_INFO_VALUE"
            )
        self._items[key] = value

    def Delete(self, key: str) -> None:
        if key not in self._items:
            raise argument_error(f"no key {key!r}", "ERR_INFO_NOKEY")
        del self._items[key]

    def Get_nkeys(self) -> int:
        return len(self._items)

    def Get_nthkey(self, n: int) -> str:
        if not 0 <= n < len(self._items):
            raise argument_error(f"no key number {n}")
        return list(self._items)[n]

    def get(self, key: str, default: str | None = None) -> str | None:
        return default if self._core is None else self._items.get(key, default)

    def keys(self) -> list[str]:
        return list(self)

    def values(self) -> list[str]:
        return list(self._items.values()) if self else []

    def items(self) -> list[tuple[str, str]]:
        return list(self._items.items()) if self else []

    def update(self, items: Items = (), **more: str) -> None:
        if self._core is None:
            raise KeyError("INFO_NULL has no keys")
        pairs = items.items() if hasattr(items, "items") else items
        for key, value in (*pairs, *more.items()):
            self.Set(key, value)

    def pop(self, key: str, *default: str) -> str:
        if self._core is None and default:
            return default[0]
        if self._core is None:
            raise KeyError(key)
        return self._items.pop(key, *default)

    def popitem(self) -> tuple[str, str]:
        if self._core is None:
            raise KeyError("INFO_NULL has no keys")
        return self._items.popitem()

    def clear(self) -> None:
        if self._core is not None:
            self._items.clear()

    def __len__(self) -> int:
        return 0 if self._core is None else len(self._core)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._items) if self else [])

    def __contains__(self, key: object) -> bool:
        return self._core is not None and key in self._core

    def __getitem__(self, key: str) -> str:
        if self._core is None:
            raise KeyError(key)
        return self._items[key]

    def __setitem__(self, key: str, value: str) -> None:
        if self._core is None:
            raise KeyError(key)
        self.Set(key, value)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self.Delete(key)

    def __reduce__(self) -> tuple[object, ...]:
        if self._core is None or self._core is INFO_ENV._core:
            return self._reduced("INFO_ENV" if self else "INFO_NULL")
        return type(self).Create, (self.items(),)


INFO_NULL = Info()
INFO_ENV = Info._of({})


class Errhandler(Handle):
    """The reaction to an error; its `_core` is a name, or a function ``(object, code)``."""

    def Free(self) -> None:
        self._live("ERR_ERRHANDLER")
        self._core = None

    def free(self) -> None:
        """Free it unless it is predefined."""
        if not any(self is item for item in (ERRORS_RETURN, ERRORS_ABORT, ERRORS_ARE_FATAL)):
            self._core = None

    def __reduce__(self) -> tuple[object, ...]:
        if self._core is None:
            return self._reduced("ERRHANDLER_NULL")
        if self._core in PREDEFINED:
            return self._reduced(self._core)
        raise ValueError("an error handler cannot be pickled")


PREDEFINED = ("ERRORS_RETURN", "ERRORS_ABORT", "ERRORS_ARE_FATAL")
ERRHANDLER_NULL = Errhandler()
ERRORS_RETURN, ERRORS_ABORT, ERRORS_ARE_FATAL = (Errhandler._of(name) for name in PREDEFINED)
