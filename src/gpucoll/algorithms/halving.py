"""Halving and doubling: logarithmically many steps, and nearly as few bytes as a ring."""

from __future__ import annotations

from gpucoll.algorithms.doubling import place_in_pairs, rank_in_pairs
from gpucoll.algorithms.steps import Span, Step, check_place, distances, power_below


def blocks(size: int) -> int:
    """Return the number of blocks in the working buffer: the largest power of two up to `size`."""
    return power_below(size)


def all_reduce(rank: int, size: int) -> list[Step]:
    """Reduce every block and give it to all: vector halving with distance doubling, and back.

    Partners at distance 1, 2, 4 ... each reduce one half of what both still have, so that in the
    end each has one block. Then the same partners, in reverse order, give each other what they
    have. The nearest partners come first, so a partial result comes from consecutive ranks,
    operands stay in rank order, and the operation need not be commutative.

    If the size is no power of two, `rest` ranks are left over. In each of the first `rest` pairs of
    neighbours both ranks reduce a half, and the even one continues with all of it; the odd one gets
    the result.

    Cost: 2 log2 size steps; 2 (size - 1) / size of the bytes sent, and the same received; log2 size
    links. If size is no power of two: the cost for the power of two below, and for the even rank of
    a pair 3 more steps, one and a half times the bytes sent and once the bytes received; one more
    link. Source: Rabenseifner 2004; Thakur, Rabenseifner, Gropp 2005.
    """
    check_place(rank, size)
    count = blocks(size)
    rest = size - count
    folded = rank < 2 * rest
    steps = _fold(rank, count) if folded else []
    if folded and rank % 2:
        return [*steps, Step(receive_from=rank - 1, receive=(Span(0, count),))]
    place = place_in_pairs(rank, rest)
    exchanges = [
        (rank_in_pairs(place ^ distance, rest), kept, given)
        for distance, kept, given in _halves(place, count)
    ]
    for partner, kept, given in exchanges:
        steps.append(Step(partner, (given,), partner, (kept,), reduces=True))
    for partner, kept, given in reversed(exchanges):
        last_reduced = partner == exchanges[-1][0]
        steps.append(Step(partner, (kept,), partner, (given,), forwards=last_reduced))
    if folded:
        steps.append(Step(send_to=rank + 1, send=(Span(0, count),)))
    return steps


def _fold(rank: int, count: int) -> list[Step]:
    """Return the steps by which two neighbours reduce their buffers into the even one's."""
    lower, upper = (Span(0, count // 2),), (Span(count // 2, count // 2),)
    if rank % 2:
        return [
            Step(rank - 1, lower, rank - 1, upper, reduces=True),
            Step(send_to=rank - 1, send=upper, forwards=True),
        ]
    return [
        Step(rank + 1, upper, rank + 1, lower, reduces=True),
        Step(receive_from=rank + 1, receive=upper),
    ]


def _halves(place: int, count: int) -> list[tuple[int, Span, Span]]:
    """Return, for each step of the halving, the distance, the blocks kept and those sent."""
    found = []
    first = 0
    for distance in distances(count):
        count //= 2
        lower, upper = Span(first, count), Span(first + count, count)
        kept, given = (upper, lower) if place & distance else (lower, upper)
        found.append((distance, kept, given))
        first = kept.first
    return found
