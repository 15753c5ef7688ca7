"""Who is left of a communicator after losses: what `shrink` agrees on, wherever the ranks are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from gpucoll.errors import (
    AbortedError,
    DeadlineError,
    PeerLostError,
    RendezvousError,
    ShrinkError,
)
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch
from gpucoll.wording import list_ranks

T = TypeVar("T")
_MOST_ROUNDS: Final = 64
"""In each somebody is lost, or late by the whole deadline."""


@dataclass(frozen=True)
class Survivors:
    """Who goes on.

    Attributes
    ----------
    round : int
        Which agreement of this communicator it is: 1, or more where ranks were lost on the way to
        the new one.
    ranks : tuple of int
        As the old communicator numbers them, ascending: their places are their new ranks.
    resumed_from : int
        The last collective that all of them have completed.
    token : str
        By which they meet.
    meet : str
        Where, as ``host:port``, if they are on several hosts.
    """

    round: int
    ranks: tuple[int, ...]
    resumed_from: int
    token: str
    meet: str = ""


class SurvivorsWatch(Watch):
    """Watches the meeting of those who go on, by the communicator that they had."""

    call = "shrink"

    def __init__(self, rank: int, world_size: int, survivors: Survivors) -> None:
        super().__init__(rank, world_size)
        self._survivors = survivors

    def number(self, rank: int) -> int:
        """Return the old communicator's number of a rank."""
        ranks = self._survivors.ranks
        return ranks[rank] if rank < len(ranks) else rank


class Agreement(Protocol):
    """This rank's part in agreeing who goes on, and in making what they go on with."""

    def agree(self) -> Survivors:
        """Return who goes on, once that is settled among the ranks that are left.

        Called again after `abandon`: those who were agreed on agree anew.

        Raises
        ------
        ShrinkError
            Too few are left, or the others have gone on without this rank.
        """

    def meeting_of(self, survivors: Survivors) -> tuple[Job, Watch]:
        """Return the job of those who go on, and what watches over their meeting."""

    def abandon(self, survivors: Survivors) -> bool:
        """Give their meeting up, unless all of them have the new communicator; return whether."""

    def leave(self) -> None:
        """Say that this rank goes on with nobody: it was interrupted, or something was raised."""

    def close(self) -> None:
        """Let go of everything."""


def are_enough(left: Sequence[int], former: Sequence[int]) -> bool:
    """Return whether these may go on: more than half, or the half with the lowest of all.

    Any two sets of ranks that are enough have one in common, so that no two can go on apart.
    """
    if 2 * len(left) == len(former):
        return min(former) in left
    return 2 * len(left) > len(former)


def too_few_error(
    who: str, left: Sequence[int], former: Sequence[int], absent: Sequence[str]
) -> ShrinkError:
    """Return the error for a rank that is left with too few.

    `absent` says, for the other ranks, what has become of them.
    """
    needed = len(former) // 2 + 1
    half = f", or {len(former) // 2} with rank {min(former)}" if len(former) % 2 == 0 else ""
    return ShrinkError(
        f"{who} cannot go on: of {len(former)} ranks {list_ranks(left)} "
        f"{'is' if len(left) == 1 else 'are'} left here ({len(left)}), and {needed} are needed"
        f"{half}, so that no two parts of the job go on apart. {'; '.join(absent)}. Close the "
        "communicator and end this rank; start the job again from its last checkpoint unless "
        "other ranks go on"
    )


def left_behind_error(who: str, survivors: Sequence[int]) -> ShrinkError:
    """Return the error for a rank without which the others have gone on."""
    return ShrinkError(
        f"{who} came too late: {list_ranks(survivors)} {'has' if len(survivors) == 1 else 'have'} "
        "gone on in a communicator without this rank, which was stopped, very slow, cut off or "
        "interrupted when they agreed on who is left. Close the communicator and end this rank: "
        "it cannot come back into that job"
    )


def come_together(
    agreement: Agreement, make: Callable[[Job, Watch], T], who: str
) -> tuple[T, Survivors]:
    """Agree who goes on, and make with those ranks what they go on with; again where some are lost.

    Parameters
    ----------
    agreement : Agreement
        This rank's part.
    make : callable
        Meets the ranks of a job.
    who : str
        This rank, for messages.

    Raises
    ------
    ShrinkError
        See `Agreement.agree`.
    """
    try:
        for _ in range(_MOST_ROUNDS):
            survivors = agreement.agree()
            try:
                return make(*agreement.meeting_of(survivors)), survivors
            except (PeerLostError, DeadlineError, AbortedError, RendezvousError):
                if not agreement.abandon(survivors):
                    raise
        raise ShrinkError(
            f"{who} gives up: {_MOST_ROUNDS} times some of the ranks that were left had agreed to "
            "go on and could not meet. Close the communicator and end this rank"
        )
    except BaseException:
        agreement.leave()
        raise
    finally:
        agreement.close()
