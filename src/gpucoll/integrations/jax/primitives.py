"""The operation of JAX that makes a call: shapes, lowering, batching and derivatives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax._src.core import abstract_token
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from gpucoll import ANY_TAG, ReduceOp
from gpucoll.collectives import NO_ROOT, Collective
from gpucoll.errors import ArgumentError, StateError
from gpucoll.integrations.jax.ending import failed
from gpucoll.integrations.jax.handlers import TARGET
from gpucoll.integrations.jax.ordering import ORDER, number_of_call, register_lowering
from gpucoll.integrations.jax.sites import ALL_REDUCE, Options, Site, site_of

__all__ = ["call"]

_call = Primitive("gpucoll")
_call.multiple_results = True
_SUM = ReduceOp.SUM


def call(site: Site, *operands: Any) -> list[Any]:
    """Make a call, now or when the function that is being traced runs; return its results.

    Raises
    ------
    ArgumentTypeError
        A dtype is not served.
    ArgumentError
        A shape does not fit.
    """
    for x in operands:
        site.check_dtype(x.dtype)
    return _call.bind(*operands, site=site)  # type: ignore[no-any-return]


# --- running it -----------------------------------------------------------------------------------


@_call.def_effectful_abstract_eval
def _results(*operands: Any, site: Site) -> Any:
    if not site.gets:
        return [], {ORDER}
    likes = operands[-1:] if site.result_is_template else operands
    return [ShapedArray(site.result_shape(x.shape), x.dtype) for x in likes], {ORDER}


@functools.cache
def _compiled(site: Site) -> Any:
    def run(*operands: Any) -> Any:
        # An array of its own, so that a call without results has something to wait for.
        return _call.bind(*operands, site=site), None if site.gets else jnp.zeros(())

    return jax.jit(run)


@_call.def_impl
def _run(*operands: Any, site: Site) -> Any:
    with jax.disable_jit(False):
        results, mark = _compiled(site)(*operands)
    if mark is not None:
        mark.block_until_ready()
    return results


def _lower(ctx: Any, *operands: Any, site: Site, on_host: bool) -> Any:
    devices = _n_devices(ctx.module_context.axis_context)
    if devices > 1:
        raise StateError(
            f"{site.options.spelled}: this program runs on {devices} devices of one process "
            "(pmap, shard_map, a mesh), and a rank of gpucoll has one: use one device in each "
            "process, reduce over the process's devices outside (jax.lax.psum), or let JAX itself "
            "run its collectives between processes (gpucoll.integrations.jax.use_for_processes)"
        )
    comm = site.comm  # raises if it is closed
    n_sent = len(operands) - (1 if site.result_is_template else 0)
    sent, token = ctx.avals_in[:n_sent], ctx.tokens_in.get(ORDER)
    with_token = ctx.replace(
        avals_in=(*sent, abstract_token), avals_out=(*ctx.avals_out, abstract_token)
    )
    called = site.key
    if on_host:
        label = number_of_call(ctx, comm) if site.is_labelled else 0
        called = site.address_of(sent, ctx.avals_out, label)
    attributes = {"failed": np.int64(0 if site.gets else failed.address), "site": np.int64(called)}
    *results, token = jax.ffi.ffi_lowering(TARGET, has_side_effect=True)(
        with_token, *operands[:n_sent], token, **attributes
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({ORDER: token})))
    return results


def _n_devices(context: Any) -> int:
    number = getattr(context, "num_devices", None)  # jit, pmap
    if number is None:
        mesh = getattr(context, "mesh", None)  # shard_map
        number = 1 if mesh is None else mesh.size
    return int(number)


for _platform in ("cpu", "cuda", "rocm"):
    register_lowering(_call, functools.partial(_lower, on_host=_platform == "cpu"), _platform)


# --- batching: one call for the whole batch -------------------------------------------------------


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, site: Site) -> Any:
    if not site.options.collective.has_blocks:
        if site.result_is_template:
            return _batch_message(operands, axes, site)
        results = _call.bind(*operands, site=site)
        return results, list(axes[: len(results)])
    (x,), (axis,) = operands, axes
    results = _call.bind(jnp.moveaxis(x, axis, 1), site=site)  # blocks are rows, on axis 0
    return results, [1] * len(results)


def _batch_message(operands: Sequence[Any], axes: Sequence[Any], site: Site) -> Any:
    """Batch what is sent and what is received."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    fronted = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    return _call.bind(*fronted, site=site), [0]


batching.primitive_batchers[_call] = _batch


# --- derivatives ----------------------------------------------------------------------------------

_LINEAR = ("sum", "avg", "scaled_sum")


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, site: Site) -> Any:
    results = _call.bind(*primals, site=site)
    options = site.options
    name = options.spelled
    if options.op is not None and options.op.name not in _LINEAR:
        raise ArgumentError(
            f"{name}: op {options.op.name!r} has no derivative here; sum, avg and scaled_sum do. "
            "Wrap x in jax.lax.stop_gradient if none is wanted"
        )
    if not _has_derivative(site):
        raise ArgumentError(
            f"{name} has no derivative: not every rank has a result for it to come from. Use "
            f"{_INSTEAD.get(name, 'all_reduce')}, or wrap x in jax.lax.stop_gradient"
        )
    # Integers of a tree have no tangents, and a template has no part in the result.
    moving = [index for index, x in enumerate(primals) if _is_inexact(x)]
    given = [ad.instantiate_zeros(tangents[index]) for index in moving]
    made = list(tangents[: len(results)])
    for place, tangent in zip(moving, _call.bind(*given, site=site), strict=False):
        made[place] = tangent
    return results, made


_INSTEAD = {"reduce": "all_reduce", "gather": "all_gather", "send": "send_recv"}


def _has_derivative(site: Site) -> bool:
    options = site.options
    if options.collective is Collective.SEND:
        return options.source is not None
    return options.collective not in (Collective.REDUCE, Collective.GATHER)


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _transpose(cotangents: Sequence[Any], *operands: Any, site: Site) -> Any:
    options = site.options
    given = [ad.instantiate_zeros(x) for x in cotangents]
    shapes = [x.aval.shape for x in operands]
    if options.collective is Collective.ALL_REDUCE:
        return _transposed_all_reduce(site, given)
    if options.collective is Collective.SEND:
        tag = options.tag if options.recv_tag == ANY_TAG else options.recv_tag
        back_tag = ANY_TAG if options.recv_tag == ANY_TAG else options.tag
        back = _sibling(site, dest=options.source, source=options.dest, tag=tag, recv_tag=back_tag)
        like = jnp.zeros(shapes[0], given[0].dtype)
        return [*_call.bind(given[0], like, site=back), ad.Zero(operands[1].aval)]
    if options.collective in _SCANS:
        raise ArgumentError(
            f"{options.spelled} has no reverse-mode derivative; jax.jvp works, or wrap x in "
            "jax.lax.stop_gradient"
        )
    collective, op, root = _TRANSPOSES[options.collective]
    back = _sibling(site, collective=collective, op=op, root=options.root if root else NO_ROOT)
    results = []
    for x, shape in zip(_scaled(site, given), shapes, strict=True):
        found = _call.bind(x, site=back)
        results.append(found[0].reshape(shape) if found else jnp.zeros(shape, x.dtype))
    return results


_SCANS = (Collective.SCAN, Collective.EXCLUSIVE_SCAN)
_TRANSPOSES = {
    Collective.BROADCAST: (Collective.REDUCE, _SUM, True),
    Collective.SCATTER: (Collective.GATHER, None, True),
    Collective.ALL_GATHER: (Collective.REDUCE_SCATTER, _SUM, False),
    Collective.REDUCE_SCATTER: (Collective.ALL_GATHER, None, False),
    Collective.ALL_TO_ALL: (Collective.ALL_TO_ALL, None, False),
}


def _transposed_all_reduce(site: Site, given: list[Any]) -> Any:
    if site.options.gradient == ALL_REDUCE:
        return _call.bind(*given, site=site)
    return [_own.bind(x, site=site) for x in given]


def _scaled(site: Site, given: list[Any]) -> list[Any]:
    """Multiply by the factor that the op multiplies each rank's value by."""
    factor = _factor(site)
    return given if factor == 1 else [x * jnp.asarray(factor, x.dtype) for x in given]


def _factor(site: Site) -> float:
    op = site.options.op
    if op is None or op.name == "sum":
        return 1.0
    return 1 / site.world_size if op.name == "avg" else float(op.factor or 1)


def _sibling(site: Site, **changes: Any) -> Site:
    options: Options = replace(site.options, **changes)
    return site_of(site.comm, options)


ad.primitive_jvps[_call] = _jvp
ad.primitive_transposes[_call] = _transpose

# With gradient="identity" the transpose of an all_reduce is this rank's own cotangent, and the
# transpose of that is the all_reduce again.
_own = Primitive("gpucoll_own")
_own.def_impl(lambda x, *, site: _scaled(site, [x])[0])
_own.def_abstract_eval(lambda x, *, site: ShapedArray(x.shape, x.dtype))
mlir.register_lowering(
    _own, mlir.lower_fun(lambda x, *, site: _scaled(site, [x])[0], multiple_results=False)
)
batching.primitive_batchers[_own] = lambda x, axes, *, site: (_own.bind(*x, site=site), axes[0])
ad.primitive_jvps[_own] = lambda x, t, *, site: (
    _own.bind(*x, site=site),
    _own.bind(ad.instantiate_zeros(t[0]), site=site),
)
ad.primitive_transposes[_own] = lambda ct, x, *, site: _call.bind(
    ad.instantiate_zeros(ct), site=site
)
