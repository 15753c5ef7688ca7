"""Chains: each rank passes on to its neighbour what it receives, byte by byte, as it arrives.

The working buffer is one block unless a function states otherwise. The larger the buffer, the less
the length of the chain matters: in the end every link carries each byte once.
"""

from __future__ import annotations

from gpucoll.algorithms.doubling import shift
from gpucoll.algorithms.steps import WHOLE, Span, Step, check_place


def broadcast(rank: int, size: int, root: int = 0) -> list[Step]:
    """Give the root's buffer to all: each rank passes it to the next, the last one to the first.

    Cost: size - 1 hops, but only about one transfer long if the buffer is large; all bytes sent
    once and received once; 2 links.
    """
    check_place(rank, size, root)
    return _along([(root + hop) % size for hop in range(size)], rank, reduces=False)


def reduce(rank: int, size: int, root: int = 0) -> list[Step]:
    """Reduce the buffer to the root, from the rank after it around to it.

    The operation must be commutative.

    Cost: size - 1 hops, but only about one transfer long if the buffer is large; all bytes sent
    once and received once; 2 links.
    """
    check_place(rank, size, root)
    return _along([(root + 1 + hop) % size for hop in range(size)], rank, reduces=True)


def reduce_in_sequence(rank: int, size: int, root: int = 0) -> list[Step]:
    """Reduce the buffer from rank 0 up, one rank after the other: ((x0 op x1) op x2) op ...

    The last rank has the result, and sends it to the root if that is another rank.

    Cost: at most size hops, but only about one transfer long if the buffer is large; all bytes sent
    once, also by the root and the last rank; 3 links.
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

    Cost: 2 (size - 1) hops; all bytes sent twice and received twice, except at the ends; 2 links.
    """
    check_place(rank, size)
    return _up_and_down(rank, size, WHOLE)


def reduce_scatter(rank: int, size: int) -> list[Step]:
    """Reduce every block from rank 0 up, one rank after the other; rank r then has block r.

    The working buffer has one block for each rank. The steps are those of `all_reduce`. On the way
    down, a rank could leave out blocks for the ranks above, but then a step would not send exactly
    what the one before received, and nothing could be forwarded before it is complete.

    Cost: 2 (size - 1) hops; all bytes sent twice and received twice, except at the ends; 2 links.
    """
    check_place(rank, size)
    return _up_and_down(rank, size, (Span(0, size),))


def scan(rank: int, size: int) -> list[Step]:
    """Reduce on rank r the blocks of ranks 0 to r, one after the other.

    Cost: size - 1 hops, but only about one transfer long if the buffer is large; all bytes sent
    once and received once; 2 links.
    """
    check_place(rank, size)
    return _along(list(range(size)), rank, reduces=True)


def exclusive_scan(rank: int, size: int) -> list[Step]:
    """Reduce on rank r the blocks 0 of ranks 0 to r - 1, one after the other, into block 1.

    First every rank sends its block 0 to the next, then ranks 1 and up scan what they received.
    Block 1 of rank 0 is not written: the caller writes the operation's identity there.

    Cost: size - 1 hops; one block sent twice and received twice; 2 links.
    """
    check_place(rank, size)
    scanned = _along(list(range(1, size)), rank, reduces=True, block=(Span(1, 1),))
    return [*shift(rank, size), *scanned]


def _up_and_down(rank: int, size: int, buffer: tuple[Span, ...]) -> list[Step]:
    """Return the steps that reduce towards the last rank and pass its result back."""
    up = _along(list(range(size)), rank, reduces=True, block=buffer)
    down = _along(list(reversed(range(size))), rank, reduces=False, block=buffer)
    if rank == size - 1 and down:  # it sends down what it has just reduced
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
