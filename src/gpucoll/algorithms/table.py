"""The table of algorithms, with the facts that are needed to run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Final

from gpucoll.algorithms import bruck, chain, direct, doubling, halving, pairwise, ring, trees
from gpucoll.algorithms import closed_forms as forms
from gpucoll.algorithms.cost import Cost
from gpucoll.algorithms.steps import Step
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError


class Order(IntEnum):
    """The order in which an algorithm combines operands; each permits the cases before it, too."""

    ANY = 0
    """Any: the operation must be commutative, and associative."""
    RANKS = 1
    """That of the ranks, with any brackets: the operation must be associative."""
    SEQUENCE = 2
    """((x0 op x1) op x2) op ...: as one loop over the ranks, so the same bits as that."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm for one collective.

    Parameters
    ----------
    collective : Collective
        The collective that it does.
    name : str
        Its name, among the algorithms for this collective.
    function : callable
        ``(rank, size) -> list[Step]``; ``(rank, size, root) -> list[Step]`` if `is_rooted`.
    blocks : callable
        ``size -> int``: the number of blocks in the working buffer.
    largest : callable
        ``size -> Cost``: the bounds for any rank, with root 0 and blocks of one byte.
    order : Order
        The order of the operands, if it reduces.
    numbering : module or None
        For all_to_all: a module with `outgoing` and `incoming`, which map ranks to blocks.
    equal_blocks : bool
        Whether all blocks must have one size. Otherwise each may have its own, the same on all
        ranks (and possibly 0).
    """

    collective: Collective
    name: str
    function: Callable[..., list[Step]]
    blocks: Callable[[int], int]
    largest: Callable[[int], Cost]
    order: Order = Order.ANY
    numbering: ModuleType | None = None
    equal_blocks: bool = False

    @property
    def is_rooted(self) -> bool:
        """Whether one rank gives or gets all data."""
        return self.collective.has_root

    @property
    def reduces(self) -> bool:
        """Whether it combines the ranks' data."""
        return self.collective.reduces

    def steps(self, rank: int, size: int, root: int = 0) -> list[Step]:
        """Return a rank's steps; `root` only matters if `is_rooted`."""
        return self.function(rank, size, root) if self.is_rooted else self.function(rank, size)

    def schedules(self, size: int, root: int = 0) -> list[list[Step]]:
        """Return the steps of each rank."""
        return [self.steps(rank, size, root) for rank in range(size)]


def _one(size: int) -> int:
    return 1


def _two(size: int) -> int:
    return 2


def _each(size: int) -> int:
    return size


def _twice_each(size: int) -> int:
    return 2 * size


_C = Collective
ALGORITHMS: Final[Sequence[Algorithm]] = (
    Algorithm(_C.ALL_REDUCE, "ring", ring.all_reduce, _each, forms.ring_all_reduce),
    Algorithm(
        _C.ALL_REDUCE,
        "recursive_doubling",
        doubling.all_reduce,
        _one,
        forms.recursive_doubling,
        Order.RANKS,
    ),
    Algorithm(
        _C.ALL_REDUCE,
        "halving_doubling",
        halving.all_reduce,
        halving.blocks,
        forms.halving_doubling,
        Order.RANKS,
    ),
    Algorithm(
        _C.ALL_REDUCE, "chain", chain.all_reduce, _one, forms.chain_all_reduce, Order.SEQUENCE
    ),
    Algorithm(_C.REDUCE_SCATTER, "ring", ring.reduce_scatter, _each, forms.ring),
    Algorithm(
        _C.REDUCE_SCATTER,
        "recursive_doubling",
        doubling.reduce_scatter,
        _each,
        forms.recursive_doubling_of_blocks,
        Order.RANKS,
    ),
    Algorithm(
        _C.REDUCE_SCATTER,
        "pairwise",
        pairwise.reduce_scatter,
        _each,
        forms.pairwise_reduce_scatter,
        Order.RANKS,
    ),
    Algorithm(
        _C.REDUCE_SCATTER,
        "chain",
        chain.reduce_scatter,
        _each,
        forms.chain_of_blocks,
        Order.SEQUENCE,
    ),
    Algorithm(_C.ALL_GATHER, "ring", ring.all_gather, _each, forms.ring),
    Algorithm(_C.ALL_GATHER, "bruck", bruck.all_gather, _each, forms.bruck_all_gather),
    Algorithm(_C.BROADCAST, "binomial_tree", trees.broadcast, _one, forms.tree_broadcast),
    Algorithm(_C.BROADCAST, "chain", chain.broadcast, _one, forms.chain),
    Algorithm(_C.REDUCE, "binomial_tree", trees.reduce, _one, forms.tree_reduce, Order.RANKS),
    Algorithm(_C.REDUCE, "chain", chain.reduce, _one, forms.chain),
    Algorithm(
        _C.REDUCE,
        "chain_in_sequence",
        chain.reduce_in_sequence,
        _one,
        forms.chain_in_sequence,
        Order.SEQUENCE,
    ),
    Algorithm(_C.GATHER, "direct", direct.gather, _each, forms.direct_gather),
    Algorithm(_C.SCATTER, "direct", direct.scatter, _each, forms.direct_scatter),
    Algorithm(_C.GATHER, "binomial_tree", trees.gather, _each, forms.tree_gather),
    Algorithm(_C.SCATTER, "binomial_tree", trees.scatter, _each, forms.tree_scatter),
    Algorithm(
        _C.ALL_TO_ALL,
        "pairwise",
        pairwise.all_to_all,
        _twice_each,
        forms.pairwise_all_to_all,
        numbering=pairwise,
    ),
    Algorithm(
        _C.ALL_TO_ALL,
        "bruck",
        bruck.all_to_all,
        _twice_each,
        forms.bruck_all_to_all,
        numbering=bruck,
        equal_blocks=True,
    ),
    Algorithm(
        _C.SCAN,
        "recursive_doubling",
        doubling.scan,
        _one,
        forms.recursive_doubling_scan,
        Order.RANKS,
    ),
    Algorithm(_C.SCAN, "chain", chain.scan, _one, forms.chain, Order.SEQUENCE),
    Algorithm(
        _C.EXCLUSIVE_SCAN,
        "recursive_doubling",
        doubling.exclusive_scan,
        _two,
        forms.recursive_doubling_exclusive_scan,
        Order.RANKS,
        equal_blocks=True,
    ),
    Algorithm(
        _C.EXCLUSIVE_SCAN,
        "chain",
        chain.exclusive_scan,
        _two,
        forms.chain_exclusive_scan,
        Order.SEQUENCE,
        equal_blocks=True,
    ),
    Algorithm(
        _C.BARRIER, "dissemination", doubling.barrier, _two, forms.dissemination, equal_blocks=True
    ),
)
"""All algorithms. `gpucoll.algorithms.choice` selects one of them."""


def algorithms_for(collective: Collective) -> list[Algorithm]:
    """Return all algorithms for a collective."""
    return [one for one in ALGORITHMS if one.collective is collective]


def named(collective: Collective, name: str) -> Algorithm:
    """Return an algorithm by its name among those for a collective.

    Raises
    ------
    ArgumentError
        There is none of that name; the message lists the names.
    """
    found = {one.name: one for one in algorithms_for(collective)}
    if name not in found:
        there_are = ", ".join(found) or "none"
        raise ArgumentError(
            f"no algorithm {name!r} for {collective.spelled}: there are {there_are}"
        )
    return found[name]
