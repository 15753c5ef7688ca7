"""The calls of ``horovod.mxnet``.

Calls whose result has the shape of their input return at once, and MXNet's engine knows when the
result is there. The others wait for it, since MXNet cannot wait for an array of unknown shape.
"""

# ruff: noqa: F401, F403  # names of Horovod's module

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError
from mxnet.ndarray import NDArray

from gpucoll.integrations.horovod import basics
from gpucoll.integrations.horovod.arguments import reduction, root_of, rows_for_each
from gpucoll.integrations.horovod.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    engine_of,
    rank,
)
from gpucoll.integrations.horovod.engine.engine import Engine
from gpucoll.integrations.horovod.engine.numpy_arrays import NumpyArrays
from gpucoll.integrations.horovod.engine.request import Kind, ReduceOp, Request
from gpucoll.integrations.horovod.mxnet.dependencies import Operation, last_of, settle
from gpucoll.integrations.horovod.names import *
from gpucoll.integrations.horovod.process_sets import ProcessSet, global_process_set
from gpucoll.integrations.mxnet.arrays import check, copy_of, empty_like, view

_ARRAYS = NumpyArrays()


def init(*args: Any, **kwargs: Any) -> None:
    """Meet the other ranks; see `gpucoll.integrations.horovod.basics.init`."""
    basics.init(*args, **kwargs)
    atexit.register(settle)  # before the job ends


def shutdown() -> None:
    """Leave the job when what was started has ended; `init` may be called again, by all ranks."""
    settle()
    basics.shutdown()


def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Return the average (or sum, minimum, ...) of an array over all ranks; does not wait for it.

    Parameters
    ----------
    tensor : NDArray
        Of the same shape and element type on all ranks.
    average : bool, optional
        Deprecated: use `op`.
    name : str, optional
        Matches the calls of the ranks, which may make them in any order. Default: by their number.
    priority : int
        Of the call in MXNet's engine.
    prescale_factor, postscale_factor : float
        What to multiply by before and after the reduction.
    process_set : ProcessSet
        The ranks that take part.
    op : Average, Sum, Min, Max, Product or Adasum
        Default: Average.
    """
    output = empty_like(tensor, tensor.shape)
    options = prescale_factor, postscale_factor, process_set
    _reduce([tensor], [output], reduction(op, average), name, priority, *options)
    return output


def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Reduce an array in place, and return it; see `allreduce`."""
    options = prescale_factor, postscale_factor, process_set
    _reduce((), [tensor], reduction(op, average), name, priority, *options)
    return tensor


def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Sequence[NDArray]:
    """Reduce several arrays in one call; see `allreduce`."""
    if not tensors:
        return tensors
    outputs = [empty_like(tensor, tensor.shape) for tensor in tensors]
    options = prescale_factor, postscale_factor, process_set
    _reduce(tensors, outputs, reduction(op, average), name, priority, *options)
    return outputs


def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Sequence[NDArray]:
    """Reduce several arrays in place in one call, and return them; see `allreduce`."""
    if tensors:
        options = prescale_factor, postscale_factor, process_set
        _reduce((), tensors, reduction(op, average), name, priority, *options)
    return tensors


def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Return the array of a rank of the job; does not wait for it. See `allreduce`."""
    output = empty_like(tensor, tensor.shape)
    _broadcast([tensor], output, root_rank, name, priority, process_set)
    return output


def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Overwrite an array by that of a rank of the job, and return it; see `broadcast`."""
    _broadcast((), tensor, root_rank, name, priority, process_set)
    return tensor


def allgather(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Return the arrays of all ranks, one behind the other; their numbers of rows may differ."""
    return _run(Kind.ALLGATHER, [tensor], name, process_set)[0][0]


def grouped_allgather(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[NDArray]:
    """Gather several arrays in one call; see `allgather`."""
    return _run(Kind.ALLGATHER, tensors, name, process_set)[0]


def alltoall(
    tensor: NDArray,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of an array to each rank; return the rows from each, one behind the other.

    Parameters
    ----------
    splits : NDArray of int32 or sequence of int, optional
        Rows for each rank. Default: the same number for each; then only the rows are returned.

    Returns
    -------
    output : NDArray
    received_splits : NDArray of int32
        Rows from each rank. Only if there are `splits`.
    """
    check(tensor)
    try:
        rows = _splits(tensor, splits, process_set)
    except ValueError as error:
        raise MXNetError(str(error)) from error
    (output,), request = _run(Kind.ALLTOALL, [tensor], name, process_set, splits=rows)
    if splits is None:
        return output
    return output, mx.nd.array(request.received_splits, dtype="int32")


def reducescatter(
    tensor: NDArray,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray:
    """Return this rank's rows of the average or sum over all ranks; see `allreduce`.

    Lower ranks get one row more if the rows cannot be divided evenly.
    """
    options = op, name, priority, process_set, prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], *options)[0]


def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[NDArray]:
    """Reduce and scatter several arrays in one call; see `reducescatter`."""
    if op not in (Average, Sum):
        raise ValueError(f"reducescatter takes op=Average or Sum, not {op!r}")
    if any(tensor.shape == () for tensor in tensors):
        raise ValueError("reducescatter does not support scalar inputs")
    options = {"op": ReduceOp(op), "prescale": prescale_factor, "postscale": postscale_factor}
    return _run(Kind.REDUCESCATTER, tensors, name, process_set, **options)[0]


def _splits(tensor: NDArray, splits: Any, process_set: ProcessSet) -> list[int] | None:
    if isinstance(splits, NDArray):
        if splits.dtype != np.int32:
            raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
        splits = splits.asnumpy().tolist()
    return rows_for_each(splits, tensor.shape[0], process_set)


def _reduce(
    reads: Sequence[NDArray],
    writes: Sequence[NDArray],
    op: ReduceOp,
    name: str | None,
    priority: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> None:
    engine = engine_of(process_set)
    kind = Kind.ADASUM if op is Adasum else Kind.ALLREDUCE
    name = engine.unnamed("allreduce") if name is None else f"allreduce.{name}"
    last = last_of(name) if not reads and len(writes) == 1 else None
    if last is not None and last.reduces(engine, writes[0], op, prescale, postscale):
        last.repeat(priority)
        return
    operation = Operation(kind, name, _ARRAYS, [], None, op, 0, prescale, postscale)
    operation.start(engine, reads, writes, priority)


def _broadcast(
    reads: Sequence[NDArray],
    output: NDArray,
    root_rank: int,
    name: str | None,
    priority: int,
    process_set: ProcessSet,
) -> None:
    engine = engine_of(process_set)
    name = engine.unnamed("broadcast") if name is None else f"broadcast.{name}"
    root = root_of(root_rank, process_set)
    operation = Operation(Kind.BROADCAST, name, _ARRAYS, root=root)
    operation.start(engine, reads, [output], priority)


def _run(
    kind: Kind,
    tensors: Sequence[NDArray],
    name: str | None,
    process_set: ProcessSet,
    **options: Any,
) -> tuple[list[NDArray], Request]:
    """Do a call whose results have shapes that nobody knows before."""
    for tensor in tensors:
        check(tensor)
        tensor.wait_to_read()
    engine = engine_of(process_set)
    word = kind.name.lower()
    name = engine.unnamed(word) if name is None else f"{word}.{name}"
    views = [view(tensor) for tensor in tensors]
    request = Request(kind, name, _ARRAYS, views, **options)
    try:
        engine.run(request)
    except RuntimeError as error:
        raise MXNetError(str(error)) from error
    results = zip(request.results or (), tensors, strict=True)
    return [copy_of(result, like) for result, like in results], request


__all__ = [name for name in globals() if not name.startswith("_")]
