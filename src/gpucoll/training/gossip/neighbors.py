"""One round of gossip: each rank takes a weighted sum of its own array and its neighbours'."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gpucoll import ArgumentError, ArgumentTypeError, Communicator, wait_all
from gpucoll.training.gossip.exchange import (
    FLOATS,
    Description,
    agreed,
    compare,
    describe,
    exchange,
    plain,
    problem_of_number,
    problem_of_ranks,
    rank_of,
    stored,
)
from gpucoll.training.gossip.topology import Topology

__all__ = ["consensus", "neighbor_all_reduce"]

CALL = "neighbor_all_reduce"
HEADERS, ARRAYS = 2**31 - 11, 2**31 - 12
"""Tags of the messages, on the caller's communicator."""


def neighbor_all_reduce(
    comm: Communicator,
    x: Any,
    *,
    weights: Mapping[int, float] | None = None,
    self_weight: float | None = None,
    topology: Topology | None = None,
    step: int = 0,
    out: Any = None,
    timeout_s: float | None = None,
) -> Any:
    """Return the weighted sum of this rank's array and those of its neighbours, in rank order.

    With `topology` every rank knows its neighbours and waits for no other rank. With `weights` each
    rank names only those from whom it takes; the ranks first exchange these names, so the call
    waits for all ranks.

    Parameters
    ----------
    comm : Communicator
        Every rank makes the same calls in the same order.
    x : array
        The same shape and dtype on all neighbours; float or complex. Sums and products are rounded
        as x's library does.
    weights : mapping of int to float, optional
        Other ranks, and the weight of each one's x. They may differ on every rank; an empty mapping
        takes from none.
    self_weight : float, optional
        The weight of this rank's own x. Default: what `weights` leave of one.
    topology : Topology, optional
        Instead of `weights`: a topology of `gossip.topology`, the same on every rank.
    step : int
        The number of the round, if the topology has several.
    out : array, optional
        Destination of the result, may be x. Default: a new array.
    timeout_s : float, optional
        Deadline of each message, in seconds. Default: the communicator's.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An argument is invalid. With `weights`, every rank raises an error; with a topology this
        rank and its neighbours do.
    MismatchError
        Neighbours differ in shape, dtype, topology or round. Nothing was moved.
    DeadlineError, PeerLostError
        A neighbour did not make the call in time, or is gone.

    Notes
    -----
    Cost: n bytes to each neighbour, and a small message to each before that.
    """
    if (topology is None) == (weights is None):
        raise ArgumentError(f"{CALL} on {rank_of(comm)} needs either topology= or weights=")
    if topology is not None:
        if self_weight is not None:
            raise ArgumentError(f"{CALL}: a topology has its own weights: leave self_weight out")
        _check_topology(comm, topology)
        mine = describe(CALL, x, FLOATS, f", {topology!r} {topology.digest}, step {step}", out)
        row = {comm.rank: float(topology.matrix(step)[comm.rank, comm.rank])}
        row.update(topology.sources(comm.rank, step))
        destinations = topology.destinations(comm.rank, step)
        told = _told_by(comm, mine, {*row, *destinations} - {comm.rank}, timeout_s)
        agreeing = {rank for rank, other in told.items() if other == mine and not mine.problem}
        destinations = [rank for rank in destinations if rank in agreeing]
        sources = sorted(row.keys() & agreeing)
    else:
        row, destinations = _agreed_weights(comm, x, out, weights, self_weight, timeout_s)
        mine, told, sources = Description(CALL), {}, sorted(row.keys() - {comm.rank})
    x = plain(x)
    received = exchange(comm, x, sources, destinations, ARRAYS, timeout_s)
    compare(comm, mine, told)  # only now: neighbours that agree with this rank wait for its array
    arrays = {comm.rank: x, **dict(zip(sources, received, strict=True))}
    total = sum(arrays[rank] * row[rank] for rank in sorted(row))
    return stored(total, x, out)


def consensus(comm: Communicator, x: Any, *, timeout_s: float | None = None) -> float:
    """Return how far the ranks are apart: the root mean square of their distances from the mean.

    That is ``sqrt(sum(norm(x_r - mean)**2 for each rank r) / ranks)``, the same number on every
    rank; 0 if all have the same array. Collective: two all-reduces.

    Parameters
    ----------
    comm : Communicator
    x : array
        The same shape and dtype on all ranks; float or complex.
    timeout_s : float, optional
        Deadline of each all-reduce, in seconds. Default: the communicator's.
    """
    mine = describe("consensus", x, FLOATS)
    if mine.problem:
        raise ArgumentTypeError(f"consensus on {rank_of(comm)}: {mine.problem}")
    x = plain(x)
    distances = abs(x - comm.all_reduce(x, "avg", timeout_s=timeout_s))
    count = math.prod(mine.shape)
    largest = float(distances.max()) if count else 0.0
    # by their mean, since the sum of many squares may be beyond float16
    squares = float(((distances / largest) ** 2).mean()) * count * largest**2 if largest else 0.0
    total = comm.all_reduce(squares, timeout_s=timeout_s)
    return math.sqrt(float(total) / comm.world_size)


def _check_topology(comm: Communicator, topology: Topology) -> None:
    if not isinstance(topology, Topology):
        raise ArgumentTypeError(
            f"{CALL}: topology must be one of gossip.topology, such as topology.ring(n); got "
            f"{type(topology).__name__}. A matrix goes through topology.from_matrix"
        )
    if topology.world_size != comm.world_size:
        raise ArgumentError(
            f"{CALL} on {rank_of(comm)}: the topology is of {topology.world_size} ranks, the "
            f"communicator of {comm.world_size}"
        )


def _told_by(
    comm: Communicator, mine: Description, neighbors: set[int], timeout_s: float | None
) -> dict[int, Description]:
    """Exchange descriptions with all neighbours, in both directions."""
    ranks = sorted(neighbors)
    how: Any = {"async_op": True, "timeout_s": timeout_s}
    coming = [comm.recv(source=rank, tag=HEADERS, **how) for rank in ranks]
    header = np.frombuffer(mine.encoded(), np.uint8)  # arrays: unlike objects they are not pickled
    going = [comm.send(header, rank, HEADERS, **how) for rank in ranks]
    told = [Description.decoded(array.tobytes()) for array in wait_all(coming)]
    wait_all(going)
    return dict(zip(ranks, told, strict=True))


def _agreed_weights(
    comm: Communicator, x: Any, out: Any, weights: Any, self_weight: Any, timeout_s: float | None
) -> tuple[dict[int, float], list[int]]:
    """Exchange all ranks' weights; return this rank's, its own among them, and who takes its x."""
    row: dict[int, float] = {}
    if not isinstance(weights, Mapping):
        problem = f"weights must be a mapping of ranks to weights; got {type(weights).__name__}"
    else:
        problem = problem_of_ranks(comm, "weights", [*weights])
        for rank, weight in weights.items():
            problem = problem or problem_of_number(f"the weight of rank {rank}", weight)
    if self_weight is not None:
        problem = problem or problem_of_number("self_weight", self_weight)
    if not problem:
        row = {int(rank): float(weight) for rank, weight in weights.items()}
    told = agreed(comm, describe(CALL, x, FLOATS, out=out), problem, [*row], timeout_s)
    row[comm.rank] = 1 - math.fsum(row.values()) if self_weight is None else float(self_weight)
    return row, [rank for rank, sources in enumerate(told) if comm.rank in sources]
