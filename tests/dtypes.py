"""Every (dtype, operation) that reductions work on, and inputs whose results are exact."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") and the float8 ones known)
import numpy as np

from gpucoll.errors import ArgumentTypeError
from gpucoll.types import DTYPES, OPERATIONS, ReduceOp

FACTOR = 2.0
HALF_TYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def dtype_of(name: str) -> np.dtype:
    """Return the NumPy dtype of this name."""
    return np.dtype(name)


def op_of(name: str) -> str | ReduceOp:
    """Return what a user would pass for the operation."""
    return ReduceOp.scaled_sum(FACTOR) if name == "scaled_sum" else name


def is_allowed(dtype: str, op: str) -> bool:
    """Return whether the operation is defined for the dtype."""
    try:
        ReduceOp.parse(op_of(op)).check_dtype(dtype)
    except ArgumentTypeError:
        return False
    return True


ALLOWED = [(dtype, op) for dtype in DTYPES for op in OPERATIONS if is_allowed(dtype, op)]
REFUSED = [(dtype, op) for dtype in DTYPES for op in OPERATIONS if not is_allowed(dtype, op)]


def covering(step: int = 3) -> list[tuple[str, str]]:
    """Return pairs that hold every dtype and every operation, and a `step`-th of all others."""
    chosen = {pair for place, pair in enumerate(ALLOWED) if place % step == 0}
    chosen |= {(dtype, "sum") for dtype in DTYPES}
    chosen |= {("float32", op) for op in OPERATIONS if is_allowed("float32", op)}
    chosen |= {("int32", op) for op in OPERATIONS if is_allowed("int32", op)}
    return [pair for pair in ALLOWED if pair in chosen]


def any_values(dtype: str, count: int, seed: int) -> np.ndarray:
    """Return random bit patterns, as values: NaN, infinities, subnormals, everything."""
    generator = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if dtype == "bool":
        return generator.integers(0, 2, count).astype(bool)
    data = generator.integers(0, 256, count * kind.itemsize, np.uint8)
    return data.view(kind)


def small_values(dtype: str, count: int, seed: int) -> np.ndarray:
    """Return small whole numbers: sums of a few ranks are exact in every dtype."""
    generator = np.random.default_rng(seed)
    low = 0 if dtype.startswith("u") or dtype == "bool" else -2
    values = generator.integers(low, 3, count)
    if dtype == "bool":
        return values.astype(bool)
    if dtype.startswith("complex"):
        return (values + 1j * generator.integers(-2, 3, count)).astype(dtype)
    return values.astype(np.float32).astype(np.dtype(dtype))


def bits(array: np.ndarray) -> np.ndarray:
    """Return the array's bits as unsigned integers, every NaN as the same one."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if array.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    raw = flat.view(f"u{flat.dtype.itemsize}").copy()
    if flat.dtype.name.startswith(("float", "bfloat")):
        with np.errstate(invalid="ignore"):
            is_nan = np.isnan(flat.astype(np.float64))
        raw[is_nan] = np.iinfo(raw.dtype).max
    return raw


def assert_same(got: np.ndarray, expected: np.ndarray, where: object = "") -> None:
    """Compare dtype, shape and bits; NaN payloads are exempt."""
    assert got.dtype == expected.dtype, f"{where}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{where}: shape {got.shape}, expected {expected.shape}"
    wrong = np.flatnonzero(bits(got) != bits(expected))
    if wrong.size:
        parts = wrong.size, wrong[0], bits(got)[wrong[0]], bits(expected)[wrong[0]]
        raise AssertionError(
            "{}: {} wrong, first at {}: bits {:#x}, expected {:#x}".format(where, *parts)
        )
