"""Run the schedules of all ranks in one process, without payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpucoll.algorithms.steps import NOBODY, Step, block_numbers
from gpucoll.errors import ArgumentError
from gpucoll.wording import rank_of
from schedules.contents import EMPTY, Contents


@dataclass(slots=True)
class _Rank:
    """The progress of a rank, and the pending parts of its current step."""

    steps: Sequence[Step]
    blocks: list[int]
    step: int = -1
    to_send: bool = False
    to_receive: bool = False
    sent: list[int] = field(default_factory=list)

    def begin_next(self) -> bool:
        """Begin the next step; return whether there is one."""
        self.step += 1
        if self.step >= len(self.steps):
            return False
        step = self.steps[self.step]
        self.to_send = step.send_to != NOBODY
        self.to_receive = step.receive_from != NOBODY
        self.sent = [self.blocks[block] for block in block_numbers(step.send)]
        return True


def run(
    schedules: Sequence[Sequence[Step]], blocks: Sequence[Sequence[int]], contents: Contents
) -> list[list[int]]:
    """Run the schedules of all ranks and return the final contents of their blocks.

    A message is handed over only when its sender and its receiver are both in the step that names
    the other, and a step ends when it has both sent and received. So a schedule that ends here also
    ends if messages are never buffered.

    Parameters
    ----------
    schedules : sequence of list of Step
        The steps of each rank.
    blocks : sequence of list of int
        The contents of each rank's blocks: values of `contents`, or `EMPTY`.
    contents : Contents
        Stores the values, including the results of reductions.

    Raises
    ------
    ArgumentError
        A rank waits for ever (the message names the ranks that wait, and for whom), sends an empty
        block, or a message has another number of blocks than its receiver expects.
    """
    ranks = [_Rank(steps, list(held)) for steps, held in zip(schedules, blocks, strict=True)]
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        if not ranks[rank].begin_next():
            continue
        ready += _hand_over(ranks, rank, contents)
    waiting = [rank for rank, state in enumerate(ranks) if state.step < len(state.steps)]
    if waiting:
        raise ArgumentError(_who_waits(ranks, waiting))
    return [state.blocks for state in ranks]


def _hand_over(ranks: list[_Rank], rank: int, contents: Contents) -> list[int]:
    """Move what can move after a rank has begun a step; return the ranks that ended theirs."""
    state = ranks[rank]
    step = state.steps[state.step]
    moved = {rank}
    if state.to_send and _takes_from(ranks, step.send_to) == rank:
        _move(ranks, rank, step.send_to, contents)
        moved.add(step.send_to)
    if state.to_receive and _gives_to(ranks, step.receive_from) == rank:
        _move(ranks, step.receive_from, rank, contents)
        moved.add(step.receive_from)
    return [one for one in moved if not (ranks[one].to_send or ranks[one].to_receive)]


_NO_STEP = Step()


def _current(ranks: list[_Rank], rank: int) -> Step:
    """Return a rank's current step, or an empty one."""
    state = ranks[rank]
    return state.steps[state.step] if 0 <= state.step < len(state.steps) else _NO_STEP


def _takes_from(ranks: list[_Rank], rank: int) -> int:
    """Return the rank from which a rank still has to receive in its step, or NOBODY."""
    return _current(ranks, rank).receive_from if ranks[rank].to_receive else NOBODY


def _gives_to(ranks: list[_Rank], rank: int) -> int:
    """Return the rank to which a rank still has to send in its step, or NOBODY."""
    return _current(ranks, rank).send_to if ranks[rank].to_send else NOBODY


def _move(ranks: list[_Rank], sender: int, receiver: int, contents: Contents) -> None:
    """Hand over the message of the step that both ranks are in."""
    step = _current(ranks, receiver)
    numbers = block_numbers(step.receive)
    sent, held = ranks[sender].sent, ranks[receiver].blocks
    where = f"schedule: what rank {sender} sends to {rank_of(receiver, len(ranks))}"
    if len(sent) != len(numbers):
        raise ArgumentError(f"{where} is {len(sent)} blocks; {len(numbers)} are received")
    if EMPTY in sent:
        raise ArgumentError(f"{where} has a block into which nothing was written")
    for block, value in zip(numbers, sent, strict=True):
        if not step.reduces:
            held[block] = value
        elif sender < receiver:
            held[block] = contents.combine(value, held[block])
        else:
            held[block] = contents.combine(held[block], value)
    ranks[sender].to_send = False
    ranks[receiver].to_receive = False


def _who_waits(ranks: list[_Rank], waiting: list[int]) -> str:
    """Return the message for a schedule that never ends."""
    lines = []
    for rank in waiting[:8]:
        state = ranks[rank]
        step = state.steps[state.step]
        wanted = [f"send to {step.send_to}"] if state.to_send else []
        wanted += [f"receive from {step.receive_from}"] if state.to_receive else []
        what = " and ".join(wanted)
        lines.append(f"{rank_of(rank, len(ranks))}, step {state.step}, waits to {what}")
    more = f"\nand {len(waiting) - 8} more" if len(waiting) > 8 else ""
    return "schedule: it never ends:\n" + "\n".join(lines) + more
