"""Collectives inside functions that XLA compiles (``jit_compile=True``), as custom calls."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_bool, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from gpucoll.errors import ArgumentError, BackendUnavailableError
from gpucoll.integrations.tensorflow import c_api, tensors
from gpucoll.integrations.tensorflow.call_sites import CallSite, as_operation_error

__all__ = ["OP", "emit", "is_compiled_here", "site_of_call"]

OP = "XlaCustomCallV2"
TARGET = "gpucoll_call"
_REGISTER = (
    "_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_string"
    "IcSt11char_traitsIcESaIcEEEPvS8_"
)
_REGISTRY = "_ZN3xla24CustomCallTargetRegistry6GlobalEv"


@dataclass(frozen=True)
class _Place:
    """A custom call in a program: XLA gives its addresses, and no more than that."""

    site: CallSite
    dtypes: list[np.dtype[Any]]
    shapes: list[list[int]]
    result_shapes: list[list[int]]
    is_list: bool


class _Text(Structure):
    """A std::string of libstdc++, which TensorFlow's wheels for Linux are built with."""

    _fields_ = (("data", c_void_p), ("length", c_size_t), ("capacity", c_size_t * 2))


class _Failure(Structure):
    """An XlaCustomCallStatus: an optional std::string."""

    _fields_ = (("text", _Text), ("is_set", c_bool))


_TARGET = CFUNCTYPE(
    None, POINTER(c_void_p), POINTER(c_void_p), c_void_p, c_size_t, POINTER(_Failure)
)
_places: dict[int, _Place] = {}
_keys = itertools.count(1)
_malloc = ctypes.CFUNCTYPE(c_void_p, c_size_t)(("malloc", ctypes.CDLL(None)))


def is_compiled_here() -> bool:
    """Return whether the function that is traced now will be compiled by XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()))


def emit(site: CallSite, xs: Sequence[Any], *, is_list: bool) -> list[Any]:
    """Add a custom call to the traced function, and return its results.

    XLA runs custom calls in any order, and two at once, unless one needs what the other gives. So
    each takes the value of the communicator's variable, and gives the next one: XLA carries the
    values of variables through loops and branches.
    """
    _register()
    name = site.collective.spelled
    if site.exchanges_counts:
        raise ArgumentError(
            f"{name}: XLA needs to know the shape of the result; with jit_compile=True pass the "
            "counts as numbers"
        )
    if not all(x.shape.is_fully_defined() for x in xs):
        raise ArgumentError(
            f"{name}: with jit_compile=True the shapes must be known when the function is traced; "
            f"got {[x.shape for x in xs]}"
        )
    shapes = [x.shape.as_list() for x in xs]
    results = [list(site.result_shape(x, site.counts)) for x in shapes]
    dtypes = [np.dtype(x.dtype.as_numpy_dtype) for x in xs]
    key = next(_keys)
    _places[key] = _Place(site, dtypes, shapes, results, is_list)
    token = site.variable.read_value()
    after, *ys = gen_xla_ops.xla_custom_call_v2(
        [token, *xs],
        TARGET,
        str(key),
        True,  # it has effects
        [tf.float32, *(x.dtype for x in xs)],
        [[], *results],
    )
    after.set_shape([])
    site.variable.assign(after)
    for y, shape in zip(ys, results, strict=True):
        y.set_shape(shape)
    return list(ys)


def site_of_call(op: Any) -> tuple[CallSite, bool] | None:
    """Return the site of a custom call, and whether it is of a list; None if it is not ours."""
    if op.get_attr("call_target_name") != TARGET.encode():
        return None
    place = _places[int(op.get_attr("backend_config"))]
    return place.site, place.is_list


@functools.cache
def _register() -> None:
    """Make the target known to XLA."""
    try:
        register = c_api.symbol(_REGISTER)
        registry = c_api.symbol(_REGISTRY)
    except AttributeError:
        raise BackendUnavailableError(
            f"TensorFlow {tf.__version__} does not let gpucoll's collectives into functions that "
            "XLA compiles (its library has no CustomCallTargetRegistry): leave out jit_compile=True"
        ) from None
    register.argtypes, register.restype = (c_void_p, c_void_p, c_void_p, c_void_p), None
    registry.argtypes, registry.restype = (), c_void_p
    texts = [ctypes.create_string_buffer(x) for x in (TARGET.encode(), b"Host")]
    # XLA copies both strings. They are longer than what a std::string holds in itself, or say so.
    name, platform = (
        _Text(ctypes.addressof(x), len(x) - 1, (c_size_t * 2)(len(x) - 1, 0)) for x in texts
    )
    address = ctypes.cast(_run, c_void_p)
    register(registry(), ctypes.addressof(name), address, ctypes.addressof(platform))


@_TARGET
def _run(outputs: Any, inputs: Any, text: int, length: int, status: Any) -> None:
    try:
        place = _places[int(ctypes.string_at(text, length))]
        # A call with one result gets its address; with several, that of their addresses.
        ctypes.memmove(outputs[0] if place.shapes else outputs, inputs[0], 4)
        both = zip(place.dtypes, place.shapes, strict=True)
        xs = [tensors.array_at(inputs[i], shape, dtype) for i, (dtype, shape) in enumerate(both, 1)]
        both = zip(place.dtypes, place.result_shapes, strict=True)
        ys = [
            tensors.array_at(outputs[i], shape, dtype) for i, (dtype, shape) in enumerate(both, 1)
        ]
        if not xs:
            place.site.comm.barrier()
        elif place.is_list:
            place.site.run_list(xs, ys)
        else:
            place.site.run(xs[0], ys[0], place.site.counts)
    except Exception as e:
        _fail(status.contents, as_operation_error(e).message)
    except BaseException as e:
        _fail(status.contents, repr(e))


def _fail(status: _Failure, message: str) -> None:
    """Write an error, as C++ does: XLA frees the text."""
    text = message.encode()
    data = _malloc(len(text) + 1)
    ctypes.memmove(data, text + b"\0", len(text) + 1)
    status.text.data, status.text.length = data, len(text)
    status.text.capacity[0] = len(text)
    status.is_set = True
