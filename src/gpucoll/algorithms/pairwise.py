"""Pairwise exchange: in each step every rank sends to one and receives from another.

Every rank exchanges with every other over its own link, so this is for few hosts.
"""

from __future__ import annotations

import functools

from gpucoll.algorithms.steps import NOBODY, Span, Step, check_place


@functools.lru_cache(maxsize=4096)
def _block(number: int) -> tuple[Span, ...]:
    """Return one block; the same object for all steps, because there may be millions."""
    return (Span(number, 1),)


def all_to_all(rank: int, size: int) -> list[Step]:
    """Exchange blocks between all ranks; each goes directly to its rank, and sizes may differ.

    Of 2 x size blocks, block p below `size` is for rank p (`outgoing`), and block size + p comes
    from it (`incoming`): they are two buffers, input and output. The block for the rank itself is
    not moved: the caller copies block rank to block size + rank.

    Cost: size - 1 steps; each block sent and received once; size - 1 links.
    Source: Thakur, Rabenseifner, Gropp 2005.
    """
    check_place(rank, size)
    steps = []
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        steps.append(Step(to, _block(to), source, _block(size + source)))
    return steps


def outgoing(rank: int, size: int, peer: int) -> int:
    """Return the block with this rank's data for `peer` before `all_to_all`."""
    return peer


def incoming(rank: int, size: int, peer: int) -> int:
    """Return the block with the data from `peer` after `all_to_all`."""
    return size + peer


def reduce_scatter(rank: int, size: int) -> list[Step]:
    """Reduce every block in rank order; rank r then has block r. The others stay as they are.

    Rank r combines its block r with those of r - 1, r - 2 ... 0, each in front, and then with those
    of r + 1, r + 2 ..., each behind. So the operation need not be commutative, unlike for a ring,
    which moves the same number of bytes.

    Cost: at most 2 (size - 1) steps, half of which only send or only receive; each block but one's
    own sent once; size - 1 links.
    """
    check_place(rank, size)
    steps = []
    for sign in (1, -1):
        for distance in range(1, size):
            to, source = rank + sign * distance, rank - sign * distance
            sends, receives = 0 <= to < size, 0 <= source < size
            if sends or receives:
                steps.append(
                    Step(
                        to if sends else NOBODY,
                        _block(to) if sends else (),
                        source if receives else NOBODY,
                        _block(rank) if receives else (),
                        reduces=receives,
                    )
                )
    return steps
