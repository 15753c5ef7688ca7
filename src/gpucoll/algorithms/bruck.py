"""Bruck's algorithms: as many steps as the logarithm, for any number of ranks."""

from __future__ import annotations

import functools

from gpucoll.algorithms.steps import Span, Step, check_place, distances, spans


def all_gather(rank: int, size: int) -> list[Step]:
    """Give every rank all blocks; rank r begins with block r, of `size` blocks.

    Before the step of distance d a rank has the d blocks from its own on (after the last comes the
    first). It gives them to the rank d below and gets the next d from the rank d above; the last
    step moves what is still missing. Blocks go straight to their place: what wraps is two spans.

    Cost: log2 size steps, rounded up; all blocks but one sent, and all but one's own received; 2
    links a step, one where the distance is half of size.
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
    """Exchange blocks of equal size between all, each by way of several ranks.

    Blocks are numbered by distance: block d, below `size`, is what goes to the rank d above
    (`outgoing`). It goes there by steps of 1, 2, 4 ... for each bit of d, one for one with what
    comes from below. Each such hop of a block puts it into the other half of the working buffer (2
    x size blocks, so nothing is written where it is sent from); `incoming` says in which half a
    block ends. A block lies in turn in places of several ranks: all must be of one size. The block
    for oneself, number 0, never moves.

    Cost: log2 size steps, rounded up; in each at most half of the blocks, rounded up; 2 links a
    step, one where the distance is half of size.
    Source: Bruck, Ho, Kipnis, Upfal, Weathersby 1997.
    """
    check_place(rank, size)
    return [
        Step((rank + distance) % size, leave, (rank - distance) % size, reach)
        for distance, leave, reach in _hops(size)
    ]


@functools.lru_cache(maxsize=16)
def _hops(size: int) -> list[tuple[int, tuple[Span, ...], tuple[Span, ...]]]:
    """Return, of each step, its distance, and from where to where blocks go: on all ranks alike."""
    found = []
    for distance in distances(size):
        moved = [block for block in range(size) if block & distance]
        hops = {block: (block & (distance - 1)).bit_count() for block in moved}
        leave = [block + size * (hops[block] % 2) for block in moved]
        reach = [block + size * ((hops[block] + 1) % 2) for block in moved]
        found.append((distance, _runs(leave), _runs(reach)))
    return found


def outgoing(rank: int, size: int, peer: int) -> int:
    """Return the block in which, before `all_to_all`, lies what this rank has for `peer`."""
    return (peer - rank) % size


def incoming(rank: int, size: int, peer: int) -> int:
    """Return the block in which, after `all_to_all`, lies what has come from `peer`."""
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
