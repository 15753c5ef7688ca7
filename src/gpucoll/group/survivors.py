"""What the remaining ranks agree on in `shrink`, on one host or on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from gpucoll.errors import AbortedError, DeadlineError, PeerLostError, RendezvousError, ShrinkError
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meeting import Watch
from gpucoll.wording import list_ranks

T = TypeVar("T")
_MOST_ROUNDS: Final = 64
"""Limit of rounds. In each round that fails a rank is lost, or late by the whole deadline."""


class Survivors(NamedTuple):
    """The ranks that go on, and how they meet.

    Attributes
    ----------
    round : int
        Number of the agreement: 1, or more if ranks were lost on the way to the new communicator.
    ranks : tuple of int
        Their ranks in the old communicator, ascending. Their places in this tuple are their new
        ranks.
    resumed_from : int
        The number of the last collective that all of them have completed.
    token : str
        The token by which they meet.
    meet : str
        Where they meet, as ``host:port``, if they are on several hosts.
    """

    round: int
    ranks: tuple[int, ...]
    resumed_from: int
    token: str
    meet: str = ""


class SurvivorsWatch(Watch):
    """Watches the survivors' meeting through the old communicator."""

    call = "shrink"

    def __init__(self, rank: int, world_size: int, survivors: Survivors) -> None:
        super().__init__(rank, world_size)
        self._survivors = survivors

    def number(self, rank: int) -> int:
        """Return the old communicator's number of a rank."""
        ranks = self._survivors.ranks
        return ranks[rank] if rank < len(ranks) else rank


class Agreement(Protocol):
    """This rank's part in the agreement on the survivors, and in their meeting."""

    def agree(self) -> Survivors:
        """Return the survivors, once the remaining ranks have agreed on them.

        After `abandon` it is called again: the ranks that were agreed on agree anew.

        Raises
        ------
        ShrinkError
            Too few ranks are left, or the others have gone on without this rank.
        """

    def meeting_of(self, survivors: Survivors) -> tuple[Job, Watch]:
        """Return the job in which the survivors meet, and the watch over their meeting."""

    def abandon(self, survivors: Survivors) -> bool:
        """Give up the survivors' meeting, unless all of them have the new communicator.

        Returns whether the meeting is given up.
        """

    def leave(self) -> None:
        """Withdraw this rank from the agreement, after an interrupt or an exception."""

    def close(self) -> None:
        """Release everything."""


def are_enough(left: Sequence[int], former: Sequence[int]) -> bool:
    """Return whether the ranks `left` may go on: more than half, or the half with the lowest rank.

    Any two sets of ranks that are enough have a rank in common, so no two sets can go on apart.
    """
    if 2 * len(left) == len(former):
        return min(former) in left
    return 2 * len(left) > len(former)


def too_few_error(
    who: str, left: Sequence[int], former: Sequence[int], absent: Sequence[str]
) -> ShrinkError:
    """Return the error for a rank that is left with too few others.

    `absent` describes what has become of the other ranks.
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
    """Return the error for a rank that the others have left behind."""
    return ShrinkError(
        f"{who} came too late: {list_ranks(survivors)} {'has' if len(survivors) == 1 else 'have'} "
        "gone on in a communicator without this rank, which was stopped, very slow, cut off or "
        "interrupted when they agreed on who is left. Close the communicator and end this rank: "
        "it cannot come back into that job"
    )


def come_together(
    agreement: Agreement, make: Callable[[Job, Watch], T], who: str
) -> tuple[T, Survivors]:
    """Agree on the survivors and make what they go on with; repeat if some of them are lost.

    Parameters
    ----------
    agreement : Agreement
        This rank's part.
    make : callable
        Meets the ranks of a job, and returns what they go on with.
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
            f"{who} gives up: {_MOST_ROUNDS} times, ranks that had agreed to go on could not "
            "meet. Close the communicator and end this rank"
        )
    except BaseException:
        agreement.leave()
        raise
    finally:
        agreement.close()
