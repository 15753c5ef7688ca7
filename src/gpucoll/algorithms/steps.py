"""The parts of a schedule: steps, and the blocks that they send and receive."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpucoll.errors import ArgumentError
from gpucoll.wording import rank_of

NOBODY: Final = -1
"""In place of a rank if a step does not send, or does not receive."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of the working buffer; never wraps around its end.

    Parameters
    ----------
    first : int
        The first block.
    count : int
        Number of blocks, at least 1.
    """

    first: int
    count: int


class Step(NamedTuple):
    """The work of one rank in one step: it sends and receives at the same time.

    A step sends the content before the step. Only a step with `reduces` may receive into blocks
    that it also sends, and these must then be exactly the same blocks.

    A step begins when the previous one has ended. Only with `forwards` may its sending begin
    earlier: byte by byte, as soon as the previous step has received (and reduced) the data. The
    blocks that the previous step sends are then others.

    Between two ranks, messages are received in the order in which they are sent.

    Parameters
    ----------
    send_to : int
        The rank to which this one sends, or `NOBODY`.
    send : tuple of Span
        The blocks, in the order in which their bytes are sent.
    receive_from : int
        The rank from which this one receives, or `NOBODY`.
    receive : tuple of Span
        The blocks into which the data is received, in that order.
    reduces : bool
        Whether received data is combined with the present content, instead of replacing it. The
        operand of the lower rank comes first: theirs, then mine, if ``receive_from < rank``. So
        both ranks of a pair compute the same bits.
    forwards : bool
        Whether the data sent is exactly what the previous step received, in that order.
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
        Number of blocks to return, at most `blocks`; 0 gives no span.
    blocks : int
        Number of blocks in the circle.
    """
    first %= blocks
    before_the_end = min(count, blocks - first)
    parts = (Span(first, before_the_end), Span(0, count - before_the_end))
    return tuple(span for span in parts if span.count)


def block_numbers(parts: Sequence[Span]) -> list[int]:
    """Return the numbers of the blocks of some spans, in order."""
    return [block for span in parts for block in range(span.first, span.first + span.count)]


def span_numbers(parts: Sequence[Span]) -> str:
    """Return the numbers of the blocks of some spans as text: "0-3,7"."""
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
    """Return 1, 2, 4 ... below `size`: as many numbers as its logarithm, rounded up."""
    return [1 << bit for bit in range((size - 1).bit_length())]


def power_below(size: int) -> int:
    """Return the largest power of two that is at most `size`."""
    return 1 << (size.bit_length() - 1)
