"""Which algorithm is taken: the first rule for the collective that fits, the same on every rank.

Rules are data, and look only at what all ranks know: bytes, hosts, the operation. Where recursive
doubling gives way to a ring in an all_reduce was measured (4 hosts at 1 Gbit/s: 270 against 423 us
at 16 KiB, 1092 against 827 at 64 KiB). The other limits are near where, by the model of `timing`,
two algorithms cross between 1 and 10 Gbit/s, at 25 us, and 65 us for what is forwarded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpucoll.algorithms.steps import power_below
from gpucoll.algorithms.table import Algorithm, Order, named
from gpucoll.errors import ArgumentError
from gpucoll.types import Collective

KIB: Final = 1024
MOST_LINKS: Final = 128
"""A rank keeps at most so many connections: what needs one to every other host stops there."""


@dataclass(frozen=True)
class Rule:
    """An algorithm, and when it may be taken.

    Parameters
    ----------
    name : str
        Of the algorithm, among those for the collective.
    up_to_bytes : float
        Only up to this size, inclusive.
    up_to_bytes_per_host : float
        Only up to this size times the number of hosts, inclusive.
    from_hosts : int
        Only for so many hosts or more.
    only_powers_of_two : bool
        Only for 1, 2, 4, 8 ... hosts.
    """

    name: str
    up_to_bytes: float = math.inf
    up_to_bytes_per_host: float = math.inf
    from_hosts: int = 1
    only_powers_of_two: bool = False

    def fits(self, size_bytes: int, hosts: int) -> bool:
        """Return whether size and hosts are such that the rule holds."""
        if size_bytes > min(self.up_to_bytes, self.up_to_bytes_per_host * hosts):
            return False
        if self.only_powers_of_two and hosts != power_below(hosts):
            return False
        return hosts >= self.from_hosts


RULES: Final[Mapping[Collective, Sequence[Rule]]] = {
    Collective.ALL_REDUCE: (
        Rule("recursive_doubling", up_to_bytes=32 * KIB),
        Rule(
            "halving_doubling",
            up_to_bytes_per_host=32 * KIB,
            from_hosts=8,
            only_powers_of_two=True,
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
    Collective.BROADCAST: (
        Rule("binomial_tree", up_to_bytes_per_host=2 * KIB),
        Rule("chain"),
    ),
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
    Collective.SCAN: (
        Rule("recursive_doubling", up_to_bytes_per_host=2 * KIB),
        Rule("chain"),
    ),
    Collective.EXCLUSIVE_SCAN: (
        Rule("recursive_doubling", up_to_bytes_per_host=2 * KIB),
        Rule("chain"),
    ),
    Collective.BARRIER: (Rule("dissemination"),),
}
"""Of each collective, in the order in which they are tried."""


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
        What the call does.
    size_bytes : int
        Of the larger array of a rank: input and output differ where blocks are gathered or
        scattered.
    hosts : int
        How many take part, at least 1.
    commutative : bool
        The operation may swap its operands; without, they are combined in the order of the ranks.
    ordered : bool
        The ranks are combined one after the other from rank 0 up, as one loop over them would.
    equal_blocks : bool
        All blocks have the same size (no counts).

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
