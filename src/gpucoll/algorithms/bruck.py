"""Bruck's algorithms: logarithmically many steps, for any number of ranks."""

from __future__ import annotations

import functools

from gpucoll.algorithms.steps import Span, Step, check_place, distances, spans


def all_gather(rank: int, size: int) -> list[Step]:
    """Give every rank all blocks; rank r begins with block r, of `size` blocks.

    Before the step of distance d a rank has d blocks, beginning with its own (the first block
    follows the last). It sends them to the rank d below and gets the next d from the rank d above.
    The last step moves the blocks that are still missing. Blocks go directly to their places:
    blocks that wrap around are two spans.

    Cost: log2 size steps, rounded up; all blocks but one sent, and all but one's own received; 2
    links a step, or one if the distance is half of size.
    Source: Bruck, Ho, Kipnis, Upfal, Weathersby 1997.
    """
    check_place(rank, size)
    steps = []
    for distance in distances(size):
        count = min(distance, size - distance)
        steps.append(
            Step(
                send_to=(rank - distance) % size,
                send=spans(rank, count, size),
                receive_from=(rank + distance) % size,
                receive=spans(rank + distance, count, size),
            )
        )
    return steps


def all_to_all(rank: int, size: int) -> list[Step]:
    """Exchange blocks of equal size between all ranks, each through several ranks.

    Blocks are numbered by distance: block d, below `size`, is for the rank d above (`outgoing`). It
    gets there in steps of 1, 2, 4 ..., one for each bit of d. In each step a rank replaces the
    blocks that it sends by equally many from below. Each step of a block moves it to the other half
    of the working buffer (2 x size blocks, so nothing is written where it is sent from); `incoming`
    returns the half in which a block ends. A block is in turn in places of several ranks, so all
    must have the same size. The block for the rank itself, number 0, never moves.

    Cost: log2 size steps, rounded up; in each at most half of the blocks, rounded up; 2 links a
    step, or one if the distance is half of size.
    Source: Bruck, Ho, Kipnis, Upfal, Weathersby 1997.
    """
    check_place(rank, size)
    return [
        Step((rank + distance) % size, leave, (rank - distance) % size, reach)
        for distance, leave, reach in _hops(size)
    ]


@functools.lru_cache(maxsize=16)
def _hops(size: int) -> list[tuple[int, tuple[Span, ...], tuple[Span, ...]]]:
    """Return each step's distance, and the moves of blocks in it: the same on all ranks."""
    found = []
    for distance in distances(size):
        moved = [block for block in range(size) if block & distance]
        hops = {block: (block & (distance - 1)).bit_count() for block in moved}
        leave = [block + size * (hops[block] % 2) for block in moved]
        reach = [block + size * ((hops[block] + 1) % 2) for block in moved]
        found.append((distance, _runs(leave), _runs(reach)))
    return found


def outgoing(rank: int, size: int, peer: int) -> int:
    """Return the block with this rank's data for `peer` before `all_to_all`."""
    return (peer - rank) % size


def incoming(rank: int, size: int, peer: int) -> int:
    """Return the block with the data from `peer` after `all_to_all`."""
    distance = (rank - peer) % size
    return distance + size * (distance.bit_count() % 2)


def _runs(blocks: list[int]) -> tuple[Span, ...]:
    """Return blocks, in their order, as the fewest spans."""
    found: list[Span] = []
    for block in blocks:
        if found and found[-1].first + found[-1].count == block:
            found[-1] = Span(found[-1].first, found[-1].count + 1)
        else:
            found.append(Span(block, 1))
    return tuple(found)
