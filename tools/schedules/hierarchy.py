"""Several ranks per host: a step inside each host, a schedule between hosts, a step inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpucoll.algorithms.cost import divide
from gpucoll.algorithms.table import Algorithm
from gpucoll.collectives import Collective, Data, Flow
from gpucoll.errors import ArgumentError
from schedules.contents import Contents
from schedules.simulation import run
from schedules.timing import Network, predict

ONE_CARRIES_UP_TO_BYTES: Final = 32 * 1024
"""Up to this size one rank of each host carries all of it; above, each carries its share."""


@dataclass(frozen=True)
class Inside:
    """The connection of the ranks inside one host.

    Parameters
    ----------
    latency_s : float
        Latency of a step in which all of them take part.
    bytes_per_s : float
        Rate at which each rank reads and writes the larger array in it.
    """

    latency_s: float = 5e-6
    bytes_per_s: float = 5e9

    def __post_init__(self) -> None:
        if not self.latency_s >= 0 or not self.bytes_per_s > 0:
            raise ArgumentError(
                f"inside a host: a latency of {self.latency_s} s, {self.bytes_per_s} bytes/s; at "
                "least 0 and more than 0 are needed"
            )

    def step_s(self, size_bytes: int) -> float:
        """Return the duration of a step."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Prediction:
    """The duration of a call, in seconds: inside the hosts, between them, and inside again."""

    before_s: float
    between_s: float
    after_s: float

    @property
    def total_s(self) -> float:
        """Duration of the whole call if nothing overlaps."""
        return self.before_s + self.between_s + self.after_s


def carriers(size_bytes: int, ranks_per_host: int) -> int:
    """Return how many ranks of a host each carry a share to other hosts."""
    return ranks_per_host if size_bytes > ONE_CARRIES_UP_TO_BYTES else 1


def predict_call(
    algorithm: Algorithm,
    size_bytes: int,
    hosts: int,
    ranks_per_host: int,
    network: Network,
    inside: Inside,
    root: int = 0,
) -> Prediction:
    """Return the duration of a call with `ranks_per_host` ranks on each host.

    Parameters
    ----------
    algorithm : Algorithm
        The algorithm between the hosts.
    size_bytes : int
        Size of the larger array of a rank: input and output differ if blocks are gathered or
        scattered.
    hosts, ranks_per_host : int
        Number of hosts, and of ranks on each.
    network, inside : Network, Inside
        The connections between hosts, and inside a host.
    root : int
        The host of the root.
    """
    if hosts < 1 or ranks_per_host < 1:
        raise ArgumentError(f"{hosts} hosts with {ranks_per_host} ranks each: at least 1 of both")
    flows = carriers(size_bytes, ranks_per_host)
    shared = -(-size_bytes // flows)
    sizes = block_sizes(algorithm, shared, hosts)
    between = predict(algorithm.schedules(hosts, root), sizes, network, flows)
    step = inside.step_s(size_bytes) if ranks_per_host > 1 else 0.0
    return Prediction(
        step if _combines_first(algorithm.collective) else 0.0,
        between,
        step if algorithm.collective.flow != Flow.TO_ROOT else 0.0,
    )


def _combines_first(collective: Collective) -> bool:
    """Return whether the ranks of a host first bring their data together."""
    return collective.flow != Flow.FROM_ROOT and collective is not Collective.ALL_GATHER


def block_sizes(algorithm: Algorithm, size_bytes: int, hosts: int) -> list[int]:
    """Return the size of each block of the working buffer, for an array of `size_bytes`.

    If the algorithm needs blocks of equal size, they may add up to more than the array.
    """
    blocks = algorithm.blocks(hosts)
    if algorithm.collective.data == Data.NOTHING:
        return [1] * blocks
    if algorithm.collective.is_exchange:
        return [-(-size_bytes // hosts)] * blocks
    if algorithm.equal_blocks:
        return [size_bytes] * blocks
    return divide(size_bytes, blocks)


def run_all_reduce(
    algorithm: Algorithm, hosts: int, ranks_per_host: int, contents: Contents, slices: Sequence[int]
) -> list[list[list[int]]]:
    """Run an all_reduce of ranks on hosts without payload; return the final blocks of the hosts.

    The array has a slice for each rank of a host. The ranks of a host first reduce each slice, in
    rank order, into the rank that carries it. The carriers of one slice on all hosts run the
    schedule. Then all ranks of a host have the results of its carriers.

    Parameters
    ----------
    algorithm : Algorithm
        An all_reduce between the hosts.
    hosts, ranks_per_host : int
        Number of hosts, and of ranks on each.
    contents : Contents
        A contribution is (ranks, slice, block): the world ranks of a host, as a range, reduced.
    slices : sequence of int
        The slices to run; all behave in the same way.

    Returns
    -------
    list of list of list of int
        For each slice and each host, the blocks.
    """
    blocks = range(algorithm.blocks(hosts))
    on_host = [range(host * ranks_per_host, (host + 1) * ranks_per_host) for host in range(hosts)]
    schedules = algorithm.schedules(hosts)
    results = []
    for part in slices:
        held = [[contents.leaf((ranks, part, block)) for block in blocks] for ranks in on_host]
        results.append(run(schedules, held, contents))
    return results
