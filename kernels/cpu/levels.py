"""Levels of processors for which machine code is made before it is known where it will run.

A level is a set of features that many processors share: those of x86-64 are what its psABI calls
microarchitecture levels. Imports no compiler.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from gpucoll.kernels.cpu.cache_key import processor

__all__ = ["LEVELS", "Level", "levels_here", "of_this_machine"]

_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class Level(NamedTuple):
    """Processors that have at least these features.

    Attributes
    ----------
    name : str
    machine : str
        Their family, as `os.uname` calls it.
    needs : frozenset of str
        The features, as Linux calls them in ``/proc/cpuinfo``.
    llvm_name, llvm_features : str
        The processor for which LLVM then makes code.
    """

    name: str
    machine: str
    needs: frozenset[str]
    llvm_name: str
    llvm_features: str = ""

    @property
    def features(self) -> frozenset[str]:
        """The features that kernels ask for, as LLVM calls them; x86 has one name for each."""
        return self.needs | frozenset(self.llvm_features.replace("+", "").split(","))


LEVELS = (
    Level("x86-64-v2", "x86_64", _V2, "x86-64-v2"),
    Level("x86-64-v3", "x86_64", _V3, "x86-64-v3"),
    Level("x86-64-v4", "x86_64", _V4, "x86-64-v4"),
    Level("arm64", "aarch64", frozenset({"fp", "asimd"}), "generic", "+neon"),
)
"""All levels; of one family the lowest first."""


def of_this_machine() -> list[Level]:
    """Return the levels of this processor's family, also those that it does not reach."""
    return [level for level in LEVELS if level.machine == os.uname().machine]


def levels_here(about: str | None = None) -> list[Level]:
    """Return the levels whose code this processor can run, the best first.

    Parameters
    ----------
    about : str, optional
        What `processor` says of another one.
    """
    machine, *lines = (processor() if about is None else about).splitlines()
    has: set[str] = set()
    for line in lines:
        name, _, value = line.partition("=")
        if name.lower() in ("flags", "features"):
            has.update(value.split())
    fitting = [level for level in LEVELS if level.machine == machine and level.needs <= has]
    return fitting[::-1]
