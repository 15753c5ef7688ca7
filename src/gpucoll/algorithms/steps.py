"""What a schedule is made of: steps, and the blocks that they send and receive."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpucoll.errors import ArgumentError
from gpucoll.wording import rank_of

NOBODY: Final = -1
"""In place of a rank, where a step does not send, or does not receive."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of the working buffer; never wraps around its end.

    Parameters
    ----------
    first : int
        The first block.
    count : int
        How many there are, at least 1.
    """

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does in one step: it sends and receives at the same time.

    What is sent is what was there before the step. Only where `reduces` is set may a step receive
    into the blocks that it sends, and those are then exactly the same blocks.

    A step begins when the one before has ended. Only what is sent may begin earlier, where
    `forwards` is set: byte by byte, as soon as the step before has received (and reduced) it. What
    the step before sends are then other blocks.

    Of two ranks, the messages from one to the other are received in the order in which they are
    sent.

    Parameters
    ----------
    send_to : int
        The rank that this one sends to, or `NOBODY`.
    send : tuple of Span
        The blocks, in the order in which their bytes go.
    receive_from : int
        The rank that this one receives from, or `NOBODY`.
    receive : tuple of Span
        The blocks that what comes goes to, in the order in which it comes.
    reduces : bool
        What comes is combined with what is there, else it replaces it. The operand of the lower
        rank comes first: theirs, then mine, if ``receive_from < rank``. So both ranks of a pair
        compute the same bits.
    forwards : bool
        What is sent is exactly what the step before received, in that order.
    """

    send_to: int = NOBODY
    send: tuple[Span, ...] = ()
    receive_from: int = NOBODY
    receive: tuple[Span, ...] = ()
    reduces: bool = False
    forwards: bool = False


WHOLE: Final = (Span(0, 1),)
"""The working buffer of algorithms that do not divide it: one block."""


@functools.lru_cache(maxsize=1 << 16)
def spans(first: int, count: int, blocks: int) -> tuple[Span, ...]:
    """Return `count` consecutive blocks of a circle of `blocks`, as one span or as two.

    Parameters
    ----------
    first : int
        The first block; taken modulo `blocks`.
    count : int
        How many, at most `blocks`; no span for 0.
    blocks : int
        How many there are in all.
    """
    first %= blocks
    before_the_end = min(count, blocks - first)
    parts = (Span(first, before_the_end), Span(0, count - before_the_end))
    return tuple(span for span in parts if span.count)


def block_numbers(parts: Sequence[Span]) -> list[int]:
    """Return the numbers of the blocks of some spans, in order."""
    return [block for span in parts for block in range(span.first, span.first + span.count)]


def span_numbers(parts: Sequence[Span]) -> str:
    """Return the numbers of the blocks of some spans as people write them: "0-3,7"."""
    return ",".join(
        str(span.first) if span.count == 1 else f"{span.first}-{span.first + span.count - 1}"
        for span in parts
    )


def check_place(rank: int, size: int, root: int = 0) -> None:
    """Raise ArgumentError unless `rank` and `root` are among `size` ranks."""
    if size < 1:
        raise ArgumentError(f"a schedule for {size} ranks: at least 1 takes part")
    if not 0 <= rank < size:
        raise ArgumentError(f"a schedule for {rank_of(rank, size)}: ranks are 0 to {size - 1}")
    if not 0 <= root < size:
        raise ArgumentError(f"a schedule with root {root} of {size}: ranks are 0 to {size - 1}")


def distances(size: int) -> list[int]:
    """Return 1, 2, 4 ... below `size`: as many as the rounded-up logarithm of it."""
    return [1 << bit for bit in range((size - 1).bit_length())]


def power_below(size: int) -> int:
    """Return the largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)
