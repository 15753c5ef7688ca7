"""Watch the meeting of a communicator's ranks with newcomers (`Communicator.grow`).

All or none: the old ranks go over to the new communicator only if all of them have it. So a
newcomer that fails on the way costs the old communicator nothing, and an old rank that fails breaks
it, as in any other call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from gpucoll.errors import GpucollError, MismatchError, RendezvousError
from gpucoll.group.division import Division
from gpucoll.group.protocol import Group
from gpucoll.rendezvous.meeting import Watch
from gpucoll.transport.shared.layout import Abort

CALL = "grow"


class Plan(NamedTuple):
    """How the ranks and some newcomers meet; rank 0 makes it.

    Attributes
    ----------
    number : int
        The number of the attempt on this communicator, from 1.
    world_size : int
        The number of ranks in the new communicator.
    token : str
        The word by which they meet.
    meet : str
        Where, as ``host:port``; empty: all are on one host.
    limit_s : float
        How long the meeting may take.
    """

    number: int
    world_size: int
    token: str
    meet: str
    limit_s: float

    @staticmethod
    def of(said: Any) -> Plan:
        """Return a plan that has come as JSON."""
        number, world_size, token, meet, limit_s = said
        return Plan(int(number), int(world_size), str(token), str(meet), float(limit_s))


class Vote(NamedTuple):
    """What a rank says after the meeting.

    Attributes
    ----------
    has_made : bool
        Whether it has the new communicator.
    trouble : str
        What keeps it from ever having it (no memory, for example); empty: nothing of its own.
    """

    has_made: bool
    trouble: str = ""

    def encode(self) -> bytes:
        """Return it as bytes."""
        return json.dumps(self).encode()

    @staticmethod
    def decode(data: bytes) -> Vote:
        """Return the vote in these bytes."""
        has_made, trouble = json.loads(data)
        return Vote(bool(has_made), str(trouble))


class GrowthWatch(Division):
    """Watches the meeting through the old communicator, which knows which old ranks are alive.

    Attributes
    ----------
    gone_newcomers : callable
        Returns the numbers to be of newcomers that have gone; on rank 0, which keeps the door.
    call_newcomers : callable or None
        On rank 0: tells newcomers the plan, once all old ranks have come. So no newcomer that fails
        ends the meeting before an old rank has come, which would then wait there in vain.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group, CALL)
        self.ranks = list(range(group.world_size))
        self.gone_newcomers: Callable[[], list[int]] = list
        self.call_newcomers: Callable[[], None] | None = None

    def check(self, awaited: Collection[int]) -> tuple[int, str] | None:
        """Return an old rank that has ended or closed the old communicator, or a gone newcomer."""
        found = super().check({*awaited, *self.ranks})
        if found is None and awaited and not {*awaited} & {*self.ranks}:
            call, self.call_newcomers = self.call_newcomers, None
            if call is not None:
                call()
            found = next(((rank, "it is gone") for rank in self.gone_newcomers()), None)
        return found

    def lost(self, rank: int, how: str) -> GpucollError:
        """Return the error for a rank that is gone; an old one breaks the old communicator."""
        return super().lost(rank, how) if rank in self.ranks else Watch.lost(self, rank, how)

    def left(self, rank: int, why: str) -> GpucollError:
        """Return the error for a rank that raised something; an old one breaks the communicator."""
        return super().left(rank, why) if rank in self.ranks else Watch.left(self, rank, why)

    def late(self, text: str) -> GpucollError:
        """Return the error for a meeting that took too long."""
        return Watch.late(self, text)


class NewcomerWatch(Watch):
    """Watches the meeting for a newcomer, which knows rank 0 alone.

    Parameters
    ----------
    rank, world_size : int
        Its number to be, and that of all ranks.
    has_news : callable
        Returns whether rank 0 says something at the door, or is gone from there.
    """

    call = "join"

    def __init__(self, rank: int, world_size: int, has_news: Callable[[], bool]) -> None:
        super().__init__(rank, world_size)
        self._has_news = has_news

    def check(self, awaited: Collection[int]) -> tuple[int, str] | None:
        """Return rank 0 if it has given the meeting up."""
        return (0, "it is gone, or gave the meeting up") if self._has_news() else None


def plan_of(said: dict[str, Any], who: str) -> Plan | None:
    """Return the plan that rank 0 has told all ranks; None: no newcomer is here.

    Raises
    ------
    RendezvousError
        Rank 0 cannot keep the door.
    """
    if trouble := said.get("trouble"):
        raise RendezvousError(f"{who} in {CALL}: {trouble}")
    plan = said.get("plan")
    return None if plan is None else Plan.of(plan)


def check_ready(answers: list[dict[str, Any]], who: str, where: str) -> None:
    """Check that all old ranks can meet newcomers, before anything is made.

    Raises
    ------
    RendezvousError
        Some ranks cannot meet them: they do not know the secret, for example.
    MismatchError
        Some ranks have messages that nobody has received, which would be lost.
    """
    ours = answers[0].get("key")
    for said in answers:
        if ours is not None and said.get("key", ours) != ours:
            said["trouble"] = (
                f"it finds another secret at {where} than rank 0. If another communicator grows "
                "there, give each a name of its own: grow(name=...)"
            )
    troubles = _listed(answers, "trouble", "{}: {}")
    if troubles:
        raise RendezvousError(f"{who} cannot {CALL}: {troubles}. The communicator stays usable")
    if unread := _listed(answers, "unread", "{} has {}"):
        raise MismatchError(
            f"{who} cannot grow while messages wait to be received, because they would be lost: "
            f"{unread}. Receive them first. The communicator stays usable"
        )


def _listed(answers: list[dict[str, Any]], name: str, form: str) -> str:
    """Return what some of the ranks say, for messages; empty: no rank says anything."""
    found = [(rank, said[name]) for rank, said in enumerate(answers) if said.get(name)]
    return "; ".join(form.format(f"rank {rank}", text) for rank, text in found[:5])


def give_up_growth(group: Group) -> GpucollError:
    """Return the error for a growth that another rank has given up, which breaks the old group."""
    group.abort(Abort.INTERRUPTED)
    try:
        group.raise_if_aborted()
    except GpucollError as error:
        return error
    raise AssertionError("a communicator that is given up says so")
