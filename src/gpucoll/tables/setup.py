"""The arguments of a table, checked, and compared between ranks."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpucoll.arrays.libraries import NUMPY, library_of_dtype
from gpucoll.arrays.library import AnyArray
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.tables.updates import Rule, Update, rule_of
from gpucoll.types import DTYPES
from gpucoll.wording import spelled_given

__all__ = ["Init", "Setup", "Staleness", "checked_init", "converted"]

Init: TypeAlias = "float | AnyArray | Callable[[Any], Any] | None"
"""What users pass as `init`."""
_MOST_ELEMENTS = 1 << 56


@dataclass(frozen=True)
class Staleness:
    """A mode of tables: no rank is more than `steps` clocks ahead of another one (Ho 2013).

    Parameters
    ----------
    steps : int
        At least 0. ``Staleness(0)`` is "sync".
    """

    steps: int

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int | np.integer):
            raise ArgumentTypeError(
                f"Staleness: steps must be an int; got {spelled_given(self.steps)}"
            )
        if self.steps < 0:
            raise ArgumentError(f"Staleness: steps must be at least 0; got {self.steps}")


class Setup(NamedTuple):
    """The arguments of a table, checked."""

    rows: int
    width: int
    dtype: np.dtype[Any]
    rule: Rule
    is_sync: bool
    staleness: int | None

    @staticmethod
    def of(rows: Any, width: Any, dtype: Any, update: Update, mode: object) -> Setup:
        """Return the checked arguments; raise if one is wrong."""
        for what, number, least in (("rows", rows, 0), ("width", width, 1)):
            if isinstance(number, bool) or not isinstance(number, int | np.integer):
                raise ArgumentTypeError(f"{what} must be an int; got {spelled_given(number)}")
            if number < least:
                raise ArgumentError(f"{what} must be at least {least}; got {number}")
        if rows * width >= _MOST_ELEMENTS:
            raise ArgumentError(f"a table of {rows} x {width} elements is beyond any memory")
        if dtype is None:  # which NumPy takes for float64
            raise ArgumentTypeError("dtype must be given, or left out for float32; got None")
        _make_known(dtype)
        name = library_of_dtype(dtype).template_of_dtype(dtype, None).dtype
        _make_known(name)
        if name not in DTYPES:
            raise ArgumentTypeError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        if isinstance(mode, Staleness):
            staleness: int | None = int(mode.steps)
        elif mode in ("sync", "async"):
            staleness = 0 if mode == "sync" else None
        else:
            raise ArgumentError(
                f'mode must be "async", "sync" or Staleness(steps); got {spelled_given(mode)}'
            )
        rule = rule_of(update, name)
        native = np.dtype(NUMPY.template_of_dtype(name, None).native)
        return Setup(int(rows), int(width), native, rule, staleness == 0, staleness)

    def settings(self) -> dict[str, str]:
        """Return what must be equal on all ranks."""
        mode = {None: "async", 0: "sync"}.get(self.staleness, f"Staleness({self.staleness})")
        return {
            "rows": str(self.rows),
            "width": str(self.width),
            "dtype": str(self.dtype),
            "update": self.rule.name,
            "mode": mode,
        }


def _make_known(dtype: Any) -> None:
    """Let NumPy know a dtype's name, if a package that is installed adds it."""
    if isinstance(dtype, str) and dtype not in np.sctypeDict:
        with contextlib.suppress(ImportError):
            importlib.import_module("ml_dtypes")


def checked_init(init: Init, setup: Setup) -> Init:
    """Return `init` as it is, or as an array of the table's dtype; raise if it does not fit."""
    if init is None or callable(init):
        return init
    given = np.asarray(init)
    shapes = ((), (setup.width,), (setup.rows, setup.width))
    if given.shape not in shapes:
        raise ArgumentError(
            f"init has shape {given.shape}; it must be a number, a row {shapes[1]} or all rows "
            f"{shapes[2]}"
        )
    return converted(given, setup.dtype)


def converted(given: Any, dtype: np.dtype[Any]) -> Any:
    """Return what `init` says in the dtype of the table; raise if that is a different number.

    Floats may be rounded.
    """
    kind, wanted = given.dtype.kind, dtype.kind
    is_exact = wanted in "iub"
    if kind not in "biufcV" or (kind in "fcV" and is_exact) or (kind == "c" and wanted != "c"):
        raise ArgumentTypeError(f"init has dtype {given.dtype}, but the table has {dtype}")
    made = given.astype(dtype)
    if is_exact and (made != given).any():
        raise ArgumentError(f"init has values that {dtype} does not hold")
    return made
