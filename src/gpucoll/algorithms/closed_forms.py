"""Upper bounds on the steps, blocks and links of any rank, as formulas of the number of ranks.

Each function takes the number of ranks and returns a `Cost` in which blocks have one byte; rooted
algorithms have root 0. For blocks of b bytes use ``ring_all_reduce(size).times(b)``. L is the
logarithm to base two, rounded up.
"""

from __future__ import annotations

from gpucoll.algorithms.cost import Cost
from gpucoll.algorithms.steps import distances, power_below


def _log(size: int) -> int:
    """Return the logarithm to base two, rounded up."""
    return (size - 1).bit_length()


def _neighbours(size: int) -> int:
    """Return the number of different neighbours of a rank in a ring."""
    return min(2, size - 1)


def _around(size: int) -> int:
    """Return the number of ranks at distances 1, 2, 4 ... above and below: at most 2 L."""
    return len({way * distance % size for distance in distances(size) for way in (1, -1)})


def _on_both_sides(size: int) -> int:
    """Return the most ranks that a rank has at distances 1, 2, 4 ... below and above, in a line."""
    last = size - 1
    below = range(last.bit_length())
    return max((bit + 1 + (last - (1 << bit)).bit_length() for bit in below), default=0)


def ring(size: int) -> Cost:
    """Return the cost of one round trip, reduce_scatter or all_gather: all blocks but one."""
    return Cost(size - 1, size - 1, size - 1, _neighbours(size))


def ring_all_reduce(size: int) -> Cost:
    """Return the cost of two round trips: 2 (size - 1) of size blocks."""
    return Cost(2 * (size - 1), 2 * (size - 1), 2 * (size - 1), _neighbours(size))


def recursive_doubling(size: int) -> Cost:
    """Return the cost of sending everything to L partners.

    If size is no power of two: the logarithm rounded down, and 2 more steps.
    """
    steps = _log(power_below(size))
    more = size != power_below(size)
    return Cost(steps + 2 * more, steps + more, steps + more, steps + more)


def recursive_doubling_of_blocks(size: int) -> Cost:
    """Return the cost of `recursive_doubling` with a buffer of `size` blocks."""
    return recursive_doubling(size).times(size)


def halving_doubling(size: int) -> Cost:
    """Return the cost of 2 (p - 1) of p blocks; p is the largest power of two up to size.

    If size is no power of two: 3 more steps, one and a half buffers sent, and one received.
    """
    count = power_below(size)
    steps, moved = 2 * _log(count), 2 * (count - 1)
    if count == size:
        return Cost(steps, moved, moved, _log(count))
    return Cost(steps + 3, moved + count // 2 + count, moved + count, _log(count) + 1)


def bruck_all_gather(size: int) -> Cost:
    """Return the cost of all blocks but one, in L steps."""
    return Cost(_log(size), size - 1, size - 1, _around(size))


def bruck_all_to_all(size: int) -> Cost:
    """Return the cost of L steps, each with the blocks whose number has that bit."""
    moved = 0
    for bit in distances(size):
        moved += size // (2 * bit) * bit + max(0, size % (2 * bit) - bit)
    return Cost(_log(size), moved, moved, _around(size))


def pairwise_all_to_all(size: int) -> Cost:
    """Return the cost of one step, one block and one link for every other rank."""
    return Cost(size - 1, size - 1, size - 1, size - 1)


def pairwise_reduce_scatter(size: int) -> Cost:
    """Return the cost of two passes over the others; first and last rank only send in one."""
    return Cost(2 * (size - 1), size - 1, size - 1, size - 1)


def tree_broadcast(size: int) -> Cost:
    """Return the cost of a root that sends everything L times."""
    return Cost(_log(size), _log(size), min(1, size - 1), _log(size))


def tree_reduce(size: int) -> Cost:
    """Return the cost of a root that receives everything L times."""
    return Cost(_log(size), min(1, size - 1), _log(size), _log(size))


def tree_gather(size: int) -> Cost:
    """Return the cost of a root that receives every other block once."""
    return Cost(_log(size), _largest_half(size), size - 1, _log(size))


def tree_scatter(size: int) -> Cost:
    """Return the cost of a root that sends every other block once."""
    return Cost(_log(size), size - 1, _largest_half(size), _log(size))


def direct_gather(size: int) -> Cost:
    """Return the cost of a root that receives every other block once, in one step each."""
    return Cost(size - 1, min(1, size - 1), size - 1, size - 1)


def direct_scatter(size: int) -> Cost:
    """Return the cost of a root that sends every other block once, in one step each."""
    return Cost(size - 1, size - 1, min(1, size - 1), size - 1)


def _largest_half(size: int) -> int:
    """Return the most blocks that a rank other than root 0 has below it, including its own."""
    if size == 1:
        return 0
    width = 1 << (_log(size) - 1)
    return max(size - width, width // 2)


def chain(size: int) -> Cost:
    """Return the cost of broadcast, reduce or scan: everything received and sent once."""
    return Cost(min(2, size - 1), min(1, size - 1), min(1, size - 1), _neighbours(size))


def chain_in_sequence(size: int) -> Cost:
    """Return the cost of a chain, and of a message from its last rank to the root."""
    passed = min(1, size - 1)
    return Cost(2 * passed, passed, passed, _neighbours(size))


def chain_all_reduce(size: int) -> Cost:
    """Return the cost of a chain up and down: everything twice, at the ends once."""
    twice = _neighbours(size)
    return Cost(2 * twice, twice, twice, twice)


def chain_of_blocks(size: int) -> Cost:
    """Return the cost of `chain_all_reduce` with a buffer of `size` blocks."""
    return chain_all_reduce(size).times(size)


def recursive_doubling_scan(size: int) -> Cost:
    """Return the cost of L steps; ranks in the middle have partners on both sides."""
    most = _on_both_sides(size)
    return Cost(_log(size), _log(size), _log(size), most)


def recursive_doubling_exclusive_scan(size: int) -> Cost:
    """Return the cost of a shift, then a scan over one rank less."""
    if size == 1:
        return Cost()
    steps = 1 + _log(size - 1)
    first = 1 + (size - 2).bit_length()  # rank 1: with rank 0, which does not scan
    return Cost(steps, steps, steps, max(_on_both_sides(size - 1), first))


def chain_exclusive_scan(size: int) -> Cost:
    """Return the cost of a shift, then a chain over one rank less."""
    twice = min(2, size - 1)
    return Cost(min(3, size - 1), twice, twice, twice)


def dissemination(size: int) -> Cost:
    """Return the cost of a token sent and one received in each of L steps."""
    return Cost(_log(size), _log(size), _log(size), _around(size))
