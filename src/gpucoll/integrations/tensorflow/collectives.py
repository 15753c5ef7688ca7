"""The collectives that programs call: on tensors, eagerly and in `tf.function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.pyct import error_utils

from gpucoll import Communicator, ReduceOp
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError, StateError
from gpucoll.integrations.tensorflow import xla
from gpucoll.integrations.tensorflow.call_sites import AUTO, CallSite, site_of
from gpucoll.integrations.tensorflow.emission import emit, emit_barrier, emit_exchange, emit_list
from gpucoll.integrations.tensorflow.gradients import register_gradients

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exclusive_scan",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
]

register_gradients()


def all_reduce(
    x: Any, op: str | ReduceOp = "sum", *, comm: Communicator | None = None, name: str | None = None
) -> Any:
    """Combine the tensors of all ranks; every rank gets the result.

    Parameters
    ----------
    x : tensor, IndexedSlices, or a list or tuple of them
        The same shape and dtype on every rank. A list is one op and, for each dtype, one call.
        IndexedSlices are gathered: rows of equal indices are not added up. Under XLA they become
        tensors.
    op : str or ReduceOp
        As in `Communicator.all_reduce`. With IndexedSlices: ``"sum"`` or ``"avg"``.
    comm : Communicator, optional
        Default: that of `gpucoll.init`.
    name : str, optional
        The op's name in a graph.

    Returns
    -------
    tensor, IndexedSlices, or a list
        Shape and dtype of x.

    Raises
    ------
    ArgumentTypeError, ArgumentError, StateError
        When it is called or traced, before anything moves: a dtype or an option that is not
        served; no communicator, or a closed one.
    tf.errors.FailedPreconditionError, DeadlineExceededError, AbortedError
        When the op runs, with gpucoll's text: the ranks' calls do not match; a deadline; a rank
        is lost, or gave up. (In a function that XLA compiles: InternalError.)

    Notes
    -----
    Gradient, for sum, avg and `ReduceOp.scaled_sum`: the all_reduce of the gradients, as if the
    loss were the sum of all ranks' losses.
    """
    site = site_of(comm, Collective.ALL_REDUCE, op)
    if isinstance(x, list | tuple):
        return _reduced_list(site, x, name)
    if isinstance(x, tf.IndexedSlices):
        return _gathered_slices(site, x)
    return emit(site, x, name)


def reduce(
    x: Any,
    op: str | ReduceOp = "sum",
    root: int = 0,
    *,
    comm: Communicator | None = None,
    name: str | None = None,
) -> Any:
    """Combine the tensors of all ranks; the root gets the result, the others zeros.

    Parameters
    ----------
    x, op, comm, name
        As for `all_reduce`, without IndexedSlices.
    root : int
        The rank that gets the result.

    Notes
    -----
    Gradient: the root's, on every rank.
    """
    site = site_of(comm, Collective.REDUCE, op, root)
    return (emit_list if isinstance(x, list | tuple) else emit)(site, x, name)


def broadcast(
    x: Any, root: int = 0, *, comm: Communicator | None = None, name: str | None = None
) -> Any:
    """Return the root's tensor on every rank.

    Parameters
    ----------
    x : tensor, or a list or tuple of tensors
        The same shape and dtype on every rank; elsewhere than on the root the values do not count.
    root : int
        The rank that has the tensor.
    comm, name
        As for `all_reduce`.

    Notes
    -----
    Gradient: the sum of all ranks' gradients on the root, zeros elsewhere.
    """
    site = site_of(comm, Collective.BROADCAST, root=root)
    return (emit_list if isinstance(x, list | tuple) else emit)(site, x, name)


def scan(
    x: Any, op: str | ReduceOp = "sum", *, comm: Communicator | None = None, name: str | None = None
) -> Any:
    """Combine the tensors of ranks 0 to this one.

    Parameters
    ----------
    x : tensor
    op, comm, name
        As for `all_reduce`.

    Notes
    -----
    Gradient, for sum: two collectives.
    """
    return emit(site_of(comm, Collective.SCAN, op), x, name)


def exclusive_scan(
    x: Any, op: str | ReduceOp = "sum", *, comm: Communicator | None = None, name: str | None = None
) -> Any:
    """Combine the tensors of the ranks before this one; rank 0 gets the op's identity.

    Parameters
    ----------
    x, op, comm, name
        As for `scan`.
    """
    return emit(site_of(comm, Collective.EXCLUSIVE_SCAN, op), x, name)


def all_gather(
    x: Any,
    *,
    counts: Sequence[int] | str | None = None,
    comm: Communicator | None = None,
    name: str | None = None,
) -> Any:
    """Concatenate the tensors of all ranks along axis 0.

    Parameters
    ----------
    x : tensor, shape (m, ...) or ()
    counts : sequence of int or "auto", optional
        The rows of each rank, if they differ. "auto": the ranks exchange them first.
    comm, name
        As for `all_reduce`.

    Returns
    -------
    tensor, shape (P m, ...) or (P,), or (sum(counts), ...)

    Notes
    -----
    Gradient: this rank's rows of the sum of all ranks' gradients.
    """
    return emit(site_of(comm, Collective.ALL_GATHER, counts=counts), x, name)


def gather(
    x: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | str | None = None,
    comm: Communicator | None = None,
    name: str | None = None,
) -> Any:
    """Concatenate the tensors of all ranks on the root; the others get no rows.

    Parameters
    ----------
    x, counts, comm, name
        As for `all_gather`.
    root : int
        The rank that gets the result.

    Notes
    -----
    Gradient, not with "auto": this rank's rows of the root's gradient.
    """
    return emit(site_of(comm, Collective.GATHER, root=root, counts=counts), x, name)


def scatter(
    x: Any,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    comm: Communicator | None = None,
    name: str | None = None,
) -> Any:
    """Give rank r block r of the root's tensor.

    Parameters
    ----------
    x : tensor, shape (P m, ...) or (sum(counts), ...)
        Of the same shape on every rank; elsewhere than on the root the values do not count.
    root : int
        The rank whose tensor is scattered.
    counts : sequence of int, optional
        The rows of each rank, if they differ.
    comm, name
        As for `all_reduce`.

    Returns
    -------
    tensor, shape (m, ...) or (counts[r], ...)

    Notes
    -----
    Gradient: on the root the gradients of all ranks, zeros elsewhere.
    """
    return emit(site_of(comm, Collective.SCATTER, root=root, counts=counts), x, name)


def reduce_scatter(
    x: Any,
    op: str | ReduceOp = "sum",
    *,
    counts: Sequence[int] | None = None,
    comm: Communicator | None = None,
    name: str | None = None,
) -> Any:
    """Combine the tensors of all ranks; rank r gets block r of the result.

    Parameters
    ----------
    x : tensor, shape (P m, ...) or (sum(counts), ...)
    op, comm, name
        As for `all_reduce`.
    counts : sequence of int, optional
        The rows of each rank, if they differ.

    Returns
    -------
    tensor, shape (m, ...) or (counts[r], ...)

    Notes
    -----
    Gradient: that of all_reduce, gathered from all ranks.
    """
    return emit(site_of(comm, Collective.REDUCE_SCATTER, op, counts=counts), x, name)


def all_to_all(
    x: Any, *, splits: Any = None, comm: Communicator | None = None, name: str | None = None
) -> Any:
    """Give every rank s this rank's block s, and concatenate the blocks from all ranks.

    Parameters
    ----------
    x : tensor, shape (P m, ...) or (sum(splits), ...)
    splits : tensor of integers, shape (P,), optional
        The rows for each rank, if they differ.
    comm, name
        As for `all_reduce`.

    Returns
    -------
    tensor, or with splits (tensor, received)
        `received` has the rows from each rank: int64, shape (P,).

    Notes
    -----
    Gradient: the gradients travel back.
    """
    site = site_of(comm, Collective.ALL_TO_ALL)
    return emit(site, x, name) if splits is None else tuple(emit_exchange(site, x, splits, name))


def barrier(*, comm: Communicator | None = None, name: str | None = None) -> Any:
    """Wait until all ranks have called it.

    In a `tf.function` it comes after the collectives before it, and before those after it.
    """
    return emit_barrier(site_of(comm, Collective.BARRIER), name)


def _reduced_list(site: CallSite, xs: Sequence[Any], name: str | None) -> list[Any]:
    results = list(xs)
    dense = [i for i, x in enumerate(xs) if not isinstance(x, tf.IndexedSlices)]
    for i, y in zip(dense, emit_list(site, [xs[i] for i in dense], name), strict=True):
        results[i] = y
    for i, x in enumerate(xs):
        if isinstance(x, tf.IndexedSlices):
            results[i] = _gathered_slices(site, x)
    return results


def _gathered_slices(site: CallSite, x: tf.IndexedSlices) -> Any:
    assert site.op is not None
    if site.op.name not in ("sum", "avg"):
        raise ArgumentError(
            f"all_reduce of IndexedSlices: op must be 'sum' or 'avg'; got {site.op.name!r}. Pass "
            "tf.convert_to_tensor(x)"
        )
    if xla.is_compiled_here():  # the shapes of what is gathered would not be known
        return emit(site, tf.convert_to_tensor(x))
    gathering = site.beside(Collective.ALL_GATHER, counts=AUTO)
    values, indices = emit(gathering, x.values), emit(gathering, x.indices)
    if site.op.name == "avg":
        values = values / tf.cast(site.world_size, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=x.dense_shape)


for _name in __all__:  # AutoGraph calls them as they are; its decorator for that costs 1 us a call
    globals()[_name].autograph_info__ = {}
# It makes errors that pass through it anew: of their own classes if it knows that a text suffices.
error_utils.KNOWN_STRING_CONSTRUCTOR_ERRORS = (
    *error_utils.KNOWN_STRING_CONSTRUCTOR_ERRORS,
    *(ArgumentError, ArgumentTypeError, StateError),
)
