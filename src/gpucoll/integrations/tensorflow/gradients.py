"""The gradients of the ops: collectives, too, which every rank calls in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError
from gpucoll.integrations.tensorflow import kernels, xla
from gpucoll.integrations.tensorflow.call_sites import CallSite, site_with
from gpucoll.integrations.tensorflow.emission import emit, emit_exchange, emit_list
from gpucoll.types import ReduceOp

__all__ = ["register_gradients"]


def _linear(site: CallSite) -> Any:
    op = site.op
    assert op is not None
    if op.name not in ("sum", "avg", "scaled_sum"):
        raise ArgumentError(
            f"{site.collective.spelled} with op {op.name!r} has no gradient: only sum, avg and "
            "scaled_sum have one. Use tf.stop_gradient, or another op"
        )
    return op


def _factor(site: CallSite, grad: Any) -> Any:
    """Return a gradient times what the reduction multiplied inputs by, beside the sum."""
    op: ReduceOp = _linear(site)
    if op.name == "avg":
        return grad / tf.cast(site.world_size, grad.dtype)
    return grad if op.factor is None else grad * tf.cast(op.factor, grad.dtype)


def _of_all_reduce(site: CallSite, x: Any, grad: Any) -> Any:
    return emit(site.beside(Collective.ALL_REDUCE, _linear(site)), grad)


def _of_reduce(site: CallSite, x: Any, grad: Any) -> Any:
    return _factor(site, emit(site.beside(Collective.BROADCAST, root=site.root), grad))


def _of_broadcast(site: CallSite, x: Any, grad: Any) -> Any:
    return emit(site.beside(Collective.REDUCE, "sum", root=site.root), grad)


def _of_scan(site: CallSite, x: Any, grad: Any) -> Any:
    """Return the sum of the gradients of the ranks whose results have this rank's input."""
    if _linear(site).name == "avg":
        raise ArgumentError(f"{site.collective.spelled} with op 'avg' has no gradient: use 'sum'")
    is_exclusive = site.collective == Collective.EXCLUSIVE_SCAN
    before = Collective.SCAN if is_exclusive else Collective.EXCLUSIVE_SCAN
    total = emit(site.beside(Collective.ALL_REDUCE, "sum"), grad)
    return _factor(site, total - emit(site.beside(before, "sum"), grad))


def _of_all_gather(site: CallSite, x: Any, grad: Any) -> Any:
    if not site.exchanges_counts:
        counts = site.counts
        mine = emit(site.beside(Collective.REDUCE_SCATTER, "sum", counts=counts), grad)
        return tf.reshape(mine, tf.shape(x))
    total = emit(site.beside(Collective.ALL_REDUCE, "sum"), grad)
    n_rows = tf.shape(x)[0]
    begin = emit(site.beside(Collective.EXCLUSIVE_SCAN, "sum"), n_rows)
    return total[begin : begin + n_rows]


def _of_gather(site: CallSite, x: Any, grad: Any) -> Any:
    counts = site.counts
    if site.exchanges_counts:
        raise ArgumentError("gather with counts='auto' has no gradient: pass the counts")
    if site.rank != site.root:  # only the shape and the dtype of what this rank passes count
        block = tf.shape(tf.reshape(x, [1]) if x.shape.rank == 0 else x, tf.int64)
        n_rows = block[:1] * site.world_size
        if counts is not None:
            n_rows = tf.constant([sum(counts)], tf.int64)
        grad = tf.zeros(tf.concat([n_rows, block[1:]], 0), grad.dtype)
    mine = emit(site.beside(Collective.SCATTER, root=site.root, counts=counts), grad)
    return tf.reshape(mine, tf.shape(x))


def _of_scatter(site: CallSite, x: Any, grad: Any) -> Any:
    whole = emit(site.beside(Collective.GATHER, root=site.root, counts=site.counts), grad)
    return whole if site.rank == site.root else tf.zeros_like(x)


def _of_reduce_scatter(site: CallSite, x: Any, grad: Any) -> Any:
    return _factor(site, emit(site.beside(Collective.ALL_GATHER, counts=site.counts), grad))


def _of_all_to_all(site: CallSite, x: Any, grad: Any) -> Any:
    return emit(site, grad)


_GRADIENTS: dict[Collective, Callable[[CallSite, Any, Any], Any]] = {
    Collective.ALL_REDUCE: _of_all_reduce,
    Collective.REDUCE: _of_reduce,
    Collective.BROADCAST: _of_broadcast,
    Collective.SCAN: _of_scan,
    Collective.EXCLUSIVE_SCAN: _of_scan,
    Collective.ALL_GATHER: _of_all_gather,
    Collective.GATHER: _of_gather,
    Collective.REDUCE_SCATTER: _of_reduce_scatter,
    Collective.SCATTER: _of_scatter,
    Collective.ALL_TO_ALL: _of_all_to_all,
}


def _of_list(site: CallSite, xs: list[Any], grads: list[Any]) -> list[Any]:
    # TensorFlow gives float32 zeros for outputs that nothing depends on.
    grads = [tf.cast(grad, x.dtype) for x, grad in zip(xs, grads, strict=True)]
    if site.collective == Collective.ALL_REDUCE:
        return emit_list(site.beside(Collective.ALL_REDUCE, _linear(site)), grads)
    if site.collective == Collective.BROADCAST:
        return emit_list(site.beside(Collective.REDUCE, "sum", root=site.root), grads)
    sent = emit_list(site.beside(Collective.BROADCAST, root=site.root), grads)
    return [_factor(site, grad) for grad in sent]


def register_gradients() -> None:
    """Tell TensorFlow of them, once."""
    for collective in kernels.OFFERED:

        @tf.RegisterGradient(kernels.op_name(collective))
        def of_one(op: Any, grad: Any) -> Any:
            site = site_with(op.get_attr("site"))
            return [None, _GRADIENTS[site.collective](site, op.inputs[1], grad)]

    for collective in kernels.LISTED:

        @tf.RegisterGradient(kernels.op_name(collective, "List"))
        def of_list(op: Any, *grads: Any) -> Any:
            site = site_with(op.get_attr("site"))
            return [None, *_of_list(site, list(op.inputs)[1:], list(grads))]

    @tf.RegisterGradient(kernels.op_name(Collective.ALL_TO_ALL, "WithSplits"))
    def of_exchange(op: Any, grad: Any, _: Any) -> Any:
        site = site_with(op.get_attr("site"))
        return [None, emit_exchange(site, grad, op.outputs[1])[0], None]

    @tf.RegisterGradient(xla.OP)
    def of_custom_call(op: Any, _: Any, *grads: Any) -> Any:
        found = xla.site_of_call(op)
        if found is None:
            raise LookupError(f"No gradient defined for operation '{op.name}' (op type: {op.type})")
        site, is_list = found
        xs = list(op.inputs)[1:]
        if is_list:
            return [None, *_of_list(site, xs, list(grads))]
        return [None, _GRADIENTS[site.collective](site, xs[0], grads[0])]
