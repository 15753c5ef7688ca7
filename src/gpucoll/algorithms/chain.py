"""Chains: each rank passes on to its neighbour what it receives, byte by byte, as it comes.

The working buffer is one block, unless a function says otherwise. The more bytes, the less it
matters how long the chain is: in the end every link carries each byte once.
"""

from __future__ import annotations

from gpucoll.algorithms.doubling import shift
from gpucoll.algorithms.steps import WHOLE, Span, Step, check_place


def broadcast(rank: int, size: int, root: int = 0) -> list[Step]:
    """Give the root's buffer to all: each rank gives it to the next, the last to the first.

    Cost: size - 1 hops, but one transfer long where the buffer is large; all bytes sent once and
    received once; 2 links.
    """
    check_place(rank, size, root)
    return _along([(root + hop) % size for hop in range(size)], rank, reduces=False)


def reduce(rank: int, size: int, root: int = 0) -> list[Step]:
    """Reduce the buffer to the root, from the rank after it around to it.

    The operation must be commutative.

    Cost: size - 1 hops, but one transfer long where the buffer is large; all bytes sent once and
    received once; 2 links.
    """
    check_place(rank, size, root)
    return _along([(root + 1 + hop) % size for hop in range(size)], rank, reduces=True)


def reduce_in_sequence(rank: int, size: int, root: int = 0) -> list[Step]:
    """Reduce the buffer from rank 0 up, one rank after the other: ((x0 op x1) op x2) op ...

    The last rank has the result, and gives it to the root if that is another one.

    Cost: at most size hops, but one transfer long where the buffer is large; all bytes sent once,
    by the root and the last rank too; 3 links.
    """
    check_place(rank, size, root)
    steps = _along(list(range(size)), rank, reduces=True)
    last = size - 1
    if root != last and rank == last:
        steps.append(Step(send_to=root, send=WHOLE, forwards=True))
    if root != last and rank == root:
        steps.append(Step(receive_from=last, receive=WHOLE))
    return steps


def all_reduce(rank: int, size: int) -> list[Step]:
    """Reduce the buffer from rank 0 up, one rank after the other, and pass the result back down.

    ((x0 op x1) op x2) op ...: the same bits as one loop over the ranks.

    Cost: 2 (size - 1) hops; all bytes sent twice and received twice by all but the ends; 2 links.
    """
    check_place(rank, size)
    return _up_and_down(rank, size, WHOLE)


def reduce_scatter(rank: int, size: int) -> list[Step]:
    """Reduce every block from rank 0 up, one rank after the other; rank r then has block r.

    The working buffer has one block for each rank. This is `all_reduce`: going down, a rank could
    leave out what is for those above, but then no step would send just what the one before
    received, and nothing would be forwarded before it is complete.

    Cost: 2 (size - 1) hops; all bytes sent twice and received twice by all but the ends; 2 links.
    """
    check_place(rank, size)
    return _up_and_down(rank, size, (Span(0, size),))


def scan(rank: int, size: int) -> list[Step]:
    """Reduce, on rank r, what ranks 0 to r have, one after the other.

    Cost: size - 1 hops, but one transfer long where the buffer is large; all bytes sent once and
    received once; 2 links.
    """
    check_place(rank, size)
    return _along(list(range(size)), rank, reduces=True)


def exclusive_scan(rank: int, size: int) -> list[Step]:
    """Reduce, on rank r, what ranks 0 to r - 1 have, into block 1; block 0 is what it brings.

    First every rank gives its block to the next, then ranks 1 and up scan what they got. Block 1 of
    rank 0 is left alone: the operation's identity is the caller's to write.

    Cost: size - 1 hops; one block sent twice and received twice; 2 links.
    """
    check_place(rank, size)
    scanned = _along(list(range(1, size)), rank, reduces=True, block=(Span(1, 1),))
    return [*shift(rank, size), *scanned]


def _up_and_down(rank: int, size: int, buffer: tuple[Span, ...]) -> list[Step]:
    """Return the steps of reducing towards the last rank, and passing its result back."""
    up = _along(list(range(size)), rank, reduces=True, block=buffer)
    down = _along(list(reversed(range(size))), rank, reduces=False, block=buffer)
    if rank == size - 1 and down:  # what it sends down is what it has just reduced
        down[0] = Step(send_to=rank - 1, send=buffer, forwards=True)
    return up + down


def _along(
    order: list[int], rank: int, reduces: bool, block: tuple[Span, ...] = WHOLE
) -> list[Step]:
    """Return the steps of a rank in a chain through `order`: receive, pass on."""
    if rank not in order:
        return []
    place = order.index(rank)
    steps = []
    if place > 0:
        steps.append(Step(receive_from=order[place - 1], receive=block, reduces=reduces))
    if place + 1 < len(order):
        steps.append(Step(send_to=order[place + 1], send=block, forwards=place > 0))
    return steps
