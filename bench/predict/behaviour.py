"""What ranks do in a schedule, with ranks that behave alike described once.

The time of a schedule depends on what each rank sends and receives, and when. Two ranks whose steps
are alike, and whose messages come from ranks that are alike, have the same times. So one rank
describes a ring of 10,000.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from gpucoll.algorithms.cost import span_bytes
from gpucoll.algorithms.steps import NOBODY, Span, Step
from gpucoll.algorithms.table import Algorithm
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError

__all__ = ["Behaviour", "Turn", "Turns", "behaviour_of", "in_turn", "of_schedules"]

ROTATED: Final = {
    (Collective.ALL_REDUCE, "ring"),
    (Collective.REDUCE_SCATTER, "ring"),
    (Collective.ALL_GATHER, "ring"),
    (Collective.ALL_GATHER, "bruck"),
    (Collective.ALL_TO_ALL, "pairwise"),
    (Collective.BARRIER, "dissemination"),
}
"""Algorithms in which rank r does what rank 0 does, r places further: `tests` prove it for small
numbers of ranks, and `_check_rotation` samples it for large ones."""

_MOST_DIVISIONS: Final = 32
"""In a chain, no two ranks are alike, which one division for each rank would show: after so many
divisions each rank counts as one of its own kind."""


MOST_SIZE: Final = 1 << 15
"""The most ranks of which each one's steps are looked at: for more, memory is gigabytes."""


class Turn(NamedTuple):
    """A step of a rank, without the numbers of ranks and blocks.

    Attributes
    ----------
    sends, receives : float
        How much, in units of the simulation's `unit_bytes`; negative: nothing is sent, or received.
    reduces, forwards : bool
        As in `gpucoll.algorithms.steps.Step`.
    source : (int, int) or None
        What is received: the behaviour of its sender, and the number of the sender's turn.
    waits : bool
        Whether the data to send is complete only when everything before was received.
    """

    sends: float = -1.0
    receives: float = -1.0
    reduces: bool = False
    forwards: bool = False
    source: tuple[int, int] | None = None
    waits: bool = True


Turns = tuple[tuple[Turn, int], ...]
"""Turns in their order, each with the number of times that it is repeated."""


class Behaviour(NamedTuple):
    """The turns of all ranks.

    Attributes
    ----------
    kinds : tuple of Turns
        What each kind of rank does.
    is_rotated : bool
        Whether there is one kind, and each rank receives in a turn what another one sends in the
        same turn.
    """

    kinds: tuple[Turns, ...]
    is_rotated: bool = False


def in_turn(turns: Sequence[Turn]) -> Behaviour:
    """Return the behaviour of ranks that all do the same, each relative to its own number."""
    runs = tuple((turn, len(list(same))) for turn, same in itertools.groupby(turns))
    return Behaviour((runs,), is_rotated=True)


@functools.lru_cache(maxsize=64)
def behaviour_of(algorithm: Algorithm, size: int, root: int = 0) -> Behaviour:
    """Return the behaviour of `size` ranks if all blocks have the size of one unit.

    Cost: for 10,000 ranks a tenth of a second for a ring, a second for recursive doubling.

    Raises
    ------
    ArgumentError
        More than `MOST_SIZE` ranks, unless all of them do the same.
    """
    if (algorithm.collective, algorithm.name) in ROTATED:
        steps = algorithm.steps(0, size)
        _check_rotation(algorithm, size, steps)
        return in_turn([_turn(step, 1) for step in steps])
    if size > MOST_SIZE:
        raise ArgumentError(
            f"{algorithm.name} between {size} hosts: at most {MOST_SIZE} are simulated; predict "
            "fewer ranks, or more on each host (--hosts-of)"
        )
    return of_schedules(algorithm.schedules(size, root), 1)


def _check_rotation(algorithm: Algorithm, size: int, first: Sequence[Step]) -> None:
    """Raise ArgumentError unless some ranks do what rank 0 does, as many places further."""
    for rank in {1, size // 2, size - 1} & set(range(1, size)):
        for step, own in zip(first, algorithm.steps(rank, size), strict=True):
            is_same = _turn(step, 1) == _turn(own, 1)
            pairs = ((step.send_to, own.send_to), (step.receive_from, own.receive_from))
            if not is_same or any((one + rank) % size != other for one, other in pairs):
                raise ArgumentError(f"schedule: {algorithm.name} is not the same for every rank")
        if any((step.send_to + step.receive_from) % size for step in first):
            raise ArgumentError(
                f"schedule: {algorithm.name} receives what was not sent in the step"
            )


def _turn(step: Step, unit: int | Sequence[int]) -> Turn:
    return Turn(
        _amount(step.send_to, step.send, unit),
        _amount(step.receive_from, step.receive, unit),
        step.reduces,
        step.forwards,
    )


def _amount(partner: int, parts: Sequence[Span], unit: int | Sequence[int]) -> float:
    return -1.0 if partner == NOBODY else float(span_bytes(parts, unit))


def of_schedules(schedules: Sequence[Sequence[Step]], unit: int | Sequence[int]) -> Behaviour:
    """Return the behaviour of ranks with these steps.

    Parameters
    ----------
    schedules : sequence of list of Step
        The steps of each rank.
    unit : int or sequence of int
        The size of all blocks, or of each.

    Raises
    ------
    ArgumentError
        A rank receives what no rank sends, or another number of bytes.
    """
    turns = [[_turn(step, unit) for step in steps] for steps in schedules]
    sources = _sources(schedules, turns)
    kinds = _kinds(turns, sources)
    first = {int(kind): rank for rank, kind in reversed(list(enumerate(kinds)))}
    found = []
    for kind in range(len(first)):
        rank = first[kind]
        own = []
        for turn, (sender, number) in zip(turns[rank], sources[rank], strict=True):
            source = None if sender == NOBODY else (int(kinds[sender]), number)
            own.append((turn._replace(source=source), 1))
        found.append(tuple(own))
    return Behaviour(tuple(found))


def _sources(
    schedules: Sequence[Sequence[Step]], turns: Sequence[Sequence[Turn]]
) -> list[list[tuple[int, int]]]:
    """Return for each step of each rank the rank and the step that sends what it receives."""
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, steps in enumerate(schedules):
        for number, step in enumerate(steps):
            if step.send_to != NOBODY:
                sent[rank, step.send_to].append(number)
    taken: dict[tuple[int, int], int] = defaultdict(int)
    found: list[list[tuple[int, int]]] = []
    for rank, steps in enumerate(schedules):
        own = []
        for number, step in enumerate(steps):
            pair = (step.receive_from, rank)
            if step.receive_from == NOBODY:
                own.append((NOBODY, 0))
                continue
            if taken[pair] >= len(sent[pair]):
                raise ArgumentError("schedule: it never ends")
            origin = sent[pair][taken[pair]]
            taken[pair] += 1
            sends, receives = turns[step.receive_from][origin].sends, turns[rank][number].receives
            if sends != receives:
                raise ArgumentError(
                    f"schedule: {sends:.0f} bytes are sent where {receives:.0f} are received"
                )
            own.append((step.receive_from, origin))
        found.append(own)
    if any(taken[pair] < len(numbers) for pair, numbers in sent.items()):
        raise ArgumentError("schedule: it sends what nobody receives")
    return found


def _kinds(
    turns: Sequence[Sequence[Turn]], sources: Sequence[Sequence[tuple[int, int]]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return a number for each rank; ranks with the same number have the same times.

    Ranks are divided by their own turns first, then again and again by the numbers of the ranks
    that they receive from, until that divides no more.
    """
    width = max(map(len, turns), default=0)
    senders = np.full((len(turns), width), NOBODY)
    named: dict[tuple[object, ...], int] = {}
    kinds = np.zeros(len(turns), np.int64)
    for rank, (own, come) in enumerate(zip(turns, sources, strict=True)):
        key = (tuple(own), tuple(number for _, number in come))
        kinds[rank] = named.setdefault(key, len(named))
        senders[rank, : len(come)] = [sender for sender, _ in come]
    count = len(named)
    for _ in range(_MOST_DIVISIONS):
        theirs = np.where(senders == NOBODY, NOBODY, kinds[senders])
        _, divided = np.unique(np.column_stack((kinds, theirs)), axis=0, return_inverse=True)
        kinds = divided.reshape(-1)
        if (more := int(kinds.max(initial=-1)) + 1) == count:
            return kinds
        count = more
    return np.arange(len(turns))
