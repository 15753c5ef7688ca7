"""The dtypes that are converted into each other while data moves, on the host and on GPUs."""

from __future__ import annotations

from gpucoll.errors import ArgumentTypeError

CONVERTIBLE = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""They convert into each other; a dtype's index is its number in ``pack.cu``."""


def check_conversion(source_dtype: str, dtype: str, scale: float | None) -> None:
    """Raise ArgumentTypeError unless elements can be converted so, with or without a scale."""
    if source_dtype == dtype and (scale is None or dtype == "float64"):
        return
    if source_dtype not in CONVERTIBLE or dtype not in CONVERTIBLE:
        scaled = "" if scale is None else " with a scale"
        raise ArgumentTypeError(
            f"{source_dtype} cannot be converted to {dtype}{scaled}: only "
            f"{', '.join(CONVERTIBLE)} convert into each other"
        )
