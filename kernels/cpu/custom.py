"""Kernels of a user's operation: reduce and scan kernels around a function that Numba compiles.

They take the arguments of `gpucoll.kernels.cpu.reduce`, but count elements for complex dtypes, too,
and ignore the parameter and the prefetch distance. Each block of elements is combined, in rank
order, in an accumulator on the stack, so that LLVM can vectorise simple functions. A block's
destinations are written after its sources have been read: they may be the same.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
from numba import types

from gpucoll.blocks import Words
from gpucoll.errors import ArgumentTypeError
from gpucoll.function_digest import function_digest
from gpucoll.kernels.cpu import block_types  # noqa: F401 (by which Numba knows Words)
from gpucoll.kernels.cpu.cast import (
    accumulator_dtype,
    accumulator_of,
    convert_to,
    load_element,
    scratch_of,
    store_element,
)
from gpucoll.kernels.cpu.jit import NumbaFunction, NumbaType, inline_typed
from gpucoll.types import ReduceOp

BLOCK = 256
_WIDEST_BYTES = 16
_KEPT = 256
"""How many kernels are kept; some programs make a new function for every call."""
_SIGNATURE = types.void(*[types.int64] * 7)
_compile_lock = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    """Machine code that lives as long as its owner."""

    address: int
    owner: Any


@dataclass(frozen=True)
class _Pieces:
    """The parts of the kernels of one function and dtype; all but `scratch` work on a block."""

    scratch: Any
    begin: Any
    combine: Any
    give: Any
    give_and_combine: Any


@functools.lru_cache(maxsize=_KEPT)
def _pieces(op: ReduceOp, dtype: str) -> _Pieces:
    function = checked_function(op, dtype)
    load, store = load_element(dtype), store_element(dtype)
    held = accumulator_dtype(dtype)
    get_total, put_total = load_element(held), store_element(held)
    convert = convert_to(accumulator_of(dtype))

    @inline_typed
    def begin(total, source, first, size):
        for place in range(size):
            put_total(total, place, load(source, first + place))

    @inline_typed
    def combine(total, source, first, size):
        for place in range(size):
            value = function(get_total(total, place), load(source, first + place))
            put_total(total, place, convert(value))

    @inline_typed
    def give(total, destination, first, size):
        for place in range(size):
            store(destination, first + place, get_total(total, place))

    @inline_typed
    def give_and_combine(total, destination, source, first, size):
        for place in range(size):
            before, loaded = get_total(total, place), load(source, first + place)
            store(destination, first + place, before)  # loaded first: it may be the same place
            put_total(total, place, convert(function(before, loaded)))

    return _Pieces(scratch_of(BLOCK * _WIDEST_BYTES), begin, combine, give, give_and_combine)


def _reduce(pieces: _Pieces) -> Callable[..., None]:
    scratch, begin, combine, give = pieces.scratch, pieces.begin, pieces.combine, pieces.give

    def kernel(destinations, n_destinations, sources, n_sources, count, parameter, prefetch_bytes):
        total = scratch()
        for first in range(0, count, BLOCK):
            size = min(BLOCK, count - first)
            begin(total, Words(sources)[0], first, size)
            for place in range(1, n_sources):
                combine(total, Words(sources)[place], first, size)
            for place in range(n_destinations):
                give(total, Words(destinations)[place], first, size)

    return kernel


def _scan(pieces: _Pieces) -> Callable[..., None]:
    scratch, begin, combine, give = pieces.scratch, pieces.begin, pieces.combine, pieces.give

    def kernel(destinations, n_destinations, sources, n_sources, count, parameter, prefetch_bytes):
        total = scratch()
        for first in range(0, count, BLOCK):
            size = min(BLOCK, count - first)
            begin(total, Words(sources)[0], first, size)
            give(total, Words(destinations)[0], first, size)
            for place in range(1, n_sources):
                combine(total, Words(sources)[place], first, size)
                give(total, Words(destinations)[place], first, size)

    return kernel


def _exclusive_scan(pieces: _Pieces) -> Callable[..., None]:
    scratch, begin, give_and_combine = pieces.scratch, pieces.begin, pieces.give_and_combine

    def kernel(destinations, n_destinations, sources, n_sources, count, parameter, prefetch_bytes):
        total = scratch()
        for first in range(0, count, BLOCK):
            size = min(BLOCK, count - first)
            begin(total, Words(sources)[0], first, size)
            for place in range(1, n_sources):
                destination, source = Words(destinations)[place], Words(sources)[place]
                give_and_combine(total, destination, source, first, size)

    return kernel


_MAKERS = {"reduce": _reduce, "scan": _scan, "exclusive_scan": _exclusive_scan}


@functools.lru_cache(maxsize=_KEPT)
def custom_kernel(op: ReduceOp, dtype: str, which: str = "reduce") -> Kernel:
    """Return a kernel of this dtype and operation, compiled on first need.

    Cost: 0.3 to 1 s once per process.

    Parameters
    ----------
    op : ReduceOp
        An op of `ReduceOp.custom`.
    dtype : str
        One of `gpucoll.types.DTYPES`.
    which : str
        "reduce", "scan" or "exclusive_scan".

    Raises
    ------
    ArgumentTypeError
        The function cannot be compiled for this dtype, returns another type, or can raise.
    """
    with _compile_lock:
        kernel = _MAKERS[which](_pieces(op, dtype))
        made = numba.cfunc(_SIGNATURE, error_model="numpy")(kernel)
    _check_quiet(made.inspect_llvm(), f"{op} of {dtype}")
    return Kernel(made.address, made)


def _check_quiet(text: str, where: str) -> None:
    """Refuse machine code that could raise an exception or call Python, judged by its LLVM IR."""
    keeps_exceptions = ".picklebuf" in text
    calls_python = text.count("call void @numba_gil_ensure(") > 1  # every C function has one
    if keeps_exceptions or calls_python:
        raise ArgumentTypeError(
            f"{where}: its function can raise an exception (also for lack of memory) or needs "
            "Python (print), but a collective cannot stop in the middle; functions that divide "
            'can be compiled by numba.njit(error_model="numpy")'
        )


def checked_function(op: ReduceOp, dtype: str) -> NumbaFunction:
    """Return the function compiled for the dtype's accumulator; refuse unusable functions."""
    if function_digest(op.function, op.identity, op.commutative) != op.digest:
        raise ArgumentTypeError(
            f"{op}: values that its function uses have changed since ReduceOp.custom: make a new op"
        )
    assert op.function is not None
    kind, function = accumulator_of(dtype), inline_typed(op.function)
    try:
        function.get_call_template((kind, kind), {})
    except Exception as error:
        raise ArgumentTypeError(
            f"{op} of {dtype}: Numba cannot compile it for two values of {kind}: {gist(error)}"
        ) from None
    (compiled,) = function.overloads.values()
    result = types.unliteral(compiled.signature.return_type)
    if not _narrows(result, kind):
        hint = ""
        if kind == types.uint64 and isinstance(result, types.Float):
            hint = " (some versions of Numba do, for uint64 and int: write numpy.uint64(10) for 10)"
        raise ArgumentTypeError(
            f"{op} of {dtype}: for two values of {kind} its function returns {result}, which "
            f"cannot be combined with the next rank's{hint}"
        )
    return function


def _narrows(result: NumbaType, kind: NumbaType) -> bool:
    """Return whether a result has the accumulator's kind, of any width, or is a bool."""
    if isinstance(result, types.Boolean):
        return True
    if isinstance(kind, types.Boolean | types.Integer):
        return isinstance(result, types.Integer)
    return isinstance(result, types.Float) or (
        isinstance(kind, types.Complex) and isinstance(result, types.Complex)
    )


def gist(error: Exception) -> str:
    """Return the line or two of Numba's message that state the problem."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).replace("Raised from None", "")
    noise = ("Failed in ", "During: ", "File ", "<source missing", "- Resolution failure", "def ")
    lines = [line.strip() for line in text.splitlines()]
    useful = [line for line in lines if line and not line.startswith(noise)]
    if not useful:
        return type(error).__name__
    call = next((line for line in useful[1:3] if line.startswith(">>>")), "")
    return f"{useful[0]} {call.removeprefix('>>>').strip()}".strip()
