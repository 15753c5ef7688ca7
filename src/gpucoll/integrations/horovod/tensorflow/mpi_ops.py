"""Horovod's ops in Python, and their gradients; the names are those of Horovod's module."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod import basics as _basics
from gpucoll.integrations.horovod import process_sets
from gpucoll.integrations.horovod.basics import *  # noqa: F403
from gpucoll.integrations.horovod.basics import Average, Sum, rank
from gpucoll.integrations.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from gpucoll.integrations.horovod.tensorflow.kernels import registered
from gpucoll.integrations.horovod.tensorflow.util import _executing_eagerly
from gpucoll.integrations.tensorflow.operations import running_here

_OPS = registered()


def handle_average_backwards_compatibility(op: Any, average: bool | None) -> Any:
    """Return the reduction that the parameters ``op`` and, of old, ``average`` ask for."""
    if op is not None:
        if average is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        return op
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    return Average


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether Adasum can serve this number of ranks."""
    return num_rank != 0 and num_rank & (num_rank - 1) == 0


def _normalize_name(name: str) -> str:
    return re.sub("[^a-zA-Z0-9_]", "_", name)


def _call(op: str, *inputs: Any, name: str | None, **attributes: Any) -> Any:
    """Call an op: eagerly on this thread, or into the graph, named after its tensors."""
    function = getattr(_OPS, f"horovod_{op}")
    if _executing_eagerly():
        with running_here():
            return function(*inputs, name=name, **attributes)
    if name is None:
        of = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs[:1]
        names = "_".join(dict.fromkeys((of[0].name, of[-1].name)))
        grouped = "".join(part.capitalize() for part in op.split("_"))
        name = _normalize_name(f"Horovod{grouped}_{names}")
    return function(*inputs, name=name, **attributes)


def _number(process_set: ProcessSet) -> int:
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered; use hvd.add_process_set().")
    return int(process_set.process_set_id)


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: Any = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over the ranks; all have the same shape, and get the result."""
    return _call(
        "allreduce",
        tensor,
        name=name,
        reduce_op=int(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Any = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce several tensors of one dtype, in one operation."""
    return _call(
        "grouped_allreduce",
        list(tensors),
        name=name,
        reduce_op=int(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensors of all ranks, one after the other along axis 0.

    Ranks may have different numbers of rows; the other dimensions must be equal.
    """
    return _call(
        "allgather",
        tensor,
        name=name,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gather several tensors of one dtype, in one operation."""
    return _call(
        "grouped_allgather",
        list(tensors),
        name=name,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of one rank, a number in the job; all have the same shape."""
    return _call(
        "broadcast",
        tensor,
        name=name,
        root_rank=root_rank,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Assign the variables of one rank to those of the others; return their values."""
    label = f"{name}_" if name is not None else ""
    return [
        variable.assign(
            broadcast(
                variable.read_value() if hasattr(variable, "read_value") else variable,
                root_rank,
                name=f"{label}HorovodBroadcast_{_normalize_name(variable.name)}",
                process_set=process_set,
            )
        )
        for variable in variables
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
    received = _call(
        "alltoall",
        tensor,
        rows,
        name=name,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )
    return received[0] if splits is None else tuple(received)


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: Any = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks; each gets its part of the rows."""
    return _call(
        "reducescatter",
        tensor,
        name=name,
        reduce_op=int(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: Any = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce and scatter several tensors of one dtype, in one operation."""
    return _call(
        "grouped_reducescatter",
        list(tensors),
        name=name,
        reduce_op=int(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set_id=_number(process_set),
    )


def join() -> Any:
    """Say that this rank has no more data; return the rank that came last, once all have joined.

    Until then this rank takes part in the others' reductions with zeros.
    """
    return _call("join", name="HorovodJoin")


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return an op that gives the number of ranks when the graph runs."""
    return _OPS.horovod_size(process_set_id=process_set_id, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
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
