"""Direct exchange between the root and the others: each block goes once, through no other rank.

The root has a link to every other rank, so this is for few hosts.
"""

from __future__ import annotations

from gpucoll.algorithms.steps import Span, Step, check_place


def gather(rank: int, size: int, root: int = 0) -> list[Step]:
    """Collect one block of each rank at the root; rank r begins with block r, of `size` blocks.

    All blocks may arrive at the same time: a step of the root never overwrites what another needs.

    Cost: size - 1 steps for the root, one for each other rank; each block sent once; size - 1
    links.
    """
    check_place(rank, size, root)
    if rank != root:
        return [Step(send_to=root, send=(Span(rank, 1),))]
    others = [other for other in range(size) if other != root]
    return [Step(receive_from=other, receive=(Span(other, 1),)) for other in others]


def scatter(rank: int, size: int, root: int = 0) -> list[Step]:
    """Give block r of the root to rank r, of `size` blocks: `gather` backwards.

    Cost: size - 1 steps for the root, one for each other rank; each block sent once; size - 1
    links.
    """
    check_place(rank, size, root)
    if rank != root:
        return [Step(receive_from=root, receive=(Span(rank, 1),))]
    others = [(root + distance) % size for distance in range(1, size)]
    return [Step(send_to=other, send=(Span(other, 1),)) for other in others]
