"""Collectives inside functions that XLA compiles (``jit_compile=True``), as custom calls."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

from gpucoll.arrays.numpy_arrays import array_at
from gpucoll.entries.native import Site
from gpucoll.errors import ArgumentError, BackendUnavailableError
from gpucoll.integrations.tensorflow import c_api
from gpucoll.integrations.tensorflow.call_sites import CallSite
from gpucoll.integrations.tensorflow.compiled.kernels import Place, PlacedArray, custom_call
from gpucoll.integrations.tensorflow.operations import address_of

__all__ = ["OP", "emit", "is_compiled_here", "site_of_call"]

OP = "XlaCustomCallV2"
TARGET = "gpucoll_call"
_REGISTER = (
    "_ZN3xla24CustomCallTargetRegistry8RegisterERKNSt7__cxx1112basic_string"
    "IcSt11char_traitsIcESaIcEEEPvS8_"
)
_REGISTRY = "_ZN3xla24CustomCallTargetRegistry6GlobalEv"


class _Text(Structure):
    """A std::string of libstdc++, which TensorFlow's wheels for Linux are built with."""

    _fields_ = (("data", c_void_p), ("length", c_size_t), ("capacity", c_size_t * 2))


_sites: dict[str, tuple[CallSite, Place, list[Any]]] = {}
"""By the text of the custom call: programs of XLA have the addresses of the blocks in them."""


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
    text = _placed(site, [x.dtype for x in xs], shapes, results, is_list=is_list)
    token = site.variable.read_value()
    after, *ys = gen_xla_ops.xla_custom_call_v2(
        [token, *xs],
        TARGET,
        text,
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
    site, place, _ = _sites[op.get_attr("backend_config").decode()]
    return site, bool(place.is_list)


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
    # XLA copies both strings.
    name, platform = (
        _Text(ctypes.addressof(x), len(x) - 1, (c_size_t * 2)(len(x) - 1, 0)) for x in texts
    )
    register(registry(), ctypes.byref(name), custom_call.address, ctypes.byref(platform))


def _placed(
    site: CallSite,
    dtypes: list[Any],
    shapes: list[list[int]],
    results: list[list[int]],
    *,
    is_list: bool,
) -> str:
    """Return the text of a custom call, which spells the address of its block."""
    place, arrays = Place.new(), np.zeros((len(shapes), PlacedArray.n_words), np.int64)
    kinds = [np.dtype(x.as_numpy_dtype) for x in dtypes]
    dimensions = [np.array(x or [1], np.int64) for x in shapes]
    for row, shape, sizes in zip(arrays, shapes, dimensions, strict=True):
        row[:] = len(shape), sizes.ctypes.data
        if site.collective.has_blocks and not shape:
            row[0] = 1  # a scalar is a row
    place.arrays, place.count = PlacedArray(arrays.ctypes.data), len(shapes)
    place.is_list = is_list
    if len(set(dtypes)) == 1:
        place.site = Site(site.native(dtypes[0], is_list=is_list))
    if not (site.gets or is_list):
        place.zero_bytes = math.prod(results[0]) * kinds[0].itemsize

    @CFUNCTYPE(c_int64, POINTER(c_void_p), POINTER(c_void_p))
    def in_python(outputs: Any, inputs: Any) -> int:
        # A call with one result gets its address; with several, that of their addresses.
        ctypes.memmove(outputs[0] if shapes else outputs, inputs[0], 4)
        where = enumerate(zip(kinds, shapes, results, strict=True), 1)
        pairs = [
            (array_at(inputs[i], shape, kind), array_at(outputs[i], result, kind))
            for i, (kind, shape, result) in where
        ]
        return site.in_turn(
            lambda: _run(site, [x for x, _ in pairs], [y for _, y in pairs], is_list)
        )

    place.python = address_of(in_python)
    text = "".join(chr(48 + (place.address >> 4 * i & 15)) for i in range(16))
    _sites[text] = site, place, [arrays, dimensions, in_python]
    return text


def _run(site: CallSite, xs: list[Any], ys: list[Any], is_list: bool) -> None:
    if not xs:
        site.comm.barrier()
    elif is_list:
        site.run_list(xs, ys)
    else:
        site.run(xs[0], ys[0], site.counts)
