"""The choice of an algorithm: the first rule for the collective that fits, the same on every rank.

Rules are data, and depend only on what all ranks know: bytes, hosts, the operation. The size at
which a ring replaces recursive doubling in an all_reduce was measured (4 hosts at 1 Gbit/s: 270
against 423 us at 16 KiB, 1092 against 827 at 64 KiB). The other limits are near the sizes at which,
by a model of the network, two algorithms take the same time between 1 and 10 Gbit/s, at 25 us, or
65 us for forwarded data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpucoll.algorithms.steps import power_below
from gpucoll.algorithms.table import Algorithm, Order, named
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError

KIB: Final = 1024
MOST_LINKS: Final = 128
"""The most connections of a rank: algorithms that need one to every other host end there."""


@dataclass(frozen=True)
class Rule:
    """An algorithm, and the conditions for choosing it.

    Parameters
    ----------
    name : str
        The algorithm's name, among those for the collective.
    up_to_bytes : float
        Only up to this size, inclusive.
    up_to_bytes_per_host : float
        Only up to this size times the number of hosts, inclusive.
    from_hosts : int
        Only for this number of hosts or more.
    only_powers_of_two : bool
        Only for 1, 2, 4, 8 ... hosts.
    """

    name: str
    up_to_bytes: float = math.inf
    up_to_bytes_per_host: float = math.inf
    from_hosts: int = 1
    only_powers_of_two: bool = False

    def fits(self, size_bytes: int, hosts: int) -> bool:
        """Return whether the rule permits this size and number of hosts."""
        if size_bytes > min(self.up_to_bytes, self.up_to_bytes_per_host * hosts):
            return False
        if self.only_powers_of_two and hosts != power_below(hosts):
            return False
        return hosts >= self.from_hosts


RULES: Final[Mapping[Collective, Sequence[Rule]]] = {
    Collective.ALL_REDUCE: (
        Rule("recursive_doubling", up_to_bytes=32 * KIB),
        Rule(
            "halving_doubling", up_to_bytes_per_host=32 * KIB, from_hosts=8, only_powers_of_two=True
        ),
        Rule("halving_doubling", up_to_bytes_per_host=2 * KIB, from_hosts=8),
        Rule("ring"),
        Rule("halving_doubling", only_powers_of_two=True),
        Rule("halving_doubling", up_to_bytes_per_host=8 * KIB),
        Rule("chain"),
    ),
    Collective.REDUCE_SCATTER: (
        Rule("recursive_doubling", up_to_bytes=32 * KIB, up_to_bytes_per_host=2 * KIB),
        Rule("ring"),
        Rule("pairwise"),
        Rule("chain"),
    ),
    Collective.ALL_GATHER: (Rule("bruck", up_to_bytes_per_host=32 * KIB), Rule("ring")),
    Collective.BROADCAST: (Rule("binomial_tree", up_to_bytes_per_host=2 * KIB), Rule("chain")),
    Collective.REDUCE: (
        Rule("binomial_tree", up_to_bytes_per_host=2 * KIB),
        Rule("chain"),
        Rule("chain_in_sequence"),
    ),
    Collective.GATHER: (Rule("direct"), Rule("binomial_tree")),
    Collective.SCATTER: (Rule("direct"), Rule("binomial_tree")),
    Collective.ALL_TO_ALL: (
        Rule("bruck", up_to_bytes_per_host=1 * KIB, from_hosts=4),
        Rule("pairwise"),
        Rule("bruck"),
    ),
    Collective.SCAN: (Rule("recursive_doubling", up_to_bytes_per_host=2 * KIB), Rule("chain")),
    Collective.EXCLUSIVE_SCAN: (
        Rule("recursive_doubling", up_to_bytes_per_host=2 * KIB),
        Rule("chain"),
    ),
    Collective.BARRIER: (Rule("dissemination"),),
}
"""The rules of each collective, in the order in which they are tried."""


def choose(
    collective: Collective,
    size_bytes: int,
    hosts: int,
    *,
    commutative: bool = True,
    ordered: bool = False,
    equal_blocks: bool = True,
) -> Algorithm:
    """Return the algorithm for a call.

    Parameters
    ----------
    collective : Collective
        The collective of the call.
    size_bytes : int
        Size of the larger array of a rank: input and output differ if blocks are gathered or
        scattered.
    hosts : int
        Number of participants, at least 1.
    commutative : bool
        Whether operands may be swapped. If not, they are combined in rank order.
    ordered : bool
        Whether the ranks must be combined one after the other from rank 0 up, as in one loop over
        them.
    equal_blocks : bool
        Whether all blocks have the same size (no counts).

    Raises
    ------
    ArgumentError
        There is none: no schedule for the collective, or all need more than `MOST_LINKS` links.
    """
    if hosts < 1 or size_bytes < 0:
        raise ArgumentError(f"{size_bytes} bytes on {hosts} hosts: 0 or more on at least 1")
    if collective not in RULES:
        there_are = ", ".join(sorted(one.spelled for one in RULES))
        raise ArgumentError(f"no schedule for {collective.spelled}: there are {there_are}")
    needed = Order.SEQUENCE if ordered else Order.ANY if commutative else Order.RANKS
    for rule in RULES[collective]:
        algorithm = named(collective, rule.name)
        if (
            rule.fits(size_bytes, hosts)
            and (algorithm.order >= needed or not algorithm.reduces)
            and (equal_blocks or not algorithm.equal_blocks)
            and algorithm.largest(hosts).links <= MOST_LINKS
        ):
            return algorithm
    raise ArgumentError(
        f"{collective.spelled} between {hosts} hosts with blocks of different sizes: each host "
        f"needs a connection to every other, and keeps at most {MOST_LINKS}; make the blocks equal "
        "(padding them), or split the communicator"
    )
