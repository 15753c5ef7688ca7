"""Collectives and messages on arrays of JAX, in `jax.jit` and outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import numpy as jnp

from gpucoll import ANY_SOURCE, ReduceOp
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.integrations.jax.primitives import call
from gpucoll.integrations.jax.sites import ALL_REDUCE, Options, site_of
from gpucoll.integrations.native import chosen

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "exclusive_scan",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "send_recv",
]


def all_reduce(
    x: Any,
    op: str | ReduceOp = "sum",
    *,
    comm: Communicator | None = None,
    gradient: str = ALL_REDUCE,
) -> Any:
    """Combine the arrays of all ranks.

    Parameters
    ----------
    x : array, or a list, dict or other tree of arrays
        The same shapes and dtypes on all ranks. A tree is one fused call.
    op : str or ReduceOp
    comm : Communicator, optional
        Default: the one that `gpucoll.init` made last.
    gradient : str
        What a gradient passes on. ``"all_reduce"``: the sum of all ranks' cotangents, which is
        right if the loss is the sum of the ranks' losses. ``"identity"``: this rank's cotangent,
        which is right if all ranks compute the same loss from the result.

    Returns
    -------
    array or tree
        As x, the same on all ranks.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When the call is traced: an argument or a dtype is wrong; or a derivative is asked for and
        op is not ``"sum"``, ``"avg"`` or ``scaled_sum``.
    StateError
        When it is traced: there is no communicator, or it is closed.
    jax.errors.JaxRuntimeError
        When the function runs: the call failed. The text is that of gpucoll's error, whose class
        is its first word.

    Notes
    -----
    Linear in x: jvp, grad and vmap work. Cost: that of `Communicator.all_reduce`, and a few
    microseconds.
    """
    return _on_tree(x, Collective.ALL_REDUCE, comm, op=ReduceOp.parse(op), gradient=gradient)


def reduce(
    x: Any, op: str | ReduceOp = "sum", root: int = 0, *, comm: Communicator | None = None
) -> Any:
    """Combine the arrays, or trees, of all ranks; return the result on the root, None elsewhere.

    As for `all_reduce`, but without derivatives.
    """
    return _on_tree(x, Collective.REDUCE, comm, op=ReduceOp.parse(op), root=root)


def broadcast(x: Any, root: int = 0, *, comm: Communicator | None = None) -> Any:
    """Return the root's array, or tree of arrays.

    Parameters
    ----------
    x : array or tree of arrays
        On other ranks than the root it only says the shapes and dtypes.
    root : int
    comm : Communicator, optional

    Notes
    -----
    A gradient is the sum of all ranks' cotangents on the root, and zeros elsewhere. Errors are as
    for `all_reduce`.
    """
    return _on_tree(x, Collective.BROADCAST, comm, root=root)


def scan(x: Any, op: str | ReduceOp = "sum", *, comm: Communicator | None = None) -> Any:
    """Combine the arrays of the ranks up to this one. There is jax.jvp, and no gradient."""
    return _on_array(x, Collective.SCAN, comm, op=ReduceOp.parse(op))


def exclusive_scan(x: Any, op: str | ReduceOp = "sum", *, comm: Communicator | None = None) -> Any:
    """Combine the arrays of the ranks before this one; on rank 0 return the op's identity.

    There is jax.jvp, and no gradient.
    """
    return _on_array(x, Collective.EXCLUSIVE_SCAN, comm, op=ReduceOp.parse(op))


def all_gather(x: Any, *, comm: Communicator | None = None) -> Any:
    """Return the rows of all ranks, one below the other.

    Parameters
    ----------
    x : array of shape (m, ...), or a number
        The same shape and dtype on all ranks.
    comm : Communicator, optional

    Returns
    -------
    array of shape (P m, ...), or (P,) for a number

    Notes
    -----
    A gradient is the reduce_scatter of the cotangents. Errors are as for `all_reduce`.
    """
    return _on_array(x, Collective.ALL_GATHER, comm)


def gather(x: Any, root: int = 0, *, comm: Communicator | None = None) -> Any:
    """Return the rows of all ranks on the root, None elsewhere. It has no derivative."""
    return _on_array(x, Collective.GATHER, comm, root=root)


def reduce_scatter(x: Any, op: str | ReduceOp = "sum", *, comm: Communicator | None = None) -> Any:
    """Combine the arrays of all ranks, and return this rank's block of the result.

    Parameters
    ----------
    x : array of shape (P m, ...)
    op : str or ReduceOp
    comm : Communicator, optional

    Returns
    -------
    array of shape (m, ...)

    Notes
    -----
    A gradient is the all_gather of the cotangents. Errors are as for `all_reduce`; ArgumentError
    if the rows cannot be divided among the ranks.
    """
    return _on_array(x, Collective.REDUCE_SCATTER, comm, op=ReduceOp.parse(op))


def scatter(x: Any, root: int = 0, *, comm: Communicator | None = None) -> Any:
    """Return this rank's block of the root's rows.

    Parameters
    ----------
    x : array of shape (P m, ...)
        On other ranks than the root it only says shape and dtype.
    root : int
    comm : Communicator, optional

    Returns
    -------
    array of shape (m, ...)

    Notes
    -----
    A gradient is the gather of the cotangents on the root, and zeros elsewhere. Errors are as for
    `reduce_scatter`.
    """
    return _on_array(x, Collective.SCATTER, comm, root=root)


def all_to_all(x: Any, *, comm: Communicator | None = None) -> Any:
    """Send block s of x to rank s; return the blocks from all ranks.

    Parameters
    ----------
    x : array of shape (P m, ...)
    comm : Communicator, optional

    Returns
    -------
    array of shape (P m, ...)

    Notes
    -----
    A gradient is the all_to_all of the cotangents. Errors are as for `reduce_scatter`.
    """
    return _on_array(x, Collective.ALL_TO_ALL, comm)


def barrier(*, comm: Communicator | None = None) -> None:
    """Wait until every rank is here; in a jitted function: hold the calls that follow."""
    found = chosen(comm, "barrier")
    call(site_of(found, Options(Collective.BARRIER)))


def send(x: Any, dest: int, tag: int = 0, *, comm: Communicator | None = None) -> None:
    """Send an array.

    It runs although nobody uses a result. It has no derivative: `send_recv` has.
    """
    found = chosen(comm, "send")
    call(site_of(found, Options(Collective.SEND, dest=dest, tag=tag)), jnp.asarray(x))


def recv(
    source: int = ANY_SOURCE,
    tag: int = 0,
    *,
    like: Any = None,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
    comm: Communicator | None = None,
) -> Any:
    """Receive an array.

    Parameters
    ----------
    source, tag : int
        ``ANY_SOURCE`` and ``ANY_TAG`` take the message that comes first.
    like : array
        Says the shape and the dtype; or pass them as `shape` and `dtype`.
    comm : Communicator, optional

    Raises
    ------
    ArgumentError
        Shape and dtype are not given.
    jax.errors.JaxRuntimeError
        As for `all_reduce`; the message may also be too large, or of another dtype.

    Notes
    -----
    As JAX sees it, the result depends on no argument: its derivative is zero. `send_recv` has one.
    """
    if like is None:
        if shape is None or dtype is None:
            raise ArgumentError(
                "recv: pass like=, or shape= and dtype=: compiled programs need both"
            )
        like = jnp.zeros(shape, dtype)
    found = chosen(comm, "recv")
    options = Options(Collective.RECV, source=source, recv_tag=tag)
    return call(site_of(found, options), jax.lax.stop_gradient(jnp.asarray(like)))[0]


def send_recv(
    x: Any,
    dest: int,
    source: int,
    like: Any = None,
    *,
    tag: int = 0,
    comm: Communicator | None = None,
) -> Any:
    """Send an array and receive one, at the same time: the ranks may be paired in any way.

    Parameters
    ----------
    x : array
    dest, source : int
    like : array, optional
        Says shape and dtype of what is received. Default: as x.
    tag : int
    comm : Communicator, optional

    Notes
    -----
    A gradient goes the way back: the cotangent of what came from `source` is sent there. Errors
    are as for `recv`.
    """
    found = chosen(comm, "send_recv")
    x = jnp.asarray(x)
    options = Options(Collective.SEND, dest=dest, source=source, tag=tag, recv_tag=tag)
    template = jax.lax.stop_gradient(x if like is None else jnp.asarray(like))
    return call(site_of(found, options), x, template)[0]


def _on_array(x: Any, collective: Collective, comm: Communicator | None, **options: Any) -> Any:
    found = chosen(comm, collective.spelled)
    if isinstance(x, list | tuple | dict):
        raise ArgumentTypeError(
            f"{collective.spelled}: x must be one array; got a {type(x).__name__}. Lists are for "
            "all_reduce, reduce and broadcast"
        )
    x = jnp.asarray(x)
    if x.ndim == 0 and collective.gathers and not collective.spreads:
        x = x[None]
    results = call(site_of(found, Options(collective, **options)), x)
    return results[0] if results else None


def _on_tree(x: Any, collective: Collective, comm: Communicator | None, **options: Any) -> Any:
    site = site_of(chosen(comm, collective.spelled), Options(collective, **options))
    leaves, structure = jax.tree.flatten(x)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    results: list[Any] = [None] * len(arrays)
    for places in (
        _fused(arrays) if collective.of_list else [[place] for place in range(len(arrays))]
    ):
        found = call(site, *[arrays[place] for place in places])
        for place, result in zip(places, found, strict=False):
            results[place] = result
    return jax.tree.unflatten(structure, results) if site.gets else None


def _fused(arrays: list[Any]) -> list[list[int]]:
    """Return the numbers of the arrays of each dtype: one call each."""
    by_dtype: dict[Any, list[int]] = {}
    for place, array in enumerate(arrays):
        by_dtype.setdefault(array.dtype, []).append(place)
    return list(by_dtype.values())
