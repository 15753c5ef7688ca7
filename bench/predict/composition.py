"""How an all_reduce is composed, from the code that decides it when ranks run.

On one host it is one call through shared memory. Between hosts only one rank of each host, its
leader, sends. All calls begin with an exchange between the leaders. It carries the data of small
calls. Calls of middle size go from leader to leader; large ones go by a schedule, in pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from gpucoll.algorithms.choice import choose
from gpucoll.algorithms.table import Algorithm, named
from gpucoll.backends.cpu.world.sizes import pieces_of
from gpucoll.bench.predict.behaviour import Behaviour, Turn, behaviour_of, in_turn
from gpucoll.bench.predict.simulation import Network, Times, simulate
from gpucoll.collectives import Collective, Flow, Operands
from gpucoll.errors import ArgumentError
from gpucoll.group.world.exchanges import LEAST_PAIRWISE_BYTES, MOST_BYTES, most_pairwise_bytes
from gpucoll.transport.shared.words import Call
from gpucoll.transport.tcp.call_routes import route_of
from gpucoll.transport.tcp.exchange import HEADER_BYTES, PART_BYTES, whole_words
from gpucoll.transport.tcp.exchange_words import Exchange, Route

__all__ = [
    "Case",
    "Machine",
    "Memory",
    "all_reduce_s",
    "exchange",
    "pairwise",
    "schedule_s",
    "way_of",
]

ITEM_BYTES: Final = 4
"""Arrays are cut at whole items; predictions are for items of this size."""


class Case(NamedTuple):
    """An all_reduce: how many bytes, on how many ranks of how many hosts, as many on each."""

    size_bytes: int
    ranks: int
    hosts: int

    @property
    def per_host(self) -> int:
        """Number of ranks of each host."""
        return self.ranks // self.hosts


@dataclass(frozen=True)
class Memory:
    """The ranks of a host and the memory that they share, measured with `ranks` of them.

    Parameters
    ----------
    latency_s : float or ndarray
        A call without data. It grows with the number of other ranks, each of which is waited for.
    slot_s_per_byte : float or ndarray
        A byte of a small array, of which each rank reads all inputs.
    stage_s_per_byte : float or ndarray
        A byte of a larger array, of which each rank combines its share.
    memory_s_per_byte : float or ndarray
        The same if the arrays do not fit into the caches: ranks then share the memory's bandwidth.
    slot_bytes : int
        The largest array of which each rank reads all inputs.
    cached_bytes : float
        The largest sum of all ranks' inputs for which caches are large enough.
    ranks : int
        Number of ranks that were measured.
    """

    latency_s: float | Times = 0.0
    slot_s_per_byte: float | Times = 0.0
    stage_s_per_byte: float | Times = 0.0
    memory_s_per_byte: float | Times = 0.0
    slot_bytes: int = 64 << 10
    cached_bytes: float = np.inf
    ranks: int = 2

    def all_reduce_s(self, size_bytes: float, ranks: int) -> Times:
        """Return the time of an all_reduce of `ranks` ranks on one host."""
        if ranks == 1:
            return np.zeros_like(np.asarray(self.latency_s))
        latency = np.asarray(self.latency_s) * (ranks - 1) / max(self.ranks - 1, 1)
        if size_bytes <= self.slot_bytes:
            return latency + size_bytes * self.slot_s_per_byte * (ranks + 1) / (self.ranks + 1)
        if size_bytes * ranks <= self.cached_bytes:
            return latency + size_bytes * np.asarray(self.stage_s_per_byte)
        return latency + size_bytes * np.asarray(self.memory_s_per_byte) * ranks / self.ranks


@dataclass(frozen=True)
class Machine:
    """What is known of hosts and their network.

    Parameters
    ----------
    network : Network
        The connections between leaders.
    memory : Memory
        The ranks of each host.
    large_s : float or ndarray
        What Python prepares before the schedule of a large call.
    """

    network: Network
    memory: Memory = Memory()
    large_s: float | Times = 0.0


class Way(NamedTuple):
    """How a call goes between hosts: its route, and the name of its schedule if it has one."""

    route: Route
    name: str


def way_of(case: Case) -> Way:
    """Return how a call goes, as the code of all ranks decides it."""
    if case.ranks < 1 or case.hosts < 1 or case.ranks % case.hosts:
        raise ArgumentError(
            f"{case.ranks} ranks on {case.hosts} hosts: each host must have as many as the others"
        )
    words, call = Exchange.new(), Call.new()
    words.n_hosts, words.world_size, words.is_in_order = case.hosts, case.ranks, 1
    words.most_bytes, words.least_pairwise_bytes = MOST_BYTES, LEAST_PAIRWISE_BYTES
    words.most_pairwise_bytes = most_pairwise_bytes(case.hosts, has_fast_schedules=False)
    call.kernel, call.size_bytes = 1, case.size_bytes
    call.flow, call.operands = Flow.ALL, Operands.ALL
    route = Route(route_of(words, call))
    names = {Route.SMALL: "exchange", Route.PAIRWISE: "pairwise"}
    name = names.get(route) or choose(Collective.ALL_REDUCE, case.size_bytes, case.hosts).name
    return Way(route, name)


def exchange(hosts: int, data_bytes: int) -> Behaviour:
    """Return the turns of the exchange that begins each call, in bytes.

    It is Bruck's all-gather: in each step a leader sends on the parts that it has.
    """
    part = PART_BYTES + whole_words(data_bytes)
    distances = [1 << step for step in range((hosts - 1).bit_length())]
    sizes = [float(HEADER_BYTES + min(far, hosts - far) * part) for far in distances]
    return in_turn([Turn(size, size) for size in sizes])


def pairwise(hosts: int, per_host: int) -> Behaviour:
    """Return the turns of a call of middle size, in shares of the array.

    Each leader sends to each other one that host's share of its ranks' inputs, all at once, and
    then the combined share of its own host.
    """
    given = Turn(float(per_host), float(per_host), reduces=True, waits=False)
    return in_turn(
        [given] * (hosts - 1) + [Turn(1.0, 1.0), *[Turn(1.0, 1.0, waits=False)] * (hosts - 2)]
    )


def all_reduce_s(case: Case, machine: Machine) -> Times:
    """Return the predicted time of an all_reduce: a lower bound, in seconds.

    Cost: milliseconds; for thousands of hosts the first call takes seconds.
    """
    size, hosts = case.size_bytes, case.hosts
    inside = machine.memory.all_reduce_s
    if hosts == 1:
        return inside(size, case.per_host)
    way, network = way_of(case), machine.network
    brought = size * case.per_host if way.route == Route.SMALL else 0
    total = simulate(exchange(hosts, brought), 1, network)
    if way.route != Route.LARGE:
        if way.route == Route.PAIRWISE:
            total = total + simulate(pairwise(hosts, case.per_host), size / hosts, network)
        # Inputs go to the leader through shared memory, and what comes goes to all ranks.
        return total + 2 * inside(size, case.per_host)
    return (
        total + machine.large_s + schedule_s(case, named(Collective.ALL_REDUCE, way.name), machine)
    )


def schedule_s(case: Case, algorithm: Algorithm, machine: Machine) -> Times:
    """Return the time of the schedule of a large call, in pieces, with the parts inside hosts."""
    inside = machine.memory.all_reduce_s
    pieces = [piece.stop - piece.start for piece in pieces_of(case.size_bytes, ITEM_BYTES)]
    starts = np.cumsum([inside(piece, case.per_host) for piece in pieces], axis=0)
    unit = case.size_bytes / len(pieces) / algorithm.blocks(case.hosts)
    behaviour = behaviour_of(algorithm, case.hosts)
    between = simulate(behaviour, unit, machine.network, list(starts))
    return between + inside(pieces[-1], case.per_host)


SHARES: Final = {
    "latency": ("network.latency_s", "network.overhead_s", "network.gap_s"),
    "bandwidth": ("network.seconds_per_byte",),
    "reduction": ("network.reduce_s_per_byte",),
    "shared memory": (
        "memory.latency_s",
        "memory.slot_s_per_byte",
        "memory.stage_s_per_byte",
        "memory.memory_s_per_byte",
    ),
    "preparation": ("large_s",),
}
"""What a predicted time consists of: the parameters of each share."""
