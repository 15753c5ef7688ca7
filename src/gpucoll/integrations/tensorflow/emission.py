"""One op of a collective: called in eager mode, or added to the function that is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.integrations.tensorflow import kernels, xla
from gpucoll.integrations.tensorflow.call_sites import CallSite

__all__ = ["emit", "emit_barrier", "emit_exchange", "emit_list"]

_eager = context.executing_eagerly


def emit(site: CallSite, x: Any, name: str | None = None) -> Any:
    """Call the collective of a site with a tensor, and return its result."""
    x = _tensor(site, x)
    function = _function(site.collective)
    if _eager():
        return _now(function, site.order, x, site=site.key, name=name)
    shape = _static_shape(site, x.shape)
    if xla.is_compiled_here():
        return xla.emit(site, [x], is_list=False)[0]
    y = function(site.order, x, site=site.key, name=name)
    y.set_shape(shape)
    return y


def emit_list(site: CallSite, xs: Sequence[Any], name: str | None = None) -> list[Any]:
    """Call the collective of a site with a list, as one op; return a list."""
    if not xs:
        return []
    tensors = [_tensor(site, x) for x in xs]
    function = _function(site.collective, "List")
    if _eager():
        return list(_now(function, site.order, tensors, site=site.key, name=name))
    if xla.is_compiled_here():
        return xla.emit(site, tensors, is_list=True)
    return list(function(site.order, tensors, site=site.key, name=name))


def emit_exchange(site: CallSite, x: Any, splits: Any, name: str | None = None) -> list[Any]:
    """Send rows to each rank; return those received, and how many came from each."""
    x = _tensor(site, x)
    splits = tf.cast(splits, tf.int64)
    if not splits.shape.is_compatible_with([site.world_size]):
        raise ArgumentError(
            f"all_to_all: splits must be {site.world_size} numbers of rows; got {splits.shape}"
        )
    if not _eager() and xla.is_compiled_here():
        raise ArgumentError(
            "all_to_all: XLA needs to know the shape of the result; with jit_compile=True leave "
            "out splits, and pad the blocks to equal numbers of rows"
        )
    function = _function(site.collective, "WithSplits")
    return list(_now(function, site.order, x, splits, site=site.key, name=name))


def emit_barrier(site: CallSite, name: str | None = None) -> Any:
    """Wait for all ranks."""
    if not _eager() and xla.is_compiled_here():
        xla.emit(site, [], is_list=False)
        return None
    return _now(_function(site.collective), site.order, site=site.key, name=name)


def _now(function: Callable[..., Any], *inputs: Any, **attributes: Any) -> Any:
    """Call an op. Ctrl-C while it runs may come as an error about that."""
    try:
        return function(*inputs, **attributes)
    except (RuntimeError, tf.errors.InternalError) as error:
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from None
        raise


@functools.cache
def _function(collective: Collective, form: str = "") -> Callable[..., Any]:
    words = [collective.spelled, *{"List": ["list"], "WithSplits": ["with_splits"]}.get(form, [])]
    return getattr(kernels.registered(), "_".join(["gpucoll", *words]))  # type: ignore[no-any-return]


def _tensor(site: CallSite, x: Any) -> Any:
    if not isinstance(x, tf.Tensor):
        if isinstance(x, tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor):
            raise ArgumentTypeError(
                f"{site.collective.spelled} takes tensors; got a {type(x).__name__}. Pass "
                "tf.convert_to_tensor(x), or its parts one by one"
            )
        x = tf.convert_to_tensor(x)
    site.check(x.dtype)
    return x


def _static_shape(site: CallSite, shape: Any) -> Any:
    """Return what is known of a result's shape; raise ArgumentError if x does not fit."""
    if not site.collective.has_blocks:
        return shape
    if shape.rank is None:
        return None
    rows = shape.as_list()
    if rows and (rows[0] is None or site.exchanges_counts):
        return [site.rows(0, site.counts) if site.counts else None, *rows[1:]]
    return site.result_shape(rows, site.counts)
