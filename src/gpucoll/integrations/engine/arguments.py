"""Checks of a run's arguments, made before anything starts."""

from __future__ import annotations

import importlib
import math
import numbers
import secrets
from collections.abc import Mapping
from types import ModuleType

from gpucoll import ArgumentError, ArgumentTypeError, BackendUnavailableError
from gpucoll.integrations.engine.rank_call import InitOptions, Run

__all__ = ["check_call", "check_seconds", "check_world_size", "checked_options", "load", "new_run"]

_OURS = ("rank", "world_size", "meet", "name")


def load(module: str, package: str, who: str) -> ModuleType:
    """Import an engine, or raise an error that names the package to install.

    Raises
    ------
    BackendUnavailableError
        The engine is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailableError(
            f"{who} needs {module}, which cannot be imported ({error}). Install it: "
            f"pip install {package}"
        ) from error


def check_call(who: str, function: object, args: object, kwargs: object) -> None:
    """Raise if the function cannot be called on the ranks with these arguments."""
    if not callable(function):
        raise ArgumentTypeError(f"{who}: expected a function; got a {type(function).__name__}")
    if not isinstance(args, tuple | list):
        raise ArgumentTypeError(f"{who}: args must be a tuple or list; got {args!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentTypeError(f"{who}: kwargs must be a mapping; got {kwargs!r}")


def check_world_size(who: str, world_size: object) -> None:
    """Raise unless `world_size` is a number of ranks or None."""
    if world_size is None:
        return
    if isinstance(world_size, bool) or not isinstance(world_size, numbers.Integral):
        raise ArgumentTypeError(f"{who}: world_size must be an int; got {world_size!r}")
    if world_size < 1:
        raise ArgumentError(f"{who}: world_size must be at least 1; got {world_size}")


def check_seconds(who: str, name: str, value: object, may_be_none: bool = True) -> None:
    """Raise unless the value is a duration in seconds."""
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{who}: {name} must be a number of seconds; got {value!r}")
    if not 0 <= float(value) < math.inf:
        raise ArgumentError(f"{who}: {name} must be a number of seconds; got {value!r}")


def checked_options(who: str, options: object) -> dict[str, object]:
    """Return further arguments of `gpucoll.init`; raise if `init` has no such argument."""
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentTypeError(f"{who}: init must be a mapping of arguments; got {options!r}")
    checked = dict(options or {})
    if taken := [name for name in _OURS if name in checked]:
        raise ArgumentError(f"{who}: init must not contain {', '.join(taken)}: the run sets it")
    import inspect

    import gpucoll

    known = inspect.signature(gpucoll.init).parameters
    if strange := [name for name in checked if name not in known]:
        raise ArgumentError(f"{who}: gpucoll.init has no argument {', '.join(map(str, strange))}")
    return checked


def new_run(who: str, world_size: int, options: InitOptions | None) -> Run:
    """Return a run with a unique name and secret.

    Parameters
    ----------
    options : mapping or None
        Further arguments of `gpucoll.init`.
    """
    checked = checked_options(who, options)
    return Run(f"run {secrets.token_hex(8)}", world_size, checked, secrets.token_hex(32))
