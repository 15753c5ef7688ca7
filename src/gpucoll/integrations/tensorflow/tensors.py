"""Tensors of a kernel as NumPy arrays: views of TensorFlow's memory."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gpucoll.arrays.numpy_arrays import array_at
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
    return array_at(api.TensorData(tensor), shape, _dtype(api.TensorType(tensor)))


def output(
    context: int, index: int, shape: Sequence[int], dtype: np.dtype[Any], status: Status
) -> tuple[int, np.ndarray[Any, Any]]:
    """Allocate an output of a kernel; return its TF_Tensor, and the array that it holds."""
    n_dims = len(shape)
    size_bytes = math.prod(shape) * dtype.itemsize
    tensor = api.AllocateOutput(
        context,
        index,
        dtype_number(dtype),
        (ctypes.c_int64 * n_dims)(*shape),
        n_dims,
        size_bytes,
        status.address,
    )
    if tensor is None:
        status.check()
    return tensor, array_at(api.TensorData(tensor), shape, dtype)
