"""Pairwise exchange: in each step every rank sends to one and receives from another.

Every rank meets every other: a link for each, so it is for few hosts.
"""

from __future__ import annotations

import functools

from gpucoll.algorithms.steps import NOBODY, Span, Step, check_place


@functools.lru_cache(maxsize=4096)
def _block(number: int) -> tuple[Span, ...]:
    """Return one block; the same object for all steps, of which there may be millions."""
    return (Span(number, 1),)


def all_to_all(rank: int, size: int) -> list[Step]:
    """Exchange blocks between all; each goes straight to its rank, and they may differ in size.

    Of 2 x size blocks, block p below `size` is what goes to rank p (`outgoing`), block size + p
    what comes from it (`incoming`): input and output, two buffers. The block for oneself is not
    moved: the caller copies block rank to block size + rank.

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
    """Return the block in which, before `all_to_all`, lies what this rank has for `peer`."""
    return peer


def incoming(rank: int, size: int, peer: int) -> int:
    """Return the block in which, after `all_to_all`, lies what has come from `peer`."""
    return size + peer


def reduce_scatter(rank: int, size: int) -> list[Step]:
    """Reduce every block in rank order; rank r then has block r. The others stay as they are.

    Rank r combines its block r with those of r - 1, r - 2 ... 0, each in front, then with those of
    r + 1, r + 2 ..., each behind. So the operation need not be commutative; a ring, with as many
    bytes, needs one that is.

    Cost: at most 2 (size - 1) steps, of which half send only or receive only; each block but one's
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
