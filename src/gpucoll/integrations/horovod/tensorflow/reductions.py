"""Reductions of tensors and of IndexedSlices, with compression: what programs call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from gpucoll.integrations.horovod.arguments import reduction
from gpucoll.integrations.horovod.basics import Adasum, Average, Sum, size
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.horovod.tensorflow import mpi_ops
from gpucoll.integrations.horovod.tensorflow.compression import Compression
from gpucoll.integrations.horovod.tensorflow.util import is_elastic

__all__ = ["allreduce", "grouped_allreduce", "grouped_reducescatter", "reducescatter"]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over the ranks; of IndexedSlices, gather the slices.

    Parameters
    ----------
    tensor : tensor, variable or IndexedSlices
    average : bool, optional
        Deprecated: use `op`.
    device_dense, device_sparse : str
        The devices of the ops.
    compression : Compressor
    op : Average, Sum, Adasum, Min, Max or Product
        Default: Average.
    prescale_factor, postscale_factor : float
        Factors before and after the sum.
    ignore_name_scope : bool
        Whether ranks are matched by the last part of the op's name alone.
    """
    op = reduction(op, average)
    scope: dict[str, Any] = {"process_set": process_set, "ignore_name_scope": ignore_name_scope}
    factors = prescale_factor, postscale_factor
    if isinstance(tensor, tf.IndexedSlices):
        _check_slices(op, factors)
        with _on(device_sparse):
            values = mpi_ops.allgather(tensor.values, **scope)
            indices = mpi_ops.allgather(tensor.indices, **scope)
            return _slices(tensor, values, indices, op, process_set)
    _check_adasum(op, process_set)
    with _on(device_dense):
        small, context = compression.compress(tensor)
        reduced = mpi_ops._allreduce(small, name, op, *factors, **scope)
        return compression.decompress(reduced, context)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors in one operation; the parameters are those of `allreduce`.

    Tensors are of one dtype; IndexedSlices may be among them.
    """
    op = reduction(op, average)
    scope: dict[str, Any] = {"process_set": process_set, "ignore_name_scope": ignore_name_scope}
    factors = prescale_factor, postscale_factor
    results = list(tensors)
    sparse = [i for i, x in enumerate(tensors) if isinstance(x, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    if sparse:
        _check_slices(op, factors)
        with _on(device_sparse):
            values = mpi_ops.grouped_allgather([tensors[i].values for i in sparse], **scope)
            indices = mpi_ops.grouped_allgather([tensors[i].indices for i in sparse], **scope)
            for i, v, k in zip(sparse, values, indices, strict=True):
                results[i] = _slices(tensors[i], v, k, op, process_set)
    if dense:
        _check_adasum(op, process_set)
        with _on(device_dense):
            small, contexts = zip(*[compression.compress(tensors[i]) for i in dense], strict=True)
            reduced = mpi_ops._grouped_allreduce(small, name, op, *factors, **scope)
            for i, x, context in zip(dense, reduced, contexts, strict=True):
                results[i] = compression.decompress(x, context)
    return results


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks and return this rank's part of the rows.

    The first ranks get a row more if the rows cannot be divided.
    """
    factors = prescale_factor, postscale_factor
    with _on(device_dense):
        small, context = compression.compress(tensor)
        part = mpi_ops._reducescatter(small, name, op, *factors, ignore_name_scope, process_set)
        return compression.decompress(part, context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter several tensors of one dtype, in one operation."""
    if not tensors:
        return list(tensors)
    factors = prescale_factor, postscale_factor
    with _on(device_dense):
        small, contexts = zip(*[compression.compress(x) for x in tensors], strict=True)
        parts = mpi_ops._grouped_reducescatter(small, None, op, *factors, False, process_set)
        pairs = zip(parts, contexts, strict=True)
        return [compression.decompress(x, context) for x, context in pairs]


def size_of(process_set: ProcessSet) -> Any:
    """Return the number of ranks of a set; in elastic training the one when the graph runs."""
    return mpi_ops.size_op(process_set.process_set_id) if is_elastic() else process_set.size()


def if_useful(
    reduce: Callable[..., Any], tensors: Any, process_set: ProcessSet, **options: Any
) -> Any:
    """Reduce unless this rank is alone in the set, or not in it: then return what was given."""
    with tf.device("cpu"):
        if is_elastic():
            included = mpi_ops.process_set_included_op(process_set.process_set_id)
            useful = tf.logical_and(tf.equal(included, 1), tf.greater(size_of(process_set), 1))
        else:
            useful = tf.constant(bool(process_set.included() and process_set.size() != 1))
    return tf.cond(
        useful, lambda: reduce(tensors, process_set=process_set, **options), lambda: tensors
    )


def _on(device: str) -> Any:
    return tf.device(device) if device else nullcontext()


def _slices(tensor: Any, values: Any, indices: Any, op: Any, process_set: ProcessSet) -> Any:
    if op == Average:
        values = values / tf.cast(size_of(process_set), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=tensor.dense_shape)


def _check_slices(op: Any, factors: tuple[float, float]) -> None:
    if op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not currently support sparse tensors. As a workaround "
            "please pass sparse_as_dense=True to DistributedOptimizer"
        )
    if op not in (Sum, Average):
        raise NotImplementedError("Only Sum and Average ops are supported with tf.IndexedSlices")
    if any(factor != 1.0 for factor in factors):
        raise NotImplementedError("Pre/postscale_factor are not supported with tf.IndexedSlices")


def _check_adasum(op: Any, process_set: ProcessSet) -> None:
    if op == Adasum and process_set != global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if op == Adasum and not mpi_ops.check_num_rank_power_of_2(size()):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
