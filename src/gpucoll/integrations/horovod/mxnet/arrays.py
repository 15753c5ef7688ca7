"""MXNet's arrays as NumPy sees them, without a copy, and MXNet's functions that wait for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.ndarray.sparse import BaseSparseNDArray

__all__ = ["copy_of", "empty_like", "view"]

_VIEWS_KEPT = 4096
_views: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}
_address = ctypes.c_void_p()


def view(tensor: mx.nd.NDArray) -> np.ndarray[Any, Any]:
    """Return the memory of an array on the host; nothing may be pending that writes it.

    Raises
    ------
    TypeError
        The array is sparse, or in a GPU's memory.
    """
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(tensor.handle, ctypes.byref(address)))
    what = address.value, tensor.shape, tensor.dtype
    found = _views.get(what)  # a view only says where, so that it never becomes wrong
    if found is None:
        found = _new_view(tensor, *what)
        if len(_views) >= _VIEWS_KEPT:
            _views.clear()
        _views[what] = found
    return found


def _new_view(
    tensor: mx.nd.NDArray, address: int | None, shape: tuple[int, ...], dtype: Any
) -> np.ndarray[Any, Any]:
    check(tensor)
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, (ctypes.c_char * size).from_address(address))


def check(tensor: Any) -> None:
    """Raise a TypeError for what is no dense array on the host."""
    if not isinstance(tensor, mx.nd.NDArray):
        raise TypeError(f"expected an NDArray of MXNet, not {type(tensor).__name__}")
    if isinstance(tensor, BaseSparseNDArray):
        raise TypeError(f"expected a dense NDArray, not {tensor.stype}: use tostype('default')")
    if not tensor.context.device_type.startswith("cpu"):
        raise TypeError(f"expected an NDArray on the CPU, not on {tensor.context}: copy it there")


def empty_like(tensor: mx.nd.NDArray, shape: Sequence[int]) -> mx.nd.NDArray:
    """Return a new array of the kind, element type and context of another."""
    module = mx.np if isinstance(tensor, mx.np.ndarray) else mx.nd
    return module.empty(tuple(shape), dtype=tensor.dtype, ctx=tensor.context)


def copy_of(result: np.ndarray[Any, Any], like: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return an array of MXNet with the elements of one of NumPy."""
    made = empty_like(like, result.shape)
    view(made)[...] = result
    return made
