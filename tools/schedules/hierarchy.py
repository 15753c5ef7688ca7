"""Several ranks per host: a step inside each host, a schedule between leaders, a step inside."""

from __future__ import annotations

from dataclasses import dataclass

from gpucoll.algorithms.cost import divide
from gpucoll.algorithms.table import Algorithm
from gpucoll.bench.predict.behaviour import behaviour_of
from gpucoll.bench.predict.simulation import Network, simulate
from gpucoll.collectives import Collective, Data, Flow
from gpucoll.errors import ArgumentError


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
    unit = sum(block_sizes(algorithm, size_bytes, hosts)) / algorithm.blocks(hosts)
    between = float(simulate(behaviour_of(algorithm, hosts, root), unit, network))
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
