"""The placement of ranks on hosts."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hosts:
    """The ranks of each host.

    Attributes
    ----------
    ranks : tuple of tuple of int
        By host, its ranks in ascending order; the hosts are ordered by their first rank. That rank
        is the host's leader: it alone has connections to other hosts.
    """

    ranks: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(names: Sequence[object]) -> Hosts:
        """Return the placement of ranks, given by rank the name of its host."""
        found: dict[object, list[int]] = defaultdict(list)
        for rank, name in enumerate(names):
            found[name].append(rank)
        return Hosts(tuple(tuple(ranks) for ranks in found.values()))

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.ranks)

    @functools.cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(ranks) for ranks in self.ranks)

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (host, place)
            for host, ranks in enumerate(self.ranks)
            for place, rank in enumerate(ranks)
        }

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return self._places[rank][0]

    def place_of(self, rank: int) -> int:
        """Return the place of a rank among those of its host."""
        return self._places[rank][1]

    def elsewhere(self, host: int) -> tuple[int, ...]:
        """Return the ranks of all other hosts."""
        return tuple(rank for rank in range(self.world_size) if self.host_of(rank) != host)

    def leader_of(self, host: int) -> int:
        """Return the rank that leads a host."""
        return self.ranks[host][0]

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks in the order of their hosts."""
        return tuple(rank for ranks in self.ranks for rank in ranks)

    @functools.cached_property
    def is_in_order(self) -> bool:
        """Whether the order by hosts is that by ranks: each host's ranks are consecutive."""
        return self.order == tuple(range(self.world_size))

    def in_rank_order(self, by_host: Iterable[Iterable[bytes]]) -> list[bytes]:
        """Return in rank order what is given by host, and by place on each host."""
        flat = [item for items in by_host for item in items]
        return [item for _, item in sorted(zip(self.order, flat, strict=True), key=_first)]


def _first(pair: tuple[int, bytes]) -> int:
    return pair[0]


def neighbours(host: int, count: int) -> list[int]:
    """Return the hosts that this one has links to: at distances 1, 2, 4, ... in both directions.

    News from one host reaches all others in ``log2(count)`` steps.
    """
    found = set()
    distance = 1
    while distance < count:
        found |= {(host + distance) % count, (host - distance) % count}
        distance *= 2
    return sorted(found - {host})


_MOST_FEW = 16


def are_few(count: int) -> bool:
    """Return whether so few hosts may have a connection between each two for small calls."""
    return count <= _MOST_FEW


def partners(host: int, count: int) -> list[int]:
    """Return the hosts that this one has connections to for small calls."""
    if not are_few(count):
        return neighbours(host, count)
    return [other for other in range(count) if other != host]


def further_hosts(origin: int, here: int, count: int) -> list[int]:
    """Return the hosts to which this one forwards what `origin` sends to all.

    The hosts form a binomial tree around the circle. All the returned hosts are neighbours of this
    one, and every other host receives what `origin` sends exactly once.
    """
    offset, found = (here - origin) % count, []
    step = 1 << offset.bit_length()
    while offset + step < count:
        found.append((here + step) % count)
        step *= 2
    return found
