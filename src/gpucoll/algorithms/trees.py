"""Binomial trees over ranges of consecutive ranks, for any root.

Ranges of 1, 2, 4 ... ranks, each beginning at a multiple of its width, are joined two by two. The
leader of a range is its first rank, or the root if that is in it; the leader of one half sends to
the leader of the other. So for any root, a rank's data comes from consecutive ranks: reductions
keep the rank order (the operation need not be commutative), and blocks are one span, never two.

Source: binomial trees as in Thakur, Rabenseifner, Gropp 2005. There ranks are counted from the
root, which loses the rank order and makes blocks wrap around.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpucoll.algorithms.steps import WHOLE, Span, Step, check_place, distances


@dataclass(frozen=True)
class _Join:
    """The joining of two ranges into one: the exchange between their leaders."""

    sender: int
    receiver: int
    sent: Span
    """The sender's range."""


def _joins(rank: int, size: int, root: int) -> list[_Join]:
    """Return a rank's joins on the way to the root: as receiver, and in the last one as sender."""
    check_place(rank, size, root)
    found = []
    for width in distances(size):
        first = rank // (2 * width) * (2 * width)
        middle = first + width
        if middle >= size:
            continue  # there is no upper half: the range only becomes wider
        lower = root if first <= root < middle else first
        upper = root if middle <= root < middle + width else middle
        if upper == root:
            join = _Join(lower, upper, Span(first, width))
        else:
            join = _Join(upper, lower, Span(middle, min(width, size - middle)))
        found.append(join)
        if rank == join.sender:
            break
    return found


def reduce(rank: int, size: int, root: int = 0) -> list[Step]:
    """Reduce the whole buffer (one block) in rank order to the root; others hold partial results.

    Cost: at most log2 size steps, rounded up, each with the whole buffer; one link a step.
    """
    steps: list[Step] = []
    for join in _joins(rank, size, root):
        if rank == join.receiver:
            steps.append(Step(receive_from=join.sender, receive=WHOLE, reduces=True))
        else:
            steps.append(Step(send_to=join.receiver, send=WHOLE, forwards=bool(steps)))
    return steps


def broadcast(rank: int, size: int, root: int = 0) -> list[Step]:
    """Give the root's buffer (one block) to all.

    Cost: at most log2 size steps, rounded up, each with the whole buffer; one link a step.
    """
    steps: list[Step] = []
    for join in reversed(_joins(rank, size, root)):
        if rank == join.sender:
            steps.append(Step(receive_from=join.receiver, receive=WHOLE))
        else:
            passed_on = len(steps) == 1 and rank != root
            steps.append(Step(send_to=join.sender, send=WHOLE, forwards=passed_on))
    return steps


def gather(rank: int, size: int, root: int = 0) -> list[Step]:
    """Collect one block of each rank at the root; rank r begins with block r, of `size` blocks.

    The leader of a range needs room for the blocks of that range, at their places.

    Cost: at most log2 size steps, rounded up. The root receives each block but its own once; other
    leaders receive the blocks of their range and then send them. One link a step.
    """
    steps: list[Step] = []
    for join in _joins(rank, size, root):
        if rank == join.receiver:
            steps.append(Step(receive_from=join.sender, receive=(join.sent,)))
        else:
            steps.append(Step(send_to=join.receiver, send=(join.sent,)))
    return steps


def scatter(rank: int, size: int, root: int = 0) -> list[Step]:
    """Give block r of the root to rank r, of `size` blocks: `gather` backwards.

    The leader of a range needs room for the blocks of that range, at their places.

    Cost: at most log2 size steps, rounded up. The root sends each block but its own once; other
    leaders receive the blocks of their range and then send them. One link a step.
    """
    steps: list[Step] = []
    for join in reversed(_joins(rank, size, root)):
        if rank == join.sender:
            steps.append(Step(receive_from=join.receiver, receive=(join.sent,)))
        else:
            steps.append(Step(send_to=join.sender, send=(join.sent,)))
    return steps
