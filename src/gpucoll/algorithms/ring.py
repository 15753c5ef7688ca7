"""Rings: each rank sends to the next and receives from the previous one.

The working buffer has one block for each rank. The number of bytes is minimal. Each step but the
first sends on what the previous step received, so all links are busy from the first to the last
byte.
"""

from __future__ import annotations

from gpucoll.algorithms.steps import Step, check_place, spans


def reduce_scatter(rank: int, size: int) -> list[Step]:
    """Reduce every block; rank r then has block r. The other blocks hold partial results.

    Block b goes around once, from rank b + 1 to rank b, and each rank adds its own data to it. So
    the order of the operands differs from block to block and is not the rank order; the operation
    must be commutative.

    Cost: size - 1 steps; (size - 1) / size of the bytes sent, and the same received; 2 links.
    Source: Thakur, Rabenseifner, Gropp 2005 (bucket); bytes are optimal (Patarasuk, Yuan 2009).
    """
    check_place(rank, size)
    return [
        Step(
            send_to=(rank + 1) % size,
            send=spans(rank - 1 - step, 1, size),
            receive_from=(rank - 1) % size,
            receive=spans(rank - 2 - step, 1, size),
            reduces=True,
            forwards=step > 0,
        )
        for step in range(size - 1)
    ]


def all_gather(rank: int, size: int) -> list[Step]:
    """Give every rank all blocks; rank r begins with block r.

    Cost: size - 1 steps; each rank sends all blocks but one, and receives all but its own; 2 links.
    Source: Thakur, Rabenseifner, Gropp 2005.
    """
    check_place(rank, size)
    return [
        Step(
            send_to=(rank + 1) % size,
            send=spans(rank - step, 1, size),
            receive_from=(rank - 1) % size,
            receive=spans(rank - 1 - step, 1, size),
            forwards=step > 0,
        )
        for step in range(size - 1)
    ]


def all_reduce(rank: int, size: int) -> list[Step]:
    """Reduce every block and give it to every rank: `reduce_scatter`, then `all_gather`.

    All ranks get the same bits, because each block is reduced in one place only. The operation must
    be commutative.

    Cost: 2 (size - 1) steps; 2 (size - 1) / size of the bytes sent, and the same received; 2 links.
    Source: Patarasuk, Yuan 2009.
    """
    reducing = reduce_scatter(rank, size)
    gathering = all_gather(rank, size)
    if gathering:  # its first step sends the block that the last step of the other has reduced
        first = gathering[0]
        gathering[0] = Step(
            first.send_to, first.send, first.receive_from, first.receive, forwards=True
        )
    return reducing + gathering
