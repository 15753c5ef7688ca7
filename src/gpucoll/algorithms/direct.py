"""Straight between the root and each other rank: each block goes once, and none through others.

A link between the root and every other rank, so it is for few hosts.
"""

from __future__ import annotations

from gpucoll.algorithms.steps import Span, Step, check_place


def gather(rank: int, size: int, root: int = 0) -> list[Step]:
    """Collect one block of each rank at the root; rank r begins with block r, of `size` blocks.

    All blocks may come at the same time: the root's steps overwrite nothing that another one needs.

    Cost: size - 1 steps of the root, one of each other rank; each block sent once; size - 1 links.
    """
    check_place(rank, size, root)
    if rank != root:
        return [Step(send_to=root, send=(Span(rank, 1),))]
    others = [other for other in range(size) if other != root]
    return [Step(receive_from=other, receive=(Span(other, 1),)) for other in others]


def scatter(rank: int, size: int, root: int = 0) -> list[Step]:
    """Give block r of the root to rank r, of `size` blocks: `gather` backwards.

    Cost: size - 1 steps of the root, one of each other rank; each block sent once; size - 1 links.
    """
    check_place(rank, size, root)
    if rank != root:
        return [Step(receive_from=root, receive=(Span(rank, 1),))]
    others = [(root + distance) % size for distance in range(1, size)]
    return [Step(send_to=other, send=(Span(other, 1),)) for other in others]
