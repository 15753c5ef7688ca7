"""Binomial trees over ranges of consecutive ranks, for any root.

Ranges of 1, 2, 4 ... ranks, each beginning at a multiple of its width, are joined two by two. A
range is led by its first rank, or by the root where that is in it; the leader of one half sends to
the leader of the other. So whatever the root, what a rank has is of consecutive ranks: reductions
keep the order of ranks (the operation need not be commutative), and blocks are one span, never two.

Source: binomial trees as in Thakur, Rabenseifner, Gropp 2005, there with ranks counted from the
root, by which rank order is lost and blocks wrap.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpucoll.algorithms.steps import WHOLE, Span, Step, check_place, distances


@dataclass(frozen=True)
class _Join:
    """Where two ranges become one: what their leaders have to do with each other."""

    sender: int
    receiver: int
    sent: Span
    """The range of the sender."""


def _joins(rank: int, size: int, root: int) -> list[_Join]:
    """Return the joins of a rank on the way to the root: as receiver, in the last one as sender."""
    check_place(rank, size, root)
    found = []
    for width in distances(size):
        first = rank // (2 * width) * (2 * width)
        middle = first + width
        if middle >= size:
            continue  # no upper half: the range is only renamed
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

    Cost: at most log2 size steps, rounded up, each with the whole buffer; a link each.
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

    Cost: at most log2 size steps, rounded up, each with the whole buffer; a link each.
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

    A rank that leads a range needs room for the blocks of that range, at their places.

    Cost: at most log2 size steps, rounded up; the root receives each block but its own once, others
    those of the range that they lead, which they then send; a link each.
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

    A rank that leads a range needs room for the blocks of that range, at their places.

    Cost: at most log2 size steps, rounded up; the root sends each block but its own once, others
    those of the range that they lead, which they first receive; a link each.
    """
    steps: list[Step] = []
    for join in reversed(_joins(rank, size, root)):
        if rank == join.sender:
            steps.append(Step(receive_from=join.receiver, receive=(join.sent,)))
        else:
            steps.append(Step(send_to=join.sender, send=(join.sent,)))
    return steps
