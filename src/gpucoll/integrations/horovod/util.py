"""What programs import from ``horovod.common.util``."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from gpucoll import config
from gpucoll.integrations.horovod import basics

__all__ = [
    "check_extension",
    "env",
    "extension_available",
    "gloo_built",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

_Item = TypeVar("_Item")
_MODULES = {"pytorch": "torch"}


def _cache(function: Callable[[], Any]) -> Callable[[], Any]:
    return functools.cache(function)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework, such as "torch", is installed: nothing is built for it."""
    return importlib.util.find_spec(_MODULES.get(ext_base_name, ext_base_name)) is not None


def check_extension(ext_name: str, *_: object) -> None:
    """Raise ImportError if the framework of ``horovod.torch``, say, is not installed."""
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"{ext_name} needs {framework}, which is not installed")


def gloo_built(verbose: bool = False) -> bool:
    """Return True; see `basics.gloo_enabled`."""
    return basics.gloo_built()


def mpi_built(verbose: bool = False) -> bool:
    """Return False."""
    return basics.mpi_built()


def nccl_built(verbose: bool = False) -> bool:
    """Return whether there is an NCCL or RCCL in use."""
    return basics.nccl_built() > 0


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """Set environment variables for a while; None leaves one as it is."""
    return config.environment({name: text for name, text in kwargs.items() if text is not None})


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether it is 1, 2, 4, 8, ..."""
    return num_rank.bit_count() == 1


def split_list(items: Sequence[_Item], n: int) -> list[Sequence[_Item]]:
    """Return n parts, the first of which are longer by one if need be."""
    length, longer = divmod(len(items), n)
    ends = [place * length + min(place, longer) for place in range(n + 1)]
    return [items[ends[place] : ends[place + 1]] for place in range(n)]


def is_iterable(x: object) -> bool:
    """Return whether one can iterate over x."""
    return isinstance(x, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version, such as ``tf.__version__``, is at least that of `target`."""
    for version in (ver, target):
        if not isinstance(version, str):
            raise ValueError(f"versions are str, as '2.6.0'; got {version!r}")
    if target.count(".") != 2:
        raise ValueError(f"a version to compare with has three parts, as '2.6.0'; got {target!r}")

    def numbers(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)[:3]]

    return numbers(ver) >= numbers(target)
