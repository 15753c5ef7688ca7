"""Horovod's ops in Python, and their gradients; the names are those of Horovod's module."""

# ruff: noqa: F401, F403  # the names of `basics` belong to the module

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod import basics as _basics
from gpucoll.integrations.horovod import process_sets
from gpucoll.integrations.horovod.arguments import (
    reduction as handle_average_backwards_compatibility,
)
from gpucoll.integrations.horovod.basics import Adasum, Average, Sum, init, rank, shutdown
from gpucoll.integrations.horovod.names import *
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.tensorflow.kernels import registered
from gpucoll.integrations.horovod.tensorflow.util import _executing_eagerly
from gpucoll.integrations.tensorflow.operations import running_here

_OPS = registered()


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether Adasum can serve this number of ranks."""
    return num_rank != 0 and num_rank & (num_rank - 1) == 0


def _normalize_name(name: str) -> str:
    return re.sub("[^a-zA-Z0-9_]", "_", name)


def _call(
    op: str,
    inputs: Sequence[Any],
    name: str | None,
    ignore_name_scope: bool,
    process_set: ProcessSet,
    **attributes: Any,
) -> Any:
    """Call an op: eagerly on this thread, or into the graph, named after its tensors."""
    function = getattr(_OPS, f"horovod_{op}")
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered; use hvd.add_process_set().")
    if process_set is not global_process_set:
        process_set.size()  # raises if nobody knows it
    attributes |= {
        "ignore_name_scope": ignore_name_scope,
        "process_set_id": process_set.process_set_id,
    }
    if _executing_eagerly():
        with running_here():
            return function(*inputs, name=name, **attributes)
    if name is None:
        tensors = inputs[0] if isinstance(inputs[0], list) else inputs[:1]
        names = dict.fromkeys((tensors[0].name, tensors[-1].name))
        name = _normalize_name("_".join((f"Horovod{op.title().replace('_', '')}", *names)))
    return function(*inputs, name=name, **attributes)


def _reduce(
    kind: str,
    tensors: Any,
    name: str | None = None,
    op: Any = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor, or a list of tensors of one dtype, over the ranks."""
    return _call(
        kind,
        [list(tensors) if kind.startswith("grouped") else tensors],
        name,
        ignore_name_scope,
        process_set,
        reduce_op=int(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


_allreduce = partial(_reduce, "allreduce")
_grouped_allreduce = partial(_reduce, "grouped_allreduce")
_reducescatter = partial(_reduce, "reducescatter")
_grouped_reducescatter = partial(_reduce, "grouped_reducescatter")


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensors of all ranks, one after the other along axis 0.

    Ranks may have different numbers of rows; the other dimensions must be equal.
    """
    return _call("allgather", [tensor], name, ignore_name_scope, process_set)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gather several tensors of one dtype, in one operation."""
    return _call("grouped_allgather", [list(tensors)], name, ignore_name_scope, process_set)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of one rank, a number in the job; all have the same shape."""
    return _call("broadcast", [tensor], name, ignore_name_scope, process_set, root_rank=root_rank)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Assign the variables of one rank to those of the others; return their values."""
    begin = f"{name or ''}HorovodBroadcast_"
    return [
        x.assign(broadcast(x, root_rank, begin + _normalize_name(x.name), process_set=process_set))
        for x in variables
    ]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of a tensor to each rank, and return those received.

    Parameters
    ----------
    splits : tensor of int32, optional
        Rows for each rank, in order. None: equal parts.

    Returns
    -------
    tensor, or with splits (tensor, received_splits)
    """
    rows = tf.constant([], tf.int32) if splits is None else tf.convert_to_tensor(splits)
    received = _call("alltoall", [tensor, rows], name, ignore_name_scope, process_set)
    return received[0] if splits is None else tuple(received)


def join() -> Any:
    """Say that this rank has no more data; return the rank that came last, once all have joined.

    Until then this rank takes part in the others' reductions with zeros.
    """
    with running_here() if _executing_eagerly() else nullcontext():
        return _OPS.horovod_join()


def size_op(process_set_id: int | None = 0, name: str | None = None) -> Any:
    """Return an op that gives the number of ranks when the graph runs."""
    return _OPS.horovod_size(process_set_id=process_set_id, name=name)


def process_set_included_op(process_set_id: int | None = 0, name: str | None = None) -> Any:
    """Return an op that gives 1 if this rank is in the set, 0 if not, and less for an error."""
    return _OPS.horovod_process_set_included(process_set_id=process_set_id, name=name)


def local_size_op(name: str | None = None) -> Any:
    """Return an op that gives the number of ranks on this host."""
    return _OPS.horovod_local_size(name=name)


def rank_op(name: str | None = None) -> Any:
    """Return an op that gives this rank's number."""
    return _OPS.horovod_rank(name=name)


def local_rank_op(name: str | None = None) -> Any:
    """Return an op that gives this rank's number on its host."""
    return _OPS.horovod_local_rank(name=name)


for _question in ("Size", "ProcessSetIncluded", "LocalSize", "Rank", "LocalRank"):
    tf.no_gradient(f"Horovod{_question}")


def _gradient(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a gradient; it gets the op, what the next ops shall be called with, and the rest."""

    def registering(function: Callable[..., Any]) -> Callable[..., Any]:
        @tf.RegisterGradient(f"Horovod{name}")
        def gradient(op: Any, *grads: Any) -> Any:
            like = {
                "ignore_name_scope": op.get_attr("ignore_name_scope"),
                "process_set": process_sets.of(op.get_attr("process_set_id")),
            }
            return function(op, like, *grads)

        return gradient  # type: ignore[no-any-return]

    return registering


def _reduction_of(op: Any) -> dict[str, Any]:
    return {
        "op": op.get_attr("reduce_op"),
        "prescale_factor": op.get_attr("prescale_factor"),
        "postscale_factor": op.get_attr("postscale_factor"),
    }


@_gradient("Allreduce")
def _allreduce_gradient(op: Any, like: dict[str, Any], grad: Any) -> Any:
    return _allreduce(grad, **_reduction_of(op), **like)


@_gradient("GroupedAllreduce")
def _grouped_allreduce_gradient(op: Any, like: dict[str, Any], *grads: Any) -> Any:
    return _grouped_allreduce(grads, **_reduction_of(op), **like)


@_gradient("Allgather")
def _allgather_gradient(op: Any, like: dict[str, Any], grad: Any) -> Any:
    return _own_rows(op.inputs[0], like, grad)


@_gradient("GroupedAllgather")
def _grouped_allgather_gradient(op: Any, like: dict[str, Any], *grads: Any) -> Any:
    # One by one: TensorFlow gives float32 zeros for outputs that nothing depends on.
    return [_own_rows(x, like, grad) for x, grad in zip(op.inputs, grads, strict=True)]


def _own_rows(x: Any, like: dict[str, Any], grad: Any) -> Any:
    """Return the average of a gradient over the ranks, of the rows that are this rank's."""
    process_set = like["process_set"]
    rows = tf.reshape(allgather(tf.reshape(tf.shape(x)[0], [1]), **like), [process_set.size()])
    mean = _allreduce(grad, op=Average, **like)
    return tf.split(mean, num_or_size_splits=rows, axis=0)[process_set.rank()]


@_gradient("Broadcast")
def _broadcast_gradient(op: Any, like: dict[str, Any], grad: Any) -> Any:
    mean = _allreduce(grad, op=Average, **like)
    return mean if rank() == op.get_attr("root_rank") else mean * 0


@_gradient("Alltoall")
def _alltoall_gradient(op: Any, like: dict[str, Any], grad: Any, _: Any) -> Any:
    back, _ = alltoall(grad, splits=op.outputs[1], **like)
    return [back, None]


@_gradient("Reducescatter")
def _reducescatter_gradient(op: Any, like: dict[str, Any], grad: Any) -> Any:
    return allgather(_scaled(op, like, grad), **like)


@_gradient("GroupedReducescatter")
def _grouped_reducescatter_gradient(op: Any, like: dict[str, Any], *grads: Any) -> Any:
    return [allgather(_scaled(op, like, grad), **like) for grad in grads]


def _scaled(op: Any, like: dict[str, Any], grad: Any) -> Any:
    """Return a gradient times the factors that the reduction had."""
    factor = op.get_attr("prescale_factor") * op.get_attr("postscale_factor")
    if op.get_attr("reduce_op") == Sum:
        factor *= like["process_set"].size()
    return grad if factor == 1.0 else grad * factor


_OTHERS = "Any Callable Sequence annotations nullcontext partial process_sets re registered"
_OTHERS += " running_here tf"
__all__ = [name for name in globals() if not name.startswith("_") and name not in _OTHERS.split()]
