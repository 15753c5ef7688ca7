"""Reductions and scans in plain, slow NumPy: the reference for every kernel.

Sources are combined left to right. Half types are accumulated in float32 and rounded once. Integers
wrap; their average rounds toward zero. For bool, sum is lor and prod is land. min and max propagate
NaN, and take the left one of two equal values (0.0 and -0.0). NaN payloads are exempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
"""Numbers of any dtype: np.generic has no arithmetic."""


def reduce(op: str, sources: Sequence[Array], parameter: float = 1) -> Array:
    """Return ``sources[0] op sources[1] op ...``, as a new array of their dtype and shape.

    Parameters
    ----------
    op : str
        A name of `gpucoll.types.OPERATIONS`.
    sources : sequence of ndarray
        At least one, all of one shape and dtype (one of `gpucoll.types.DTYPES`, including those of
        ml_dtypes, which need not be imported here).
    parameter : float
        The factor of ``scaled_sum``, or the divisor of ``avg``.
    """
    dtype = sources[0].dtype
    kind = _kind(dtype)
    with np.errstate(all="ignore"):
        accumulator = np.dtype(np.float32) if kind == "f" and dtype.itemsize < 4 else dtype
        held: list[Array] = [
            _prepare(op, kind, np.array(source, accumulator), parameter) for source in sources
        ]
        total = held[0]
        for value in held[1:]:
            total = _COMBINE[op](kind, total, value)
        if op == "avg":
            total = _divide(kind, total, parameter)
        return np.asarray(total).astype(dtype).reshape(sources[0].shape)


def scan(op: str, sources: Sequence[Array], parameter: float = 1) -> list[Array]:
    """Return ``sources[0] op ... op sources[i]`` for every i; ``avg`` divides by ``i + 1``.

    The parameters are those of `reduce`. Each result is rounded separately.
    """
    prefixes = [sources[:count] for count in range(1, len(sources) + 1)]
    return [reduce(op, prefix, len(prefix) if op == "avg" else parameter) for prefix in prefixes]


def exclusive_scan(op: str, sources: Sequence[Array], parameter: float = 1) -> list[Array]:
    """Return ``sources[0] op ... op sources[i-1]`` for every i; for the first, the identity."""
    first = np.empty_like(sources[0])
    first[...] = identity(op, first.dtype)
    return [first, *scan(op, sources[:-1], parameter)]


def identity(op: str, dtype: np.dtype[np.generic]) -> Array:
    """Return the op's identity, with shape (); ``avg`` has none."""
    if op in ("min", "max"):
        return _greatest_value(dtype) if op == "min" else _least_value(dtype)
    zero = np.zeros((), dtype)
    if op == "band":
        return np.asarray(~zero)
    return np.ones((), dtype) if op in ("prod", "land") else zero


def _greatest_value(dtype: np.dtype[np.generic]) -> Array:
    values = _values(dtype)
    with np.errstate(invalid="ignore"):
        return np.asarray(values[np.nanargmax(values.astype(np.float64))])


def _least_value(dtype: np.dtype[np.generic]) -> Array:
    values = _values(dtype)
    with np.errstate(invalid="ignore"):
        return np.asarray(values[np.nanargmin(values.astype(np.float64))])


def _values(dtype: np.dtype[np.generic]) -> Array:
    """Return all values of a narrow dtype, or the smallest and greatest of a wide one."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype.str)
        return np.array([limits.min, limits.max], dtype)
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.itemsize > 2:
        return np.array([-np.inf, np.inf], dtype)
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)


def _kind(dtype: np.dtype[np.generic]) -> str:
    """Return b, i, u, f or c. Dtypes of ml_dtypes have the kind void, but are floats."""
    return "f" if dtype.name.startswith(("bfloat", "float")) else dtype.kind


def _prepare(op: str, kind: str, x: Array, parameter: float) -> Array:
    if op in ("land", "lor", "lxor"):
        return np.asarray(x != 0).astype(x.dtype)
    if op == "scaled_sum":
        return _scale(kind, x, parameter)
    return x


def _real_parts(x: Array) -> Array:
    """Return a complex array's real and imaginary parts in turn, as a view."""
    return np.ascontiguousarray(x).reshape(-1).view(x.real.dtype)


def _scale(kind: str, x: Array, factor: float) -> Array:
    if kind == "c":
        parts = _real_parts(x)
        scaled: Array = (parts * parts.dtype.type(factor)).view(x.dtype).reshape(x.shape)
        return scaled
    return np.asarray(x * x.dtype.type(factor))


def _divide(kind: str, x: Array, divisor: float) -> Array:
    if kind == "c":
        parts = _real_parts(x)
        divided: Array = (parts / parts.dtype.type(divisor)).view(x.dtype).reshape(x.shape)
        return divided
    if kind == "f":
        return np.asarray(x / x.dtype.type(divisor))
    count = x.dtype.type(divisor)
    floor = x // count
    is_one_too_low = (x < 0) & (floor * count != x)
    return np.asarray(floor + is_one_too_low.astype(x.dtype))


def _add(kind: str, x: Array, y: Array) -> Array:
    return np.asarray(x | y if kind == "b" else x + y)


def _multiply(kind: str, x: Array, y: Array) -> Array:
    if kind == "b":
        return np.asarray(x & y)
    if kind != "c":
        return np.asarray(x * y)
    # By parts: NumPy's own product may round a multiplication and an addition together.
    product = np.empty_like(x)
    product.real = x.real * y.real - x.imag * y.imag
    product.imag = x.real * y.imag + x.imag * y.real
    return product


def _least(kind: str, x: Array, y: Array) -> Array:
    return np.where((x <= y) | (x != x), x, y)


def _greatest(kind: str, x: Array, y: Array) -> Array:
    return np.where((x >= y) | (x != x), x, y)


def _logical_xor(kind: str, x: Array, y: Array) -> Array:
    return np.asarray((x != 0) != (y != 0)).astype(x.dtype)


_COMBINE: dict[str, Callable[[str, Array, Array], Array]] = {
    "sum": _add,
    "avg": _add,
    "scaled_sum": _add,
    "prod": _multiply,
    "min": _least,
    "max": _greatest,
    "band": lambda kind, x, y: np.asarray(x & y),
    "bor": lambda kind, x, y: np.asarray(x | y),
    "bxor": lambda kind, x, y: np.asarray(x ^ y),
    "land": lambda kind, x, y: np.asarray((x != 0) & (y != 0)).astype(x.dtype),
    "lor": lambda kind, x, y: np.asarray((x != 0) | (y != 0)).astype(x.dtype),
    "lxor": _logical_xor,
}
