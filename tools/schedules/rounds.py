"""A schedule in rounds: the steps that belong together, and the contents of blocks after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpucoll.algorithms.steps import NOBODY, Step, block_numbers
from gpucoll.errors import ArgumentError
from schedules.contents import EMPTY, Contents


@dataclass
class Round:
    """Steps that are taken together, and the contents of the ranks' blocks after them.

    Parameters
    ----------
    steps : dict of int to Step
        The step of each rank that has one in this round.
    held : list of list of int
        The contents of each rank's blocks afterwards: values of a `Contents`.
    """

    steps: dict[int, Step] = field(default_factory=dict)
    held: list[list[int]] = field(default_factory=list)


def rounds_of(
    schedules: Sequence[Sequence[Step]], blocks: Sequence[Sequence[int]], contents: Contents
) -> list[Round]:
    """Return the rounds of a schedule, with each step as early as possible.

    Parameters
    ----------
    schedules : sequence of list of Step
        The steps of each rank.
    blocks : sequence of list of int
        The contents of each rank's blocks before: values of `contents`.
    contents : Contents
        Stores the values.

    Raises
    ------
    ArgumentError
        The steps cannot be arranged in rounds in which each message is both sent and received.
    """
    rounds: list[Round] = []
    taken = [0] * len(schedules)
    free_from = [0] * len(schedules)
    waiting = {rank for rank, steps in enumerate(schedules) if steps}
    while waiting:
        together = _together(schedules, taken, waiting)
        if not together:
            break
        number = max(free_from[rank] for rank in together)
        while len(rounds) <= number:
            rounds.append(Round())
        for rank in together:
            rounds[number].steps[rank] = schedules[rank][taken[rank]]
            taken[rank] += 1
            free_from[rank] = number + 1
        waiting = {rank for rank in waiting if taken[rank] < len(schedules[rank])}
    if waiting:
        raise ArgumentError("schedule: its steps do not fall into rounds")
    held = [list(one) for one in blocks]
    for one in rounds:
        held = one.held = _after(one.steps, held, contents)
    return rounds


def _together(
    schedules: Sequence[Sequence[Step]], taken: Sequence[int], waiting: set[int]
) -> set[int]:
    """Return ranks whose next steps exchange only with one another, or none."""
    current = {rank: schedules[rank][taken[rank]] for rank in sorted(waiting)}
    for start in current:
        group, fits = _group_of(start, current)
        if fits:
            return group
    return set()


def _group_of(start: int, current: dict[int, Step]) -> tuple[set[int], bool]:
    """Return the ranks connected with `start` by the next steps, and whether all of these fit."""
    group, left, fits = {start}, [start], True
    while left:
        rank = left.pop()
        step = current[rank]
        for partner in (step.send_to, step.receive_from):
            if partner == NOBODY:
                continue
            theirs = current.get(partner, Step())
            fits &= partner != step.send_to or theirs.receive_from == rank
            fits &= partner != step.receive_from or theirs.send_to == rank
            if partner in current and partner not in group:
                group.add(partner)
                left.append(partner)
    return group, fits


def _after(steps: dict[int, Step], held: list[list[int]], contents: Contents) -> list[list[int]]:
    """Return the contents of blocks after all steps of a round."""
    after = [list(one) for one in held]
    for rank, step in steps.items():
        if step.receive_from == NOBODY:
            continue
        sent = block_numbers(steps[step.receive_from].send)
        for source, block in zip(sent, block_numbers(step.receive), strict=True):
            value = held[step.receive_from][source]
            if step.reduces and EMPTY not in (value, held[rank][block]):
                pair = (value, held[rank][block])
                value = contents.combine(*(pair if step.receive_from < rank else pair[::-1]))
            after[rank][block] = value
    return after
