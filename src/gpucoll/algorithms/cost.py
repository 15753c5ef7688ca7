"""The cost of a schedule for a rank: steps, bytes, links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpucoll.algorithms.steps import NOBODY, Span, Step


@dataclass(frozen=True)
class Cost:
    """The work of one rank in all steps of a schedule.

    Parameters
    ----------
    steps : int
        Number of steps, each of which waits once for another rank.
    sent_bytes, received_bytes : int
        Totals of all steps.
    links : int
        Number of other ranks to which it needs a connection; one serves both directions.
    """

    steps: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    links: int = 0

    def times(self, block_bytes: int) -> Cost:
        """Return the cost with blocks of `block_bytes`, given a cost with blocks of one byte."""
        sent, received = self.sent_bytes * block_bytes, self.received_bytes * block_bytes
        return Cost(self.steps, sent, received, self.links)


def cost_of(steps: Iterable[Step], block_bytes: int | Sequence[int]) -> Cost:
    """Return the cost of a schedule for the rank with these steps.

    Parameters
    ----------
    steps : iterable of Step
        The steps of one rank.
    block_bytes : int or sequence of int
        The size of all blocks, or of each.
    """
    count = sent = received = 0
    links: set[int] = set()
    for step in steps:
        count += 1
        sent += span_bytes(step.send, block_bytes)
        received += span_bytes(step.receive, block_bytes)
        links |= {step.send_to, step.receive_from}
    return Cost(count, sent, received, len(links - {NOBODY}))


def span_bytes(parts: Iterable[Span], block_bytes: int | Sequence[int]) -> int:
    """Return the size of some spans in bytes."""
    if isinstance(block_bytes, int):
        return block_bytes * sum(span.count for span in parts)
    return sum(sum(block_bytes[span.first : span.first + span.count]) for span in parts)


def largest(costs: Iterable[Cost]) -> Cost:
    """Return the largest of each figure: the bounds for all ranks."""
    listed = list(costs)
    return Cost(
        max(cost.steps for cost in listed),
        max(cost.sent_bytes for cost in listed),
        max(cost.received_bytes for cost in listed),
        max(cost.links for cost in listed),
    )


def divide(size_bytes: int, blocks: int) -> list[int]:
    """Return the sizes of blocks that divide `size_bytes` as evenly as possible."""
    each, more = divmod(size_bytes, blocks)
    return [each + (block < more) for block in range(blocks)]
