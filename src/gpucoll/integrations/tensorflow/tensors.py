"""Tensors of a kernel as NumPy arrays: views of TensorFlow's memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gpucoll.integrations.tensorflow.c_api import Status, api

__all__ = ["dtype_number", "output", "view"]


@functools.cache
def _dtype(number: int) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(tf.dtypes.as_dtype(number).as_numpy_dtype)
    return dtype


@functools.cache
def dtype_number(dtype: np.dtype[Any]) -> int:
    """Return TensorFlow's number of a dtype."""
    return int(tf.dtypes.as_dtype(dtype).as_datatype_enum)


def view(tensor: int) -> np.ndarray[Any, Any]:
    """Return the array that a TF_Tensor holds; it lives as long as the TF_Tensor does."""
    shape = [api.Dim(tensor, axis) for axis in range(api.NumDims(tensor))]
    dtype, size_bytes = _dtype(api.TensorType(tensor)), api.TensorByteSize(tensor)
    if size_bytes == 0:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * size_bytes).from_address(api.TensorData(tensor))
    return np.ndarray(shape, dtype, memory)


def output(
    context: int, index: int, shape: Sequence[int], dtype: np.dtype[Any], status: Status
) -> int:
    """Allocate an output of a kernel; return its TF_Tensor."""
    dims = (ctypes.c_int64 * len(shape))(*shape)
    size_bytes = dtype.itemsize
    for length in shape:
        size_bytes *= length
    tensor = api.AllocateOutput(
        context, index, dtype_number(dtype), dims, len(shape), size_bytes, status.address
    )
    status.check()
    return int(tensor)
