"""Partners at distance 1, 2, 4 ...: logarithmically many steps, for small arrays.

The working buffer is one block unless a function states otherwise.
"""

from __future__ import annotations

from gpucoll.algorithms.steps import NOBODY, WHOLE, Span, Step, check_place, distances, power_below


def all_reduce(rank: int, size: int) -> list[Step]:
    """Reduce the whole buffer on every rank: recursive doubling.

    Partners at distance 1, 2, 4 ... exchange everything that they have. If the size is no power of
    two, `rest` ranks are left over: in each of the first `rest` pairs of neighbours the odd rank
    gives its buffer to the even one before, and gets the result afterwards. Every partial result
    comes from consecutive ranks, so the operands stay in rank order, and the operation need not be
    commutative. The two ranks of a pair combine the same two values in the same order, so all ranks
    get the same bits.

    Cost: log2 size steps, each with the whole buffer in both directions. If size is no power of
    two, the logarithm rounded down, and two more. One link a step, the same one for the first and
    last. Source: Thakur, Rabenseifner, Gropp 2005.
    """
    check_place(rank, size)
    return _all_reduce(rank, size, WHOLE)


def reduce_scatter(rank: int, size: int) -> list[Step]:
    """Reduce every block on every rank, of `size` blocks: `all_reduce`, for small arrays.

    It moves more bytes than necessary, in fewer steps, and in rank order.

    Cost: that of `all_reduce`.
    """
    check_place(rank, size)
    return _all_reduce(rank, size, (Span(0, size),))


def _all_reduce(rank: int, size: int, buffer: tuple[Span, ...]) -> list[Step]:
    paired = power_below(size)
    rest = size - paired
    if rank < 2 * rest and rank % 2:
        return [Step(send_to=rank - 1, send=buffer), Step(receive_from=rank - 1, receive=buffer)]
    steps = []
    if rank < 2 * rest:
        steps.append(Step(receive_from=rank + 1, receive=buffer, reduces=True))
    place = place_in_pairs(rank, rest)
    for distance in distances(paired):
        partner = rank_in_pairs(place ^ distance, rest)
        steps.append(Step(partner, buffer, partner, buffer, reduces=True))
    if rank < 2 * rest:
        steps.append(Step(send_to=rank + 1, send=buffer))
    return steps


def place_in_pairs(rank: int, rest: int) -> int:
    """Return a rank's place after the odd ranks of the first `rest` pairs have dropped out."""
    return rank // 2 if rank < 2 * rest else rank - rest


def rank_in_pairs(place: int, rest: int) -> int:
    """Return the rank at a place: the inverse of `place_in_pairs`."""
    return 2 * place if place < rest else place + rest


def barrier(rank: int, size: int) -> list[Step]:
    """Let no rank out before every rank is in: dissemination.

    In step k each rank notifies the one at distance 2 ** k, so in the end it has indirect notice
    from all ranks. The block is a token: its content does not matter, but it has at least one byte
    that arrives. It is never written where it is sent from: block 0 is sent, and block 1 received.

    Cost: log2 size steps, rounded up; one token each way in each; 2 links a step.
    Source: Hensgen, Finkel, Manber 1988.
    """
    check_place(rank, size)
    token, came = (Span(0, 1),), (Span(1, 1),)
    return [
        Step((rank + distance) % size, token, (rank - distance) % size, came)
        for distance in distances(size)
    ]


def scan(rank: int, size: int) -> list[Step]:
    """Reduce on rank r the blocks of ranks 0 to r: partners at distance 1, 2, 4 ...

    In step k each rank sends what it has, the result of up to 2 ** k ranks that end with itself, to
    the rank 2 ** k above. Operands stay in rank order. Ranks at the ends have fewer steps.

    Cost: at most log2 size steps, rounded up, each with the whole buffer; up to 2 links a step.
    Source: Hillis, Steele 1986.
    """
    check_place(rank, size)
    return _scan_from(0, rank, size, WHOLE)


def exclusive_scan(rank: int, size: int) -> list[Step]:
    """Reduce on rank r the blocks 0 of ranks 0 to r - 1 into block 1.

    First every rank sends its block 0 to the next, then ranks 1 and up scan what they received.
    Block 1 of rank 0 is not written: the caller writes the operation's identity there.

    Cost: at most 1 + log2 (size - 1) steps, rounded up, each with one block; up to 2 links a step.
    """
    check_place(rank, size)
    return [*shift(rank, size), *_scan_from(1, rank, size, (Span(1, 1),))]


def shift(rank: int, size: int) -> list[Step]:
    """Send block 0 to the next rank, as its block 1; the last rank sends nothing."""
    to = rank + 1 if rank + 1 < size else NOBODY
    if size == 1:
        return []
    came = (Span(1, 1),) if rank else ()
    return [Step(to, WHOLE if to != NOBODY else (), rank - 1 if rank else NOBODY, came)]


def _scan_from(lowest: int, rank: int, size: int, block: tuple[Span, ...]) -> list[Step]:
    """Return the steps of a scan over ranks `lowest` and up."""
    steps = []
    if rank < lowest:
        return []
    for distance in distances(size - lowest):
        above, below = rank + distance, rank - distance
        sends, receives = above < size, below >= lowest
        if sends or receives:
            steps.append(
                Step(
                    above if sends else NOBODY,
                    block if sends else (),
                    below if receives else NOBODY,
                    block if receives else (),
                    reduces=receives,
                )
            )
    return steps
