"""MXNet's arrays as NumPy sees them, without a copy, and MXNet's functions that wait for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from gpucoll.arrays.numpy_arrays import array_at

__all__ = ["copy_of", "empty_like", "view"]

_DENSE = (mx.nd.NDArray, mx.np.ndarray)
_VIEWS_KEPT = 4096
_views: dict[tuple[Any, ...], np.ndarray[Any, Any]] = {}

_library = ctypes.PyDLL(None, handle=_LIB._handle)
_get_data, _get_shape = _library.MXNDArrayGetData, _library.MXNDArrayGetShapeEx64
_get_dtype = _library.MXNDArrayGetDType
_Sizes = ctypes.POINTER(ctypes.c_int64)


def check(tensor: Any) -> None:
    """Raise a TypeError for what is no dense array."""
    if type(tensor) in _DENSE:
        return
    if not isinstance(tensor, mx.nd.NDArray):
        raise TypeError(f"expected an NDArray of MXNet, not {type(tensor).__name__}")
    if tensor.stype != "default":
        raise TypeError(f"expected a dense NDArray, not {tensor.stype}: use tostype('default')")


def address_of(tensor: mx.nd.NDArray) -> int | None:
    """Return where the elements of an array are."""
    word = ctypes.c_void_p()
    if failed := _get_data(tensor.handle, ctypes.byref(word)):
        check_call(failed)
    return word.value


def view(tensor: mx.nd.NDArray) -> np.ndarray[Any, Any]:
    """Return the memory of a dense array; nothing may be pending that writes it.

    Raises
    ------
    TypeError
        The array is in a GPU's memory.
    """
    handle, word, n, sizes = tensor.handle, ctypes.c_void_p(), ctypes.c_int(), _Sizes()
    failed = _get_data(handle, ctypes.byref(word))
    failed = failed or _get_shape(handle, ctypes.byref(n), ctypes.byref(sizes))
    shape = tuple(sizes[: n.value])
    failed = failed or _get_dtype(handle, ctypes.byref(n))
    check_call(failed)
    what = word.value, shape, n.value
    found = _views.get(what)  # a view only says where: it never becomes wrong
    if found is None:
        if not tensor.context.device_type.startswith("cpu"):
            raise TypeError(f"expected an NDArray on the CPU, not on {tensor.context}")
        if len(_views) >= _VIEWS_KEPT:
            _views.clear()
        found = _views[what] = array_at(word.value, shape, np.dtype(tensor.dtype))
    return found


def empty_like(tensor: mx.nd.NDArray, shape: Sequence[int]) -> mx.nd.NDArray:
    """Return a new array of the kind, element type and context of another."""
    module = mx.np if isinstance(tensor, mx.np.ndarray) else mx.nd
    return module.empty(tuple(shape), dtype=tensor.dtype, ctx=tensor.context)


def copy_of(result: np.ndarray[Any, Any], like: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return an array of MXNet with the elements of one of NumPy."""
    made = empty_like(like, result.shape)
    view(made)[...] = result
    return made
