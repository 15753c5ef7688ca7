"""mpi4jax's names over gpucoll: programs written for it run without an MPI and a compiler.

``python -m gpucoll.integrations.jax.mpi4jax script.py`` runs a program whose ``import mpi4jax`` and
``import mpi4py`` find this package and `gpucoll.integrations.mpi4py`. The functions, their
parameters and their results are mpi4jax's (0.8 and newer, without explicit tokens). As there, the
gradient of an allreduce is this rank's own cotangent.

The import joins the job, as mpi4py's does, and is collective: all ranks import it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import numpy as jnp

from gpucoll import ReduceOp
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.integrations import jax as gcj
from gpucoll.integrations import mpi4py
from gpucoll.integrations.jax.primitives import call
from gpucoll.integrations.jax.sites import IDENTITY, Options, site_of
from gpucoll.integrations.native import door_of

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bcast",
    "gather",
    "has_cuda_support",
    "has_sycl_support",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]
__version__ = "0.9.0"

_MPI: Any = mpi4py.MPI
_ANY_SOURCE, _ANY_TAG = _MPI.ANY_SOURCE, _MPI.ANY_TAG
_NO_TOKEN = object()
_default = _MPI.COMM_WORLD.Clone()
gcj.barrier  # noqa: B018 - registers what XLA calls
for _one in (_default, _MPI.COMM_WORLD):
    door_of(_one._state.comm)  # collective: later, perhaps only some ranks send and receive


def allgather(x: Any, *, comm: Any = None, token: Any = _NO_TOKEN) -> Any:
    """Return the arrays of all ranks, of shape (size, *x.shape)."""
    return gcj.all_gather(jnp.asarray(x)[None], comm=_comm(comm, token))


def allreduce(x: Any, op: Any, *, comm: Any = None, token: Any = _NO_TOKEN) -> Any:
    """Combine the arrays of all ranks."""
    found = _comm(comm, token)
    return gcj.all_reduce(jnp.asarray(x), _op(op), comm=found, gradient=IDENTITY)


def alltoall(x: Any, *, comm: Any = None, token: Any = _NO_TOKEN) -> Any:
    """Send row s of x, of shape (size, ...), to rank s."""
    found, x = _comm(comm, token), jnp.asarray(x)
    if not x.ndim or x.shape[0] != found.world_size:
        raise ArgumentError("Alltoall input must have shape (nproc, ...)")
    return gcj.all_to_all(x, comm=found)


def barrier(*, comm: Any = None, token: Any = _NO_TOKEN) -> None:
    """Wait for all ranks."""
    gcj.barrier(comm=_comm(comm, token))


def bcast(x: Any, root: int, *, comm: Any = None, token: Any = _NO_TOKEN) -> Any:
    """Return the root's array."""
    found = _comm(comm, token)
    result = gcj.broadcast(jnp.asarray(x), root, comm=found)
    return x if found.rank == root else result


def gather(x: Any, root: int, *, comm: Any = None, token: Any = _NO_TOKEN) -> Any:
    """Return all arrays, of shape (size, *x.shape), on the root, and x elsewhere."""
    result = gcj.gather(jnp.asarray(x)[None], root, comm=_comm(comm, token))
    return x if result is None else result


def recv(
    x: Any,
    source: int = _ANY_SOURCE,
    *,
    tag: int = _ANY_TAG,
    comm: Any = None,
    status: Any = None,
    token: Any = _NO_TOKEN,
) -> Any:
    """Receive an array like x."""
    options = Options(
        Collective.RECV, source=source, recv_tag=tag, on_message=_filler(status)
    )  # fmt: skip
    template = jax.lax.stop_gradient(jnp.asarray(x))
    return call(site_of(_comm(comm, token), options), template)[0]


def reduce(x: Any, op: Any, root: int, *, comm: Any = None, token: Any = _NO_TOKEN) -> Any:
    """Combine the arrays of all ranks on the root; return x elsewhere."""
    result = gcj.reduce(jnp.asarray(x), _op(op), root, comm=_comm(comm, token))
    return x if result is None else result


def scan(x: Any, op: Any, *, comm: Any = None, token: Any = _NO_TOKEN) -> Any:
    """Combine the arrays of the ranks up to this one."""
    return gcj.scan(jnp.asarray(x), _op(op), comm=_comm(comm, token))


def scatter(x: Any, root: int, *, comm: Any = None, token: Any = _NO_TOKEN) -> Any:
    """Return this rank's row of the root's x, of shape (size, ...); elsewhere x is like a row."""
    found, x = _comm(comm, token), jnp.asarray(x)
    if found.rank != root:
        x = jnp.zeros((found.world_size, *x.shape), x.dtype)
    elif not x.ndim or x.shape[0] != found.world_size:
        raise ArgumentError("Scatter input must have shape (nproc, ...)")
    return gcj.scatter(x, root, comm=found)[0]


def send(x: Any, dest: int, *, tag: int = 0, comm: Any = None, token: Any = _NO_TOKEN) -> None:
    """Send an array."""
    gcj.send(jnp.asarray(x), dest, tag, comm=_comm(comm, token))


def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int = _ANY_TAG,
    comm: Any = None,
    status: Any = None,
    token: Any = _NO_TOKEN,
) -> Any:
    """Send an array, and receive one like recvbuf."""
    options = Options(
        Collective.SEND, dest=dest, source=source, tag=sendtag, recv_tag=recvtag,
        on_message=_filler(status),
    )  # fmt: skip
    template = jax.lax.stop_gradient(jnp.asarray(recvbuf))
    return call(site_of(_comm(comm, token), options), jnp.asarray(sendbuf), template)[0]


def has_cuda_support() -> bool:
    """Return whether arrays on NVIDIA's GPUs are served."""
    return True


def has_sycl_support() -> bool:
    """Return whether arrays on Intel's GPUs are served."""
    return False


def _comm(comm: Any, token: Any) -> Any:
    """Return gpucoll's communicator of one of mpi4py's."""
    if token is not _NO_TOKEN:
        raise RuntimeError(
            "mpi4jax 0.8 and newer take no token: calls keep their order by themselves; leave out "
            "token=, and the token among the results"
        )
    if comm is None:
        comm = _default
    if not isinstance(comm, _MPI.Intracomm):
        raise ArgumentTypeError(
            f'got unexpected type for argument "comm" (expected: Intracomm, got: {type(comm)})'
        )
    return comm._state.comm


def _op(op: Any) -> ReduceOp:
    if not isinstance(op, _MPI.Op):
        raise ArgumentTypeError(
            f'got unexpected type for argument "op" (expected: Op, got: {type(op)})'
        )
    if op._native is None:
        raise ArgumentError(
            f"{op} is not an op of gpucoll's arrays: use SUM, PROD, MIN, MAX, or a bitwise or "
            "logical one"
        )
    return ReduceOp.parse(op._native)


def _filler(status: Any) -> Any:
    if status is None:
        return None
    return lambda message: status.fill(message.source, message.tag, message.size_bytes)
