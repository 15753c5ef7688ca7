"""Numba, set up for loops that other code calls by address."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core import sigutils

from gpucoll.kernels.cpu.loop_cache import CachedLoop

CompiledLoop = Any  # numba.core.ccallback.CFunc: has .address and, for calls from Python, .ctypes

inline_typed = functools.partial(
    numba.njit, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""Decorator of a function that compiled code calls, with arguments of any type; LLVM inlines it."""


def inline(function: Callable[..., Any]) -> Any:
    """Decorate a function of the compiled loops: as `inline_typed`, but every argument is an int64.

    Numba by itself compiles it anew for each constant that it is called with, and for bools: of all
    loops' 23 s of compiling 7 s went there (one core, 2026-11-21). LLVM sees the constants anyway.
    """
    dispatcher = inline_typed(function)
    template_for = dispatcher.get_call_template

    def template_for_words(arguments: tuple[Any, ...], keywords: Any) -> Any:
        return template_for((types.int64,) * len(arguments), keywords)

    dispatcher.get_call_template = template_for_words
    return dispatcher


def compiled(signature: Any) -> Callable[[Callable[..., Any]], CompiledLoop]:
    """Compile the decorated function to a C function of `signature`, or load it from the cache."""

    def decorate(function: Callable[..., Any]) -> CompiledLoop:
        options = {"error_model": "numpy"}
        loop = CachedLoop(function, sigutils.normalize_signature(signature), {}, options)
        loop.enable_caching()
        loop.compile()
        return loop

    return decorate
