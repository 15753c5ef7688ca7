"""Adding up scaled arrays, and narrowing the result. Imports no compiler by itself."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gpucoll.kernels.cpu.addresses import add_scaled_kernel, convert_kernel

__all__ = ["add_scaled", "narrow"]


@functools.cache
def _callable(address: int) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address)


def add_scaled(
    total: npt.NDArray[np.generic], source: int, dtype: str, factor: float, *, is_first: bool
) -> None:
    """Add ``factor * source`` to an array, or write it there. Releases the GIL.

    Parameters
    ----------
    total : ndarray
        C-contiguous, of float32; of float64 if the source is.
    source : int
        Address of as many elements.
    dtype : str
        The source's: float16, bfloat16, float32 or float64. Half types are widened first.
    factor : float
        Rounded to total's dtype. Product and sum are rounded separately, as in NumPy.
    is_first : bool
        Write the products, and do not read what is there.
    """
    to = total.dtype.name
    kernel = convert_kernel(dtype, to, True) if is_first else add_scaled_kernel(dtype, to)
    held = np.array(factor, total.dtype)
    _callable(kernel)(total.ctypes.data, source, total.size, held.ctypes.data)


def narrow(source: npt.NDArray[np.generic], destination: int, dtype: str) -> None:
    """Write float32 numbers as a half type to an address. Releases the GIL."""
    kernel = _callable(convert_kernel("float32", dtype))
    kernel(destination, source.ctypes.data, source.size, 0)
